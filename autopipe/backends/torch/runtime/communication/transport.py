"""Process groups and messages of a rank: tensors go over NCCL where each rank has a GPU of its own,
else over gloo, and so does all that is no tensor of a step.

Collectives of tensors in host memory are direct: every rank sends to all others at once. Gloo's own
go round a ring, and its reduce-scatter sets one up each time. Where ranks share processors, each
step of a ring waits until the next rank has one. `benchmarks/gloo_collectives.py` holds both ways
against each other.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from autopipe.backends.torch.runtime.communication.communicators import (
    MessagePath,
    NcclCommunicators,
    agree_on_nccl,
    as_nccl_type,
    check_sum,
    exchange,
    gpu_of_rank,
    message_path,
)
from autopipe.backends.torch.runtime.communication.signed_store import KEY, SignedStore, Signer
from autopipe.backends.torch.runtime.host import (
    has_more_ranks_than_cores,
    keep_freed_memory,
    patient_threads,
    pin_near,
    pin_to_cores,
)
from autopipe.backends.torch.runtime.watch.failures import Failure, failure_of
from autopipe.backends.torch.runtime.watch.heartbeat import DEFAULTS, Heartbeat, Timeouts
from autopipe.backends.torch.torch_interfaces import (
    PrefixStore,
    Store,
    TCPStore,
    all_gather_flat,
    reduce_scatter_flat,
    storage_users,
)
from autopipe.ir.errors import AutopipeError, LaunchError
from autopipe.ir.program import HARDWARE_QUEUES, Channel

Form = tuple[torch.dtype, tuple[int, ...]]  # A tensor's type and shape.


@dataclass(slots=True)
class PendingRecv:
    """A tensor that arrives; or, with `reduce`, tensors of all ranks, [ranks, ...], of which the
    sum or maximum is.
    """

    work: dist.Work | None
    buffer: torch.Tensor
    device: torch.device
    sent: torch.Tensor | None = (
        None  # Tensor sent by the same exchange, which must stay alive until it is done.
    )
    reduce: dist.ReduceOp.RedOpType | None = None

    def wait(self) -> torch.Tensor:
        """The tensor, once it is there. Over NCCL it is the device's current stream that waits."""
        if self.work is not None:
            self.work.wait()
            self.work = self.sent = None  # Gloo would wait a second time for ever.
        if self.reduce == dist.ReduceOp.MAX:
            return self.buffer.amax(0)
        if self.reduce is not None:  # Added up in the order of ranks, so that all have the same.
            return self.buffer.sum(0, dtype=self.buffer.dtype)
        return (
            self.buffer
            if self.buffer.device == self.device
            else self.buffer.to(self.device, non_blocking=True)
        )


class PendingSend:
    """A tensor that is being sent; it must not change or go away before it is gone."""

    def __init__(self, work: dist.Work | None, tensor: torch.Tensor) -> None:
        self.work = work
        self.tensor: torch.Tensor | None = tensor
        self.bytes = tensor.nbytes
        self._lock = threading.Lock()

    def is_gone(self) -> bool:
        return self.work is None or self.work.is_completed()

    def wait(self) -> None:
        """Wait until it has been sent, and let it go; several threads may."""
        with self._lock:
            if self.work is not None:
                self.work.wait()
                self.work = None  # Gloo would wait a second time for ever.
            self.tensor = None


_HELD_BYTES = 4 * 2**20
"""A rank may hold so much of messages that are gone. To have a thread wait for a message takes up
to 0.1 ms of the rank's own time, which is more than small ones take themselves.
"""


