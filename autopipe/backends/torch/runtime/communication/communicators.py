"""NCCL communicators of a rank: one for each process group of which the rank is a member, and one
for each ordered pair of ranks that exchange tensors by P2P.

By default, NCCL creates a communicator at its first use and blocks the host until the peer uses it
too. A program posts receives early, so ranks that create communicators at first use could wait for
one another in a cycle. So all communicators are created and used once before the first step, in an
order that every rank derives from the program.
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

RankPair = tuple[int, int]
"""(sender, receiver): the global ranks at the two ends of a P2P communicator."""

_MAX_P2P_CTAS = 4
"""Maximum number of CTAs (CUDA thread blocks) that NCCL uses for one P2P communicator."""


def sender_and_receiver(channel: Channel, gradient: bool) -> RankPair:
    """Return the (sender, receiver) ranks of a channel's tensors or, with `gradient`, of the
    gradients of these tensors, which go in the opposite direction.
    """
    ends = channel.source_rank, channel.target_rank
    return ends[::-1] if gradient else ends


def rank_pairs_of_channels(channels: Iterable[Channel]) -> set[RankPair]:
    """Return the (sender, receiver) rank pairs of all activations and gradients that `channels`
    transfer in a step.
    """
    return {
        sender_and_receiver(each, gradient)
        for each in channels
        for gradient, buffers in ((False, each.buffers), (True, each.gradient_buffers))
        if buffers
    }


_Key = TypeVar("_Key", bound=Hashable)


def order_in_rounds(members: Mapping[_Key, tuple[int, ...]]) -> list[_Key]:
    """Return the keys of `members` in an order in which communicators can be created with little
    waiting. `members` maps each key to the ranks that create its communicator.

    Keys are assigned to rounds and returned round by round. No rank belongs to two keys of one
    round, so the creations of a round do not wait for one another. In the order of `members`, each
    key gets the earliest round in which all its ranks are free. A chain of ranks, of any length,
    takes two rounds if its pairs are given from one end to the other.
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
    """The NCCL communicators of one rank. Creation is collective: all ranks must call the same
    methods with equal arguments in the same order.
    """

    def __init__(self, rank: int, device: torch.device, patience: timedelta) -> None:
        """`patience` is the time-out of operations on the communicators."""
        self.groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        """Communicators of the process groups of this rank, by the ascending ranks of the group."""
        self.messages: dict[RankPair, dist.ProcessGroup] = {}
        """Communicators of the P2P communication of this rank, by (sender, receiver)."""
        self._rank = rank
        self._device = device
        self._patience = patience
        self._first: list[dist.Work] = []
        """Handles of the first operation on each communicator. This operation establishes the
        connections.
        """

    def make_group_communicators(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Create the communicators of process groups that do not exist yet, and start a first
        all-reduce on each. A group is given as its ranks in ascending order.
        """
        for ranks in order_in_rounds(
            {ranks: ranks for ranks in sorted(set(groups) - self.groups.keys())}
        ):
            if (made := self._make_communicator(ranks)) is not None:
                self.groups[ranks] = made
                work = dist.all_reduce(
                    torch.zeros(1, device=self._device), group=made, async_op=True
                )
                assert work is not None, "a member gets a handle"
                self._first.append(work)

    def make_p2p_communicators(self, channels: Iterable[Channel]) -> None:
        """Create the P2P communicators for `channels` that do not exist yet, and start a first
        transfer on each.
        """
        paths = rank_pairs_of_channels(channels)
        of_rank = Counter(rank for path in paths for rank in path)
        for path in order_in_rounds({path: path for path in sorted(paths - self.messages.keys())}):
            # A rank divides MAX_P2P_CTAS, its limit of CUDA thread blocks (CTAs), evenly among its
            # P2P communicators. The two ranks of a communicator may compute different limits, so
            # both use the smaller limit.
            fraction = MAX_P2P_CTAS // max(of_rank[rank] for rank in path)
            if (
                made := self._make_communicator(
                    path, most_ctas=max(1, min(_MAX_P2P_CTAS, fraction))
                )
            ) is not None:
                self.messages[path] = made
                source, target = path
                act, peer = (dist.isend, target) if self._rank == source else (dist.irecv, source)
                self._first.append(
                    start_p2p_batch(
                        [dist.P2POp(act, torch.zeros(1, device=self._device), peer, made)]
                    )
                )

    def _make_communicator(
        self, ranks: tuple[int, ...], most_ctas: int = 0
    ) -> dist.ProcessGroup | None:
        """Return a new communicator of `ranks`, None if this rank is not a member. `most_ctas` is
        the maximum number of CTAs of a P2P communicator, which uses a high-priority stream; 0 if
        the communicator is for collectives.

        Ranks that are not members must call `new_group` too, because torch counts the groups to
        derive their names. 1,920 such calls take 0.05 s, and `new_group` has no barrier unless
        TORCH_DIST_INIT_BARRIER requests one. With `use_local_synchronization` only the members
        would call `new_group`. But then the members of a group may have counted different numbers
        of groups, would derive different names, and would not find one another.
        """
        options = None
        if self._rank in ranks:
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=most_ctas > 0)
            set_timeout(options, self._patience)
            options.config.blocking = (
                # The value 1 selects a blocking communicator. Otherwise, `new_group` may return
                # before NCCL has created the communicator.
                1
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

    def wait_until_connected(self) -> None:
        """Wait until the first operation on each communicator has ended, on all ranks. Collective
        over all ranks.
        """
        for work in self._first:
            work.wait()
        self._first.clear()
        torch.cuda.synchronize(self._device)
        dist.barrier()


def start_p2p_batch(operations: list[dist.P2POp]) -> dist.Work:
    """Start P2P operations between this rank and one peer as one batch, and return its handle. All
    operations must use the same communicator.

    A single operation is also started as a batch, because for a single operation torch may create
    another communicator at its first use.
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
"""Element types that torch passes to NCCL in all supported torch versions."""


def as_nccl_type(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` if NCCL supports its element type, otherwise a one-dimensional view of its
    bytes (uint8). `tensor` must be contiguous.
    """
    return tensor if tensor.dtype in _NCCL_TYPES else tensor.view(-1).view(torch.uint8)


def check_reducible(tensor: torch.Tensor) -> None:
    """Raise LaunchError if NCCL cannot compute the sum or maximum of tensors of the element type of
    `tensor`.
    """
    if tensor.dtype not in _NCCL_TYPES:
        raise LaunchError(
            "NCCL cannot compute a sum or maximum of type "
            f"{str(tensor.dtype).removeprefix('torch.')}",
            hint="cast the tensor to int32 in the model, or place its operator on one device",
        )


def unique_gpu_name(device: torch.device) -> str:
    """Return a name of the GPU `device` that is unique in the cluster; "" if `device` is not a GPU.
    The name contains the host: NCCL_HOSTID if it is set, as in NCCL, otherwise the hostname.
    """
    if device.type != "cuda":
        return ""
    host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    return f"{host} GPU {torch.cuda.get_device_properties(device).uuid}"


def agree_on_nccl(store: Store, rank: int, world_size: int, gpu: str) -> tuple[bool, str]:
    """Return (uses_nccl, reason), equal on all ranks. `gpu` is the `unique_gpu_name` of this rank.
    Each rank writes its GPU to `store`, and rank 0 decides.

    uses_nccl: True if ranks exchange tensors over NCCL, which requires that each rank has a GPU
    that no other rank uses. Otherwise they use gloo.
    reason: a line for the user that states the decision and its reason; "" if no rank has a GPU.
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
    """Return the reason why ranks cannot use NCCL, "" if they can. `gpus[r]` is the
    `unique_gpu_name` of rank r.
    """
    if not any(gpus):
        return _NO_GPU
    if "" in gpus:
        return f"rank {gpus.index('')} has no GPU"
    for rank, gpu in enumerate(gpus):
        if (first := gpus.index(gpu)) != rank:
            return f"ranks {first} and {rank} share {gpu}"
    return ""
