"""NCCL communicators: one for each process group, one for each ordered pair of ranks with P2P
communication.

NCCL creates a communicator at its first use and blocks the host until the peer uses it too.
Receives are posted early, so lazily created communicators could make ranks wait for one another in
a cycle. So all communicators are created and used once before the first step, in an order that
every rank derives from the program.
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
from autopipe.ir.cluster import MAX_P2P_CTAS
from autopipe.ir.errors import LaunchError
from autopipe.ir.program import Channel
from autopipe.ir.words import plural

MessagePath = tuple[int, int]
"""(source, target) ranks of P2P communication."""

_MAX_P2P_CTAS = 4
"""Maximum number of CTAs (CUDA thread blocks) of a P2P communicator."""


def message_path(channel: Channel, gradient: bool) -> MessagePath:
    """Return the (source, target) ranks of a channel's tensors, or of their gradients."""
    ends = channel.source_rank, channel.target_rank
    return ends[::-1] if gradient else ends


def message_paths(channels: Iterable[Channel]) -> set[MessagePath]:
    """Return the (source, target) rank pairs that exchange activations or gradients in a step."""
    return {
        message_path(each, gradient)
        for each in channels
        for gradient, buffers in ((False, each.buffers), (True, each.gradient_buffers))
        if buffers
    }


_Key = TypeVar("_Key", bound=Hashable)


def order_in_rounds(members: Mapping[_Key, tuple[int, ...]]) -> list[_Key]:
    """Return the keys, sorted by round. No rank is a member of two keys of one round, so the ranks
    of a round do not wait for one another. Each key gets the earliest free round in the order of
    `members`. A chain of ranks, of any length, takes two rounds if its pairs are given from one
    end to the other.
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
    """A rank's communicators. All ranks must call the same methods with equal arguments in the same
    order.
    """

    def __init__(self, rank: int, device: torch.device, patience: timedelta) -> None:
        self.groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        """By ascending ranks of the group."""
        self.messages: dict[MessagePath, dist.ProcessGroup] = {}
        self._rank = rank
        self._device = device
        self._patience = patience
        self._first: list[dist.Work] = []
        """Handles of the first use of each communicator, which makes the connection."""

    def make_groups(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Create the communicators of `groups`, each given as ascending ranks."""
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
        """Create the P2P communicators that `channels` use."""
        paths = message_paths(channels)
        of_rank = Counter(rank for path in paths for rank in path)
        for path in order_in_rounds({path: path for path in sorted(paths - self.messages.keys())}):
            # Both ends compute the same value: the smaller of their fractions of the CTAs.
            fraction = MAX_P2P_CTAS // max(of_rank[rank] for rank in path)
            if (
                made := self._make(path, most_ctas=max(1, min(_MAX_P2P_CTAS, fraction)))
            ) is not None:
                self.messages[path] = made
                source, target = path
                act, peer = (dist.isend, target) if self._rank == source else (dist.irecv, source)
                self._first.append(
                    exchange([dist.P2POp(act, torch.zeros(1, device=self._device), peer, made)])
                )

    def _make(self, ranks: tuple[int, ...], most_ctas: int = 0) -> dist.ProcessGroup | None:
        """Return a new communicator of `ranks`, None if this rank is not a member. `most_ctas` is
        the maximum number of CTAs of a P2P communicator, which gets a high-priority stream; 0 for a
        group.

        Ranks that are not members call `new_group` too, which only counts the group for them. 1,920
        calls take 0.05 s, and there is no barrier unless TORCH_DIST_INIT_BARRIER requests one. With
        `use_local_synchronization` only members would have to call. But then torch derives a
        group's name from the number of groups that the rank has created, and the members may have
        created different numbers, so they would not find one another.
        """
        options = None
        if self._rank in ranks:
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=most_ctas > 0)
            set_timeout(options, self._patience)
            options.config.blocking = (
                1  # Otherwise `new_group` may return before the communicator exists.
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
        """Wait until each communicator has been used once, on all ranks."""
        for work in self._first:
            work.wait()
        self._first.clear()
        torch.cuda.synchronize(self._device)
        dist.barrier()


def exchange(operations: list[dist.P2POp]) -> dist.Work:
    """Start P2P operations between this rank and one other as one batch over one communicator.

    A single operation also uses a batch: otherwise torch may create another communicator for it at
    its first use.
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
"""Element types that torch passes to NCCL in all supported versions."""


def as_nccl_type(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a view of its bytes if NCCL does not support its element type. The tensor
    must be contiguous.
    """
    return tensor if tensor.dtype in _NCCL_TYPES else tensor.view(-1).view(torch.uint8)


def check_sum(tensor: torch.Tensor) -> None:
    """Raise LaunchError if NCCL cannot compute the sum or maximum of tensors of this type."""
    if tensor.dtype not in _NCCL_TYPES:
        raise LaunchError(
            "NCCL cannot compute a sum or maximum of type "
            f"{str(tensor.dtype).removeprefix('torch.')}",
            hint="cast the tensor to int32 in the model, or place its operator on one device",
        )


def gpu_of_rank(device: torch.device) -> str:
    """Return a name of the GPU that is unique in the cluster; "" for the CPU. NCCL distinguishes
    hosts by NCCL_HOSTID if it is set, otherwise by hostname.
    """
    if device.type != "cuda":
        return ""
    host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    return f"{host} GPU {torch.cuda.get_device_properties(device).uuid}"


def agree_on_nccl(store: Store, rank: int, world_size: int, gpu: str) -> tuple[bool, str]:
    """Return (uses_nccl, reason), equal on all ranks.

    uses_nccl: True if tensors are exchanged over NCCL. Rank 0 decides: each rank must have a GPU
    that no other rank uses. reason: a line for the user, "" if no rank has a GPU.
    """
    store.set(f"gpu of rank {rank}", gpu)
    if rank == 0:
        gpus = [store.get(f"gpu of rank {each}").decode() for each in range(world_size)]
        store.set("transport", _reason_not_to_use_nccl(gpus))
    against = store.get("transport").decode()
    if against == _NO_GPU:
        return False, ""
    why = against or f"{world_size} {plural(world_size, 'rank has', 'ranks have')} a GPU each"
    return not against, f"ranks exchange tensors over {'gloo' if against else 'NCCL'}: {why}"


_NO_GPU = "no rank has a GPU"


def _reason_not_to_use_nccl(gpus: list[str]) -> str:
    """Return the reason why NCCL cannot be used, "" if it can. `gpus` has `gpu_of_rank` of each
    rank.
    """
    if not any(gpus):
        return _NO_GPU
    if "" in gpus:
        return f"rank {gpus.index('')} has no GPU"
    for rank, gpu in enumerate(gpus):
        if (first := gpus.index(gpu)) != rank:
            return f"ranks {first} and {rank} share {gpu}"
    return ""
