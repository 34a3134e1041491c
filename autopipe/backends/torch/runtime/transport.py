"""Process groups and messages: NCCL where each rank has a GPU of its own, gloo elsewhere."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from autopipe.backends.torch.runtime.allocator import keep_freed_memory
from autopipe.backends.torch.runtime.at_once import (
    everyones,
    goes_at_once,
    is_summed_at_once,
    start_sum,
    start_sum_of_rows,
)
from autopipe.backends.torch.runtime.blocks import Form
from autopipe.backends.torch.runtime.departures import SendQueue
from autopipe.backends.torch.runtime.gloo_threads import give_way, patient_threads
from autopipe.backends.torch.runtime.manifest import ChannelEntry
from autopipe.backends.torch.runtime.meeting import ControlGroup
from autopipe.backends.torch.runtime.pending import PendingRecv, PendingReduce, PendingSend
from autopipe.backends.torch.runtime.processors import has_more_ranks_than_cores, pin_to_cores
from autopipe.backends.torch.runtime.pulse import DEFAULTS, Heartbeat, Timeouts
from autopipe.backends.torch.runtime.rings import RecvBufferPool
from autopipe.backends.torch.runtime.signed_store import KEY, SignedStore, Signer
from autopipe.ir.errors import LaunchError

ATTEMPT = "AUTOPIPE_ATTEMPT"
"""Environment variable that tells apart the attempts of one launch, where the launcher keeps the store."""


class Transport:
    """This rank's ends of all channels and groups.

    Messages of one channel arrive in the order sent. Work handles are kept until waited for: gloo drops messages whose
    handle is gone. Where ranks share a GPU, which NCCL refuses, tensors travel through pinned host memory.
    """

    def __init__(self, device: str, timeouts: Timeouts = DEFAULTS, pulse: Heartbeat | None = None) -> None:
        self.timeouts = timeouts
        self.pulse = pulse or Heartbeat()
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = _choose_device(device)
        if self.device.type == "cpu":
            keep_freed_memory()
        self._local_world = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.world_size)))
        self.nccl = self.device.type == "cuda" and self._local_world <= torch.cuda.device_count()
        self.staged = self.device.type == "cuda" and not self.nccl
        self._gives_way = not self.nccl and not has_more_ranks_than_cores(self._local_world)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._channels: dict[tuple[int, bool], dist.ProcessGroup] = {}
        self._rings: dict[tuple[int, bool], RecvBufferPool] = {}
        self._departures = SendQueue(watched=not self.nccl)
        self.traffic: Counter[str] = Counter()
        """What this step's exchanges have moved so far, in bytes by kind (`ir/traffic.py`)."""
        self._meetings: list[ControlGroup] = []
        self._joined = False
        self._store: Store | None = None
        """Kept here, as `SignedStore` wants it."""

    def start(self) -> None:
        """Join the world, with threads that keep to the rank's processors unless NCCL does the exchanges.

        A world of one needs no process group; a process that is in a world already stays in it.
        """
        if self.world_size == 1 or dist.is_initialized():
            return
        if not self.nccl and "LOCAL_RANK" in os.environ:
            pin_to_cores(int(os.environ["LOCAL_RANK"]), self._local_world)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        backend = "cpu:gloo,cuda:nccl" if self.nccl else "gloo"
        # Others may come late from their start, and then be late with a task: the launcher finds out sooner who hangs.
        patience = timedelta(seconds=self.timeouts.start_s + self.timeouts.step_s)
        self._store = _launchers_store(patience, signed=not self.nccl)
        store = None if self._store is None else PrefixStore(os.environ[ATTEMPT], self._store)
        with self.pulse.waiting(), patient_threads():
            dist.init_process_group(backend, rank=self.rank, world_size=self.world_size, timeout=patience, store=store)
        self._joined = True

    def make_control_group(self) -> ControlGroup:
        """A meeting of all ranks that waits for the slowest one's files to be on the disk."""
        patience_s = self.timeouts.checkpoint_s + self.timeouts.step_s
        meeting = ControlGroup(self.rank, self.world_size, patience_s, self.pulse)
        self._meetings.append(meeting)
        return meeting

    def make_groups(self, members: Iterable[tuple[int, ...]]) -> None:
        """Make all groups that any rank needs, in the same order everywhere, before the first step."""
        for ranks in sorted(set(members)):
            if 1 < len(ranks) < self.world_size and ranks not in self._groups:
                with self.pulse.waiting(), patient_threads():
                    self._groups[ranks] = dist.new_group(list(ranks))

    def make_channels(self, channels: Iterable[ChannelEntry]) -> None:
        """Channels in global order. NCCL orders messages by communicator alone, so every channel and direction has its
        own there; gloo tells them apart by tag."""
        for each in channels:
            for gradient, buffers in ((False, each.buffers), (True, each.gradient_buffers)):
                self._rings[each.number, gradient] = RecvBufferPool(buffers)
                if self.nccl:
                    with self.pulse.waiting():
                        self._channels[each.number, gradient] = dist.new_group([each.source, each.target])

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of these ranks; None stands for the whole world."""
        return self._groups.get(ranks)

    def send(self, tensor: torch.Tensor, rank: int, channel: int, gradient: bool) -> PendingSend:
        """Send without waiting."""
        self.traffic["send"] += tensor.nbytes
        tensor = tensor.detach().contiguous()
        if self.staged:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor)
            tensor = host
        work = dist.isend(tensor, rank, group=self._channels.get((channel, gradient)), tag=_tag(channel, gradient))
        departure = PendingSend(work, tensor)
        self._departures.add(departure)
        if self._gives_way:
            give_way()
        return departure

    def receive(self, like: Form, rank: int, channel: int, gradient: bool) -> PendingRecv:
        """Post a receive; the arrival is waited for where the tensor is used."""
        dtype, shape = like
        if self.staged:  # Torch keeps pinned memory for its next use, once copies from it are done.
            buffer = torch.empty(shape, dtype=dtype, pin_memory=True)
        else:
            buffer = self._rings[channel, gradient].take(shape, dtype, self.device)
        work = dist.irecv(buffer, rank, group=self._channels.get((channel, gradient)), tag=_tag(channel, gradient))
        if work is None:
            raise LaunchError(f"rank {self.rank} cannot receive from rank {rank}")
        if self._gives_way:
            give_way()
        return PendingRecv(work, buffer, self.device)

    def start_all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> PendingRecv | PendingReduce:
        """Start adding up a gradient over the ranks; it may be done in place."""
        self.traffic["gradient"] += tensor.nbytes
        group = self.group(ranks)
        if is_summed_at_once(tensor, group):
            return start_sum(tensor, group)
        return self._start_in_place(tensor, ranks)

    def _start_in_place(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> PendingRecv:
        work: dist.Work | None = dist.all_reduce(tensor, group=self.group(ranks), async_op=True)
        if work is None:
            raise LaunchError(f"rank {self.rank} is not among ranks {ranks}")
        return PendingRecv(work, tensor, tensor.device)

    def start_reduce_scatter(self, row: torch.Tensor, ranks: tuple[int, ...]) -> PendingRecv | PendingReduce:
        """Start adding up gradients over the ranks, of which this rank gets its share of the sums."""
        self.traffic["gradient"] += row.nbytes
        if self.staged:  # gloo scatters tensors of the host alone.
            sums = self._start_in_place(row, ranks)
            return replace(sums, buffer=row.chunk(len(ranks))[ranks.index(self.rank)])
        group = self.group(ranks)
        if goes_at_once(row, group):
            return start_sum_of_rows(row.view(len(ranks), -1), group)
        parts = list(row.chunk(len(ranks)))
        share = torch.empty_like(parts[0])
        started: dist.Work | None = dist.reduce_scatter(share, parts, group=group, async_op=True)
        if started is None:
            raise LaunchError(f"rank {self.rank} is not among ranks {ranks}")
        return PendingRecv(started, share, share.device, row)

    def gather(self, row: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """Fill a row, of which each of the ranks has its share in place. Counted by who asks for it."""
        parts = list(row.chunk(len(ranks)))
        own, group = parts[ranks.index(self.rank)], self.group(ranks)
        if goes_at_once(row, group):
            row.view(len(ranks), -1).copy_(everyones(own, group))
        else:
            dist.all_gather(parts, own, group=group)

    def gather_numbers(self, numbers: list[float]) -> list[list[float]]:
        """Every rank's numbers, by rank."""
        if self.world_size == 1:
            return [numbers]
        own = torch.tensor(numbers, dtype=torch.float64)
        if goes_at_once(own, None):
            with self.pulse.waiting():
                return [row.tolist() for row in everyones(own, None)]
        parts = [torch.empty_like(own) for _ in range(self.world_size)]
        with self.pulse.waiting():
            dist.all_gather(parts, own)
        return [part.tolist() for part in parts]

    def finish(self) -> None:
        """Wait for every message sent."""
        self._departures.finish()

    def stop(self) -> None:
        """Leave all groups, and the world if `start` joined it.

        All ranks together: gloo aborts a rank whose peer goes away while it closes its threads.
        """
        self._departures.close()
        if not dist.is_initialized():
            return
        with self.pulse.waiting():
            dist.barrier()
        if self._joined:
            dist.destroy_process_group()
        else:
            for group in (*self._groups.values(), *self._channels.values()):
                dist.destroy_process_group(group)
            for meeting in self._meetings:
                meeting.close()
        self._groups.clear()
        self._channels.clear()
        self._meetings.clear()


def _launchers_store(patience: timedelta, signed: bool) -> Store | None:
    """The launcher's store; None where another program started the rank, so that torch shall find or make one.

    NCCL's own threads look into the store, also while they are ended, when they must not wait for Python: not signed.
    """
    if ATTEMPT not in os.environ:
        return None
    signer = Signer(bytes.fromhex(os.environ.pop(KEY)), os.environ["TORCHELASTIC_RUN_ID"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=patience)
    return SignedStore(store, signer, patience) if signed else store


def _tag(channel: int, gradient: bool) -> int:
    return 2 * channel + int(gradient)


def _choose_device(wanted: str) -> torch.device:
    if wanted in ("cpu", "meta") or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError("no CUDA device is at hand", hint="use --device cpu")
    local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