class SendQueue:
    """All messages of a rank that are under way."""

    def __init__(self, watched: bool, most_bytes: int = _HELD_BYTES) -> None:
        """`watched`: only whoever waits for a message learns that it has been sent, as with gloo.
        All are then held until the step's end, up to `most_bytes`; beyond that a thread waits for
        the earliest.
        """
        self._watched = watched
        self._most_bytes = most_bytes
        self._under_way: deque[PendingSend] = deque()
        self._held_bytes = 0
        self._thread = ThreadPoolExecutor(1, "sends")
        self._waited_for: deque[Future[None]] = deque()

    def add(self, message: PendingSend) -> None:
        """Hold a message until it is gone. Raises what an earlier one ended with."""
        while self._waited_for and self._waited_for[0].done():
            self._forget_one()
        self._under_way.append(message)
        self._held_bytes += message.bytes
        if not self._watched:
            while self._under_way and self._under_way[0].is_gone():
                self._earliest()
            return
        while self._held_bytes > self._most_bytes:
            self._waited_for.append(self._thread.submit(self._earliest().wait))

    def _earliest(self) -> PendingSend:
        earliest = self._under_way.popleft()
        self._held_bytes -= earliest.bytes
        return earliest

    def _forget_one(self) -> None:
        """Wait for the first that the thread waits for. One that failed stays, and fails all that
        come behind it.
        """
        self._waited_for[0].result()
        self._waited_for.popleft()

    def finish(self) -> None:
        """Wait until all are gone. Raises what one ended with."""
        while self._under_way:
            self._earliest().wait()
        while self._waited_for:
            self._forget_one()

    def close(self) -> None:
        self._thread.shutdown()


class RecvBufferPool:
    """The buffers of one channel in one direction, all of one shape, that of the last message; made
    when first needed.

    A buffer is free when nothing but the pool holds its memory: no view of it, no operator that
    keeps it for backward, no message that forwards it. `size` is how many a step holds at once;
    where a view lives longer, what comes meanwhile has memory of its own. On a GPU the stream that
    writes a message first waits for all that was launched before its receive was posted, so for the
    last reader too.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._buffers: list[torch.Tensor] = []

    def take(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if self._buffers and self._buffers[0].shape != shape:
            self._buffers.clear()
        for place, buffer in enumerate(self._buffers):
            if (
                storage_users(buffer.untyped_storage()) == 2
            ):  # The buffer, and the storage's own object.
                self._buffers.append(self._buffers.pop(place))
                return buffer.detach()
        found = torch.empty(shape, dtype=dtype, device=device)
        if len(self._buffers) < self._size:
            self._buffers.append(found)
        return found.detach()


_SMALL_BYTES = 1 << 17
"""Tensors up to here are summed by sending each rank's to all: larger ones would be sent too often.
"""


def is_direct(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """True where every rank sends to all others directly: tensors in host memory, over gloo."""
    return tensor.device.type == "cpu" and dist.get_backend(group) == "gloo"


def start_direct_exchange(
    rows: torch.Tensor,
    group: dist.ProcessGroup | None,
    reduce: dist.ReduceOp.RedOpType | None = None,
) -> PendingRecv:
    """Start sending row i to rank i; what arrives is row i from rank i, or with `reduce` the sum of
    all or maximum.
    """
    rows = rows.detach().contiguous()
    received = torch.empty_like(rows)
    work = dist.all_to_all_single(received, rows, group=group, async_op=True)
    return PendingRecv(_started(work), received, received.device, rows, reduce)


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise LaunchError("this rank is not in the group that exchanges")
    return work


def to_all(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Rows of a direct exchange in which every rank of the group gets the tensor."""
    return tensor.expand(dist.get_world_size(group), *tensor.shape)


