"""NCCL communicators: one for each set of ranks that form a group, one for each ordered pair that
exchange messages.

A communicator that is made by its first message blocks the host until the other end gets there, and
receives are posted early: ranks would wait in circles. So all are made, and used once, before the
first step, in one order that every rank derives from the program.
"""

from __future__ import annotations

import os
import socket
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from datetime import timedelta
from itertools import count
from typing import TypeVar

import torch
import torch.distributed as dist

from autopipe.backends.torch.torch_interfaces import Store, set_timeout
from autopipe.ir.cluster import MESSAGE_CTAS
from autopipe.ir.errors import LaunchError
from autopipe.ir.program import Channel
from autopipe.ir.words import plural

MessagePath = tuple[int, int]
"""Source and target of messages."""

_MOST_CTAS = 4
"""Of one communicator of messages."""


def message_path(channel: Channel, gradient: bool) -> MessagePath:
    ends = channel.source_rank, channel.target_rank
    return ends[::-1] if gradient else ends


def message_paths(channels: Iterable[Channel]) -> set[MessagePath]:
    """Of all that is sent in a step: gradients where any come back."""
    return {
        message_path(each, gradient)
        for each in channels
        for gradient, buffers in ((False, each.buffers), (True, each.gradient_buffers))
        if buffers
    }


_Key = TypeVar("_Key", bound=Hashable)


def order_in_rounds(members: Mapping[_Key, tuple[int, ...]]) -> list[_Key]:
    """The keys in rounds, in each of which no rank is a member twice: its ranks need not wait for
    one another. A chain of ranks takes two rounds, however long it is. Keys that come first are in
    early rounds.
    """
    busy = defaultdict[int, set[int]](set)
    rounds: dict[_Key, int] = {}
    for key, ranks in members.items():
        taken = set[int]().union(*(busy[rank] for rank in ranks))
        rounds[key] = next(number for number in count() if number not in taken)
        for rank in ranks:
            busy[rank].add(rounds[key])
    return sorted(members, key=rounds.__getitem__)


class NcclCommunicators:
    """A rank's communicators. All ranks call the same methods with the same arguments, in the same
    order.
    """

    def __init__(self, rank: int, device: torch.device, patience: timedelta) -> None:
        self.groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        """By their ranks, ascending."""
        self.messages: dict[MessagePath, dist.ProcessGroup] = {}
        self._rank = rank
        self._device = device
        self._patience = patience
        self._first: list[dist.Work] = []
        """First uses, which make connections."""

    def make_groups(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Make those of groups, each as ascending ranks."""
        for ranks in order_in_rounds(
            {ranks: ranks for ranks in sorted(set(groups) - self.groups.keys())}
        ):
            if (made := self._make(ranks)) is not None:
                self.groups[ranks] = made
                work = dist.all_reduce(
                    torch.zeros(1, device=self._device), group=made, async_op=True
                )
                assert work is not None, "a member gets a handle"
                self._first.append(work)

    def make_message_paths(self, channels: Iterable[Channel]) -> None:
        paths = message_paths(channels)
        of_rank = Counter(rank for path in paths for rank in path)
        for path in order_in_rounds({path: path for path in sorted(paths - self.messages.keys())}):
            # Both ends say the same: the least of what either can afford.
            share = MESSAGE_CTAS // max(of_rank[rank] for rank in path)
            if (made := self._make(path, most_ctas=max(1, min(_MOST_CTAS, share)))) is not None:
                self.messages[path] = made
                source, target = path
                act, peer = (dist.isend, target) if self._rank == source else (dist.irecv, source)
                self._first.append(
                    exchange([dist.P2POp(act, torch.zeros(1, device=self._device), peer, made)])
                )

    def _make(self, ranks: tuple[int, ...], most_ctas: int = 0) -> dist.ProcessGroup | None:
        """None where this rank is no member. `most_ctas` is given for messages, which then go first
        on the GPU.

        Those that are no members call `new_group` too, which only counts for them: 1,920 calls take
        0.05 s, and there is no barrier unless TORCH_DIST_INIT_BARRIER asks for one. With
        `use_local_synchronization` they need not, but a group's name then holds the number of
        groups that a rank has made, and its members, which may be in different numbers of groups,
        would look for one another under different names.
        """
        options = None
        if self._rank in ranks:
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=most_ctas > 0)
            set_timeout(options, self._patience)
            options.config.blocking = (
                1  # Else a communicator may not be there yet when `new_group` returns.
            )
            if most_ctas:
                options.config.max_ctas = most_ctas
        made = dist.new_group(
            list(ranks),
            timeout=self._patience,
            backend="nccl",
            pg_options=options,
            device_id=self._device,
        )
        return made if self._rank in ranks else None

    def wait_until_all_work(self) -> None:
        """Until each has been used once, on all ranks."""
        for work in self._first:
            work.wait()
        self._first.clear()
        torch.cuda.synchronize(self._device)
        dist.barrier()


def exchange(operations: list[dist.P2POp]) -> dist.Work:
    """Start messages between this rank and one other, all over one communicator, as one. A message
    alone goes this way too: outside of a batch, torch may use a communicator of its own for it,
    made when first needed.
    """
    (work,) = dist.batch_isend_irecv(operations)
    return work


_NCCL_TYPES = frozenset(
    (
        *(
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.complex64,
            torch.complex128,
        ),
        *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    )
)
"""Types that torch knows how to give to NCCL in all versions."""


def as_nccl_type(tensor: torch.Tensor) -> torch.Tensor:
    """The same contiguous memory as numbers that NCCL moves: bytes where it has no such type."""
    return tensor if tensor.dtype in _NCCL_TYPES else tensor.view(-1).view(torch.uint8)


def check_sum(tensor: torch.Tensor) -> None:
    """Raises LaunchError where NCCL cannot add up such tensors, nor compare them."""
    if tensor.dtype not in _NCCL_TYPES:
        raise LaunchError(
            f"NCCL has no sum or maximum of {str(tensor.dtype).removeprefix('torch.')}",
            hint="cast it to int32 in the model, or keep its operator on one device",
        )


def gpu_of_rank(device: torch.device) -> str:
    """The GPU, as no other in the cluster is called; "" for the CPU. NCCL tells hosts apart by
    NCCL_HOSTID if set.
    """
    if device.type != "cuda":
        return ""
    host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    return f"{host} GPU {torch.cuda.get_device_properties(device).uuid}"


def agree_on_nccl(store: Store, rank: int, world_size: int, gpu: str) -> tuple[bool, str]:
    """True if messages go over NCCL, the same on all ranks, and why; no reason where no rank has a
    GPU. Rank 0 decides by what each says of its GPU: NCCL wants one for each rank.
    """
    store.set(f"gpu of rank {rank}", gpu)
    if rank == 0:
        gpus = [store.get(f"gpu of rank {each}").decode() for each in range(world_size)]
        store.set("transport", _reason_against_nccl(gpus))
    against = store.get("transport").decode()
    if against == _NO_GPU:
        return False, ""
    why = against or f"{world_size} {plural(world_size, 'rank has', 'ranks have')} a GPU each"
    return not against, f"ranks exchange tensors over {'gloo' if against else 'NCCL'}: {why}"


_NO_GPU = "no rank has a GPU"


def _reason_against_nccl(gpus: list[str]) -> str:
    """ "" where there is none."""
    if not any(gpus):
        return _NO_GPU
    if "" in gpus:
        return f"rank {gpus.index('')} has no GPU"
    for rank, gpu in enumerate(gpus):
        if (first := gpus.index(gpu)) != rank:
            return f"ranks {first} and {rank} share {gpu}"
    return ""