def all_gather(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """The tensors of all ranks of the group, by rank, [ranks, ...]; written into `rows` where those
    are given.
    """
    if is_direct(tensor, group):
        gathered = start_direct_exchange(to_all(tensor, group), group).wait()
        return gathered if rows is None else rows.copy_(gathered)
    if rows is None:
        rows = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    if dist.get_backend(group) == "gloo":
        dist.all_gather(list(rows.unbind()), tensor.contiguous(), group=group)
    else:
        all_gather_flat(
            as_nccl_type(rows).view(-1), as_nccl_type(tensor.contiguous()).view(-1), group=group
        )
    return rows


def start_all_reduce(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    in_place: bool = True,
) -> PendingRecv:
    """Start adding up all ranks' tensors, or take what else `how` says of them; large ones in
    place, if allowed.
    """
    if tensor.nbytes <= _SMALL_BYTES and is_direct(tensor, group):
        return start_direct_exchange(to_all(tensor, group), group, how)
    if dist.get_backend(group) == "nccl":
        check_sum(tensor)
    total = tensor if in_place else tensor.clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(total, how, group=group, async_op=True)
    return PendingRecv(_started(work), total, total.device)


def start_reduce_scatter(rows: torch.Tensor, group: dist.ProcessGroup | None) -> PendingRecv:
    """Start adding up, of all ranks' [ranks, ...], the rows that are this rank's."""
    if is_direct(rows, group):
        return start_direct_exchange(rows, group, dist.ReduceOp.SUM)
    backend = dist.get_backend(group)
    if rows.is_cuda and backend == "gloo":  # It scatters tensors of the host alone.
        sums = start_all_reduce(rows, group, in_place=False)
        return replace(sums, buffer=sums.buffer[dist.get_rank(group)])
    if backend == "nccl":
        check_sum(rows)
    rows = rows.contiguous()
    share = torch.empty_like(rows[0])
    work = reduce_scatter_flat(share.view(-1), rows.view(-1), group=group, async_op=True)
    return PendingRecv(_started(work), share, share.device, rows)


def all_to_all(
    arrives: torch.Tensor,
    sent: torch.Tensor,
    incoming: list[int],
    outgoing: list[int],
    group: dist.ProcessGroup | None,
) -> None:
    """Send `outgoing[i]` elements of a flat tensor to rank i of the group, and put `incoming[i]`
    from it in place.
    """
    if dist.get_backend(group) == "nccl":
        size = sent.element_size()
        arrives = as_nccl_type(arrives)
        sent = as_nccl_type(sent)
        factor = size // sent.element_size()
        incoming, outgoing = ([factor * each for each in sizes] for sizes in (incoming, outgoing))
    dist.all_to_all_single(arrives, sent, incoming, outgoing, group=group)


class ControlGroup:
    """All ranks of a world, or the only one, on a process group that nothing else uses. So it may
    go on beside a step, on another thread, without its messages getting between those of the step.
    """

    def __init__(self, rank: int, world_size: int, patience_s: float, heartbeat: Heartbeat) -> None:
        """All ranks make it together. Who has not come after `patience_s` seconds is given up."""
        self.rank = rank
        self.world_size = world_size
        self.waits = False  # True if this rank has come and others have not.
        self.heartbeat = heartbeat
        self._group = None
        if world_size > 1:
            with heartbeat.waiting(), patient_threads():
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience_s))

    def _gather(self, data: bytes) -> list[bytes]:
        if self.world_size == 1:
            return [data]
        # The heartbeat is the main thread's: who waits for another thread says so there.
        with (
            self.heartbeat.waiting()
            if threading.current_thread() is threading.main_thread()
            else nullcontext()
        ):
            self.waits = True
            sizes = all_gather(torch.tensor([len(data)]), self._group).flatten().tolist()
            own = torch.zeros(max(sizes), dtype=torch.uint8)
            own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            parts = all_gather(own, self._group)
            self.waits = False
        return [part[:size].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def run_collectively(self, task: str, act: Callable[[], Any]) -> list[Any]:
        """Every rank does its part of a task; what came of each, by rank, as JSON carries it. Where
        a rank's part ends in an AutopipeError, all ranks raise it, the first by rank, as that
        rank's.
        """
        try:
            outcome = {"done": act()}
        except AutopipeError as error:
            outcome = {"failed": asdict(failure_of(error, self.rank, task))}
        outcomes = [json.loads(each) for each in self._gather(json.dumps(outcome).encode())]
        for each in outcomes:
            if "failed" in each:
                raise Failure(**each["failed"]).error()
        return [each["done"] for each in outcomes]

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


ATTEMPT = "AUTOPIPE_ATTEMPT"
"""Environment variable that tells apart the attempts of one launch, where the launcher keeps the
store.
"""


_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_MODULE_LOADING = "CUDA_MODULE_LOADING"
"""Environment variable that states when CUDA loads kernels: by default (`LAZY`) at their first
launch.

Loading a kernel may wait until the device is idle (CUDA Programming Guide, "Lazy Loading",
potential hazards). A receive that is posted early keeps the device busy until its sender has
computed. Ranks of a schedule with pipelines in both directions (Chimera, DualPipe) then wait for
one another in their first step.
"""


class Transport:
    """This rank's ends of all channels and groups. Messages of one channel arrive in the order
    sent. Work handles are kept until waited for: gloo drops messages whose handle is gone. Where
    ranks share a GPU, which NCCL refuses, tensors travel through pinned host memory.
    """

    def __init__(
        self, device: str, timeouts: Timeouts = DEFAULTS, heartbeat: Heartbeat | None = None
    ) -> None:
        self.timeouts = timeouts
        self.heartbeat = heartbeat or Heartbeat()
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = _choose_device(device)
        if self.device.type == "cpu":
            keep_freed_memory()
        self._on_cpu = device in ("cpu", "meta")  # Asked for, so on all ranks alike.
        self._local_world = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.world_size)))
        self.notices: list[str] = []
        """Lines about how ranks exchange tensors, for one rank to say."""
        # Others may come late from their start, and then be late with a task: the launcher finds
        # out sooner who hangs.
        self._patience = timedelta(seconds=self.timeouts.start_s + self.timeouts.step_s)
        self._nccl = NcclCommunicators(self.rank, self.device, self._patience)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._paths: dict[tuple[int, bool], MessagePath] = {}
        self._batch: list[tuple[dist.P2POp, PendingRecv | PendingSend]] | None = None
        self._buffers: dict[tuple[int, bool], RecvBufferPool] = {}
        self.traffic: Counter[str] = Counter()
        """Bytes moved by this step's exchanges so far, by kind (`ir/program.py`)."""
        self._control_groups: list[ControlGroup] = []
        self._joined = False
        self._store: Store | None = None  # Kept here, as `SignedStore` wants it.
        self.store: Store | None = None
        """The ranks' own, of this attempt; None where the rank is the only one, or has not joined
        the others.
        """
        self._use(nccl=False)

    def _use(self, nccl: bool) -> None:
        """Exchange tensors of steps over NCCL, or over gloo."""
        self.nccl = nccl
        self.staged = self.device.type == "cuda" and not nccl
        own_cores = not nccl and not has_more_ranks_than_cores(self._local_world)
        self._gives_way = own_cores and hasattr(os, "sched_yield")
        """True where gloo's threads get on better if this one gives way to them (`host`)."""
        self._sends = SendQueue(watched=not nccl)

    def start(self) -> None:
        """Join the world, with threads that keep to the rank's processors unless NCCL does the
        exchanges. A world of one needs no process group; a process that is in a world already stays
        in it.
        """
        if self.device.type == "cuda":
            pin_near(pci_address(self.device))
        if self.world_size == 1 or dist.is_initialized():
            return
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        with self.heartbeat.waiting():
            store = self._join_store()
        if not self.nccl and "LOCAL_RANK" in os.environ:
            pin_to_cores(int(os.environ["LOCAL_RANK"]), self._local_world)
        with self.heartbeat.waiting(), patient_threads():
            dist.init_process_group(
                "gloo",
                rank=self.rank,
                world_size=self.world_size,
                timeout=self._patience,
                store=store,
            )
        self._joined = True
        self.store = store

    def _join_store(self) -> Store:
        """The store of all ranks, over which they have agreed how to exchange tensors."""
        store: Store
        self._store = _launchers_store(self._patience, signed=True)
        if self._store is None:
            store, _, _ = next(
                rendezvous("env://", self.rank, self.world_size, timeout=self._patience)
            )
        else:
            store = PrefixStore(os.environ[ATTEMPT], self._store)
        if self._on_cpu:
            return store
        nccl, why = agree_on_nccl(store, self.rank, self.world_size, gpu_of_rank(self.device))
        self._use(nccl)
        self.notices += [why] if why else []
        if nccl:
            if int(os.environ[_QUEUES]) < HARDWARE_QUEUES:
                self.notices.append(
                    f"{_QUEUES} is {os.environ[_QUEUES]}: that the program ends is known for "
                    f"{HARDWARE_QUEUES}"
                )
            if (plain := _launchers_store(self._patience, signed=False)) is not None:
                self._store = plain
                store = PrefixStore(os.environ[ATTEMPT], plain)
        return store

    def make_control_group(self) -> ControlGroup:
        """It waits for the slowest rank's files to be on the disk."""
        patience_s = self.timeouts.checkpoint_s + self.timeouts.step_s
        control_group = ControlGroup(self.rank, self.world_size, patience_s, self.heartbeat)
        self._control_groups.append(control_group)
        return control_group

    def connect(self, groups: Iterable[tuple[int, ...]], channels: Iterable[Channel] = ()) -> None:
        """Make all groups and channels that any rank needs, in the same order everywhere, before
        the first step.
        """
        members = {tuple(sorted(ranks)) for ranks in groups if len(ranks) > 1}
        channels = tuple(channels)
        for each in channels:
            for gradient, buffers in ((False, each.buffers), (True, each.gradient_buffers)):
                self._buffers[each.number, gradient] = RecvBufferPool(buffers)
                self._paths[each.number, gradient] = message_path(each, gradient)
        with self.heartbeat.waiting(), patient_threads():
            if self.nccl:
                self._nccl.make_groups(members)
                self._nccl.make_message_paths(channels)
                self._nccl.wait_until_all_work()
                return
            for ranks in sorted(members - self._groups.keys()):
                if len(ranks) < self.world_size:
                    self._groups[ranks] = dist.new_group(list(ranks), timeout=self._patience)

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of these ranks, whatever their order; None stands for the whole world over
        gloo.
        """
        if len(ranks) == self.world_size and not self.nccl:
            return None
        return (self._nccl.groups if self.nccl else self._groups)[tuple(sorted(ranks))]

    @contextmanager
    def batch(self) -> Iterator[None]:
        """NCCL carries the messages of the block as one: all go to one rank, or come from one, over
        one communicator. Both ends put the same messages into a batch. Gloo carries each alone.
        """
        if not self.nccl:
            yield
            return
        batch: list[tuple[dist.P2POp, PendingRecv | PendingSend]] = []
        self._batch = batch
        yield
        self._batch = None
        if batch:
            self._post(batch)

    def _post(self, batch: list[tuple[dist.P2POp, PendingRecv | PendingSend]]) -> None:
        work = exchange([operation for operation, _ in batch])
        for _, pending in batch:
            pending.work = work
            if isinstance(pending, PendingSend):
                self._sends.add(pending)

    def _add(self, operation: dist.P2POp, pending: PendingRecv | PendingSend) -> None:
        """Start a message over NCCL, with the others of the batch where there is one."""
        if self._batch is None:
            self._post([(operation, pending)])
        else:
            self._batch.append((operation, pending))

    def send(self, tensor: torch.Tensor, rank: int, channel: int, gradient: bool) -> PendingSend:
        self.traffic["send"] += tensor.nbytes
        tensor = tensor.detach().contiguous()
        if self.nccl:
            group = self._nccl.messages[self._paths[channel, gradient]]
            pending = PendingSend(None, tensor)
            self._add(dist.P2POp(dist.isend, as_nccl_type(tensor), rank, group), pending)
            return pending
        if self.staged:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor)
            tensor = host
        with self.heartbeat.posting(rank, channel):
            pending = PendingSend(dist.isend(tensor, rank, tag=2 * channel + int(gradient)), tensor)
        self._sends.add(pending)
        if self._gives_way:
            os.sched_yield()
        return pending

    def recv(self, like: Form, rank: int, channel: int, gradient: bool) -> PendingRecv:
        """Post a receive; it is waited for where the tensor is used."""
        dtype, shape = like
        if self.staged:  # Torch keeps pinned memory for its next use, once copies from it are done.
            buffer = torch.empty(shape, dtype=dtype, pin_memory=True)
        else:
            buffer = self._buffers[channel, gradient].take(shape, dtype, self.device)
        if self.nccl:
            group = self._nccl.messages[self._paths[channel, gradient]]
            pending = PendingRecv(None, buffer, self.device)
            self._add(dist.P2POp(dist.irecv, as_nccl_type(buffer), rank, group), pending)
            return pending
        with self.heartbeat.posting(rank, channel):
            work = dist.irecv(buffer, rank, tag=2 * channel + int(gradient))
        if work is None:
            raise LaunchError(f"rank {self.rank} cannot receive from rank {rank}")
        if self._gives_way:
            os.sched_yield()
        return PendingRecv(work, buffer, self.device)

    def start_all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> PendingRecv:
        """Start adding up a gradient over the ranks; it may be done in place."""
        self.traffic["gradient"] += tensor.nbytes
        return start_all_reduce(tensor, self.group(ranks))

    def start_reduce_scatter(self, row: torch.Tensor, ranks: tuple[int, ...]) -> PendingRecv:
        """Start adding up gradients over the ranks, of which this rank gets its share of the
        sums.
        """
        self.traffic["gradient"] += row.nbytes
        return start_reduce_scatter(row.view(len(ranks), -1), self.group(ranks))

    def gather(self, row: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """Fill a row, of which each of the ranks has its share in place. Counted by who asks for
        it.
        """
        rows = row.view(len(ranks), -1)
        all_gather(rows[ranks.index(self.rank)], self.group(ranks), rows)

    def maximum(self, number: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks' numbers, on the device, []. Not counted as a step's."""
        return self._of_all_ranks(number, dist.ReduceOp.MAX)

    def total(self, number: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' numbers, on the device, [], the same on all. Not counted as a
        step's.
        """
        return self._of_all_ranks(number, dist.ReduceOp.SUM)

    def _of_all_ranks(self, number: torch.Tensor, how: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.world_size == 1:
            return number
        return start_all_reduce(number, self.group(tuple(range(self.world_size))), how).wait()

    def total_over(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> torch.Tensor:
        """The sum of the ranks' tensors. Not counted as a step's."""
        with self.heartbeat.waiting():
            return start_all_reduce(tensor, self.group(ranks)).wait()

    def gather_numbers(self, numbers: list[float]) -> list[list[float]]:
        if self.world_size == 1:
            return [numbers]
        with self.heartbeat.waiting():
            found: list[list[float]] = all_gather(
                torch.tensor(numbers, dtype=torch.float64), None
            ).tolist()
        return found

    def finish(self) -> None:
        self._sends.finish()

    def stop(self) -> None:
        """Leave all groups, and the world if `start` joined it. All ranks together: gloo aborts a
        rank whose peer goes away while it closes its threads.
        """
        self._sends.close()
        if not dist.is_initialized():
            return
        with self.heartbeat.waiting():
            if self.nccl:
                torch.cuda.synchronize(self.device)
            dist.barrier()
        if self._joined:
            dist.destroy_process_group()
        else:
            for group in self._groups.values():
                dist.destroy_process_group(group)
            for control_group in self._control_groups:
                control_group.close()
        self._groups.clear()
        self._control_groups.clear()


def _launchers_store(patience: timedelta, signed: bool) -> Store | None:
    """The launcher's store; None where another program started the rank, so that torch shall find
    or make one. NCCL's own threads look into the store, also while they are ended, when they must
    not wait for Python: not signed.
    """
    if ATTEMPT not in os.environ:
        return None
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=patience
    )
    key = os.environ.pop(KEY, "")  # Under a bare torchrun there is none.
    if not signed or not key:
        return store
    return SignedStore(
        store, Signer(bytes.fromhex(key), os.environ["TORCHELASTIC_RUN_ID"]), patience
    )


def _choose_device(wanted: str) -> torch.device:
    if wanted in ("cpu", "meta"):
        return torch.device("cpu")
    # CUDA reads these variables when it starts.
    os.environ.setdefault(_QUEUES, str(HARDWARE_QUEUES))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os.environ.setdefault(_MODULE_LOADING, "EAGER")
    if wanted == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError("no CUDA device is at hand", hint="use --device cpu")
    local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def pci_address(device: torch.device) -> str:
    """Such as `0000:cd:00.0`; empty where torch does not tell."""
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return ""
