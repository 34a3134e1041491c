"""Process groups and P2P communication of a rank. Tensors of steps are exchanged over NCCL if each
rank has its own GPU, otherwise over gloo; everything else over gloo.

Collectives on tensors in host memory are direct: every rank sends to all others at once. Gloo's own
collectives use a ring, and its reduce-scatter sets up a new one for each call. If ranks have to
take turns on CPU cores, each step of a ring waits until the next rank gets a core.
`benchmarks/gloo_collectives.py` compares both.
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
from autopipe.backends.torch.runtime.communication.signed_store import (
    KEY_VARIABLE,
    SignedStore,
    Signer,
)
from autopipe.backends.torch.runtime.host import (
    has_more_ranks_than_cores,
    keep_freed_memory,
    non_preempting_threads,
    pin_near_device,
    pin_to_cores,
)
from autopipe.backends.torch.runtime.watch.failures import Failure, describe_failure
from autopipe.backends.torch.runtime.watch.heartbeat import DEFAULT_TIMEOUTS, Heartbeat, Timeouts
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

TensorForm = tuple[torch.dtype, tuple[int, ...]]  # A tensor's type and shape.


@dataclass(slots=True)
class PendingRecv:
    """A tensor that is being received. With `reduce`, the tensors of all ranks are being received,
    [ranks, ...], and the result is their sum or maximum.
    """

    work: dist.Work | None
    buffer: torch.Tensor
    device: torch.device
    sent: torch.Tensor | None = None
    """A tensor that the same collective sends, kept alive until it has ended."""
    reduce: dist.ReduceOp.RedOpType | None = None

    def wait(self) -> torch.Tensor:
        """Return the tensor when it has arrived. Over NCCL, the current stream of the device waits
        instead of the host.
        """
        if self.work is not None:
            self.work.wait()
            # A second wait on gloo's handle would never return.
            self.work = self.sent = None
        if self.reduce == dist.ReduceOp.MAX:
            return self.buffer.amax(0)
        if self.reduce is not None:
            # All ranks sum in the order of ranks, so that results are equal.
            return self.buffer.sum(0, dtype=self.buffer.dtype)
        return (
            self.buffer
            if self.buffer.device == self.device
            else self.buffer.to(self.device, non_blocking=True)
        )


class PendingSend:
    """A tensor that is being sent. It must not change or be freed before it is sent."""

    def __init__(self, work: dist.Work | None, tensor: torch.Tensor) -> None:
        self.work = work
        self.tensor: torch.Tensor | None = tensor
        self.bytes = tensor.nbytes
        self._lock = threading.Lock()

    def is_gone(self) -> bool:
        """Return True if the tensor has been sent."""
        return self.work is None or self.work.is_completed()

    def wait(self) -> None:
        """Wait until the tensor has been sent, then release it. Several threads may call this."""
        with self._lock:
            if self.work is not None:
                self.work.wait()
                self.work = None  # A second wait on gloo's handle would never return.
            self.tensor = None


_MAX_HELD_BYTES = 4 * 2**20
"""Maximum bytes of sent tensors that a rank may still hold. Waiting for a send on a thread costs
the rank up to 0.1 ms, more than a small send takes.
"""


class SendQueue:
    """All sends of a rank that have started and whose tensors are still held."""

    def __init__(self, watched: bool, most_bytes: int = _MAX_HELD_BYTES) -> None:
        """`watched` is True if only a wait shows that a send has ended, as with gloo. Then all
        tensors are held until the end of the step, up to `most_bytes`; beyond that, a thread waits
        for the earliest sends.
        """
        self._watched = watched
        self._most_bytes = most_bytes
        self._under_way: deque[PendingSend] = deque()
        self._held_bytes = 0
        self._thread = ThreadPoolExecutor(1, "sends")
        self._waited_for: deque[Future[None]] = deque()

    def add(self, message: PendingSend) -> None:
        """Hold a tensor until it has been sent. Raise the error of an earlier send that failed."""
        while self._waited_for and self._waited_for[0].done():
            self._wait_for_first()
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

    def _wait_for_first(self) -> None:
        """Wait for the first send that the thread waits for. A send that failed stays in the queue
        and fails all later calls.
        """
        self._waited_for[0].result()
        self._waited_for.popleft()

    def finish(self) -> None:
        """Wait until all tensors have been sent. Raise the error of a send that failed."""
        while self._under_way:
            self._earliest().wait()
        while self._waited_for:
            self._wait_for_first()

    def close(self) -> None:
        self._thread.shutdown()


class RecvBufferPool:
    """The receive buffers of one channel in one direction, allocated at first use. All have the
    shape of the last received tensor.

    A buffer is free when only the pool refers to its memory: no view, no tensor saved for backward
    and no send. `size` is the maximum number of buffers that a step uses at once; if all are in
    use, `take` allocates a buffer outside of the pool. On a GPU, the stream that receives waits for
    all kernels launched before the receive was posted, which include the last reader of the buffer.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._buffers: list[torch.Tensor] = []

    def take(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a free buffer of this shape and type."""
        if self._buffers and self._buffers[0].shape != shape:
            self._buffers.clear()
        for place, buffer in enumerate(self._buffers):
            # The two users of a free buffer's storage: the buffer and the storage object.
            if storage_users(buffer.untyped_storage()) == 2:
                self._buffers.append(self._buffers.pop(place))
                return buffer.detach()
        found = torch.empty(shape, dtype=dtype, device=device)
        if len(self._buffers) < self._size:
            self._buffers.append(found)
        return found.detach()


_MAX_DIRECT_BYTES = 1 << 17
"""Maximum bytes of a tensor whose all-reduce sends each rank's tensor to all others. The traffic of
this method grows with the number of ranks, so larger tensors use a ring.
"""


def uses_direct_exchange(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Return True if every rank sends to all others directly: for tensors in host memory over
    gloo.
    """
    return tensor.device.type == "cpu" and dist.get_backend(group) == "gloo"


def start_direct_exchange(
    rows: torch.Tensor,
    group: dist.ProcessGroup | None,
    reduce: dist.ReduceOp.RedOpType | None = None,
) -> PendingRecv:
    """Start to send row i of `rows` to rank i of the group. The result has row i from rank i, or
    with `reduce` the sum or maximum of these rows.
    """
    rows = rows.detach().contiguous()
    received = torch.empty_like(rows)
    work = dist.all_to_all_single(received, rows, group=group, async_op=True)
    return PendingRecv(_require_work(work), received, received.device, rows, reduce)


def _require_work(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise LaunchError(
            f"rank {dist.get_rank()} called a collective of a process group that does not "
            "contain this rank"
        )
    return work


def rows_for_all_ranks(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return rows for `start_direct_exchange` that send `tensor` to every rank of the group."""
    return tensor.expand(dist.get_world_size(group), *tensor.shape)


def all_gather(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the tensors of all ranks of the group in the order of ranks, [ranks, ...]; written
    into `rows` if given.
    """
    if uses_direct_exchange(tensor, group):
        gathered = start_direct_exchange(rows_for_all_ranks(tensor, group), group).wait()
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
    """Start the all-reduce of a tensor with the operation `how`. With `in_place`, the result may
    overwrite the tensor.
    """
    if tensor.nbytes <= _MAX_DIRECT_BYTES and uses_direct_exchange(tensor, group):
        return start_direct_exchange(rows_for_all_ranks(tensor, group), group, how)
    if dist.get_backend(group) == "nccl":
        check_sum(tensor)
    total = tensor if in_place else tensor.clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(total, how, group=group, async_op=True)
    return PendingRecv(_require_work(work), total, total.device)


def start_reduce_scatter(rows: torch.Tensor, group: dist.ProcessGroup | None) -> PendingRecv:
    """Start the reduce-scatter of `rows`, [ranks, ...]: the result is the sum over all ranks of
    this rank's row.
    """
    if uses_direct_exchange(rows, group):
        return start_direct_exchange(rows, group, dist.ReduceOp.SUM)
    backend = dist.get_backend(group)
    if rows.is_cuda and backend == "gloo":
        # Gloo's reduce-scatter accepts tensors in host memory only.
        sums = start_all_reduce(rows, group, in_place=False)
        return replace(sums, buffer=sums.buffer[dist.get_rank(group)])
    if backend == "nccl":
        check_sum(rows)
    rows = rows.contiguous()
    shard = torch.empty_like(rows[0])
    work = reduce_scatter_flat(shard.view(-1), rows.view(-1), group=group, async_op=True)
    return PendingRecv(_require_work(work), shard, shard.device, rows)


def all_to_all(
    arrives: torch.Tensor,
    sent: torch.Tensor,
    incoming: list[int],
    outgoing: list[int],
    group: dist.ProcessGroup | None,
) -> None:
    """Send `outgoing[i]` elements of the flat tensor `sent` to rank i of the group, and write
    `incoming[i]` elements from rank i into `arrives`.
    """
    if dist.get_backend(group) == "nccl":
        size = sent.element_size()
        arrives = as_nccl_type(arrives)
        sent = as_nccl_type(sent)
        factor = size // sent.element_size()
        incoming, outgoing = ([factor * each for each in sizes] for sizes in (incoming, outgoing))
    dist.all_to_all_single(arrives, sent, incoming, outgoing, group=group)


class ControlGroup:
    """All ranks of the world on a process group of its own, so that another thread can communicate
    while a step runs. It also works in a world of one rank.
    """

    def __init__(self, rank: int, world_size: int, patience_s: float, heartbeat: Heartbeat) -> None:
        """Collective over all ranks. A collective fails after `patience_s` seconds without all
        ranks.
        """
        self.rank = rank
        self.world_size = world_size
        self.waits = False
        """True while this rank waits for others in a collective."""
        self.heartbeat = heartbeat
        self._group = None
        if world_size > 1:
            with heartbeat.waiting(), non_preempting_threads():
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience_s))

    def _gather(self, data: bytes) -> list[bytes]:
        if self.world_size == 1:
            return [data]
        # The heartbeat describes the main thread only.
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
        """Call `act` on every rank. Return the results of all ranks, in the order of ranks, as JSON
        represents them.

        If `act` raises an AutopipeError on any rank, all ranks raise the error of the first such
        rank.
        """
        try:
            outcome = {"done": act()}
        except AutopipeError as error:
            outcome = {"failed": asdict(describe_failure(error, self.rank, task))}
        outcomes = [json.loads(each) for each in self._gather(json.dumps(outcome).encode())]
        for each in outcomes:
            if "failed" in each:
                raise Failure(**each["failed"]).error()
        return [each["done"] for each in outcomes]

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


ATTEMPT_VARIABLE = "AUTOPIPE_ATTEMPT"
"""Environment variable with a name of the current attempt of a launch, set if the launcher keeps
the store.
"""


_QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_MODULE_LOADING_VARIABLE = "CUDA_MODULE_LOADING"
"""Environment variable that states when CUDA loads kernels: by default (`LAZY`) at their first
launch.

Loading a kernel may wait until the device is idle (CUDA Programming Guide, "Lazy Loading",
potential hazards). A receive that is posted early keeps the device busy until its sender has
computed. In schedules with pipelines in both directions (Chimera, DualPipe), ranks would then wait
for one another in their first step.
"""


class Transport:
    """This rank's connection to all others: channels and process groups. Tensors of one channel
    arrive in the order in which they were sent.

    Work handles are kept until a wait: gloo drops operations whose handle is freed. If ranks share
    a GPU, which NCCL rejects, tensors are exchanged through pinned host memory.
    """

    def __init__(
        self, device: str, timeouts: Timeouts = DEFAULT_TIMEOUTS, heartbeat: Heartbeat | None = None
    ) -> None:
        self.timeouts = timeouts
        self.heartbeat = heartbeat or Heartbeat()
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = _choose_device(device)
        if self.device.type == "cpu":
            keep_freed_memory()
        self._on_cpu = device in ("cpu", "meta")  # The flag --device is equal on all ranks.
        self._local_world = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.world_size)))
        self.notices: list[str] = []
        """Lines for the user about how ranks exchange tensors."""
        # A rank may be late in start-up and again in a task. The launcher detects a hanging rank
        # sooner than this time-out.
        self._patience = timedelta(seconds=self.timeouts.start_s + self.timeouts.step_s)
        self._nccl = NcclCommunicators(self.rank, self.device, self._patience)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._paths: dict[tuple[int, bool], MessagePath] = {}
        self._batch: list[tuple[dist.P2POp, PendingRecv | PendingSend]] | None = None
        self._buffers: dict[tuple[int, bool], RecvBufferPool] = {}
        self.traffic: Counter[str] = Counter()
        """Bytes that this step's communication has moved so far, by kind (`ir/program.py`)."""
        self._control_groups: list[ControlGroup] = []
        self._joined = False
        self._store: Store | None = None
        """The launcher's store. Kept because a Python store must live as long as its users."""
        self.store: Store | None = None
        """The store of the ranks of this attempt; None in a world of one rank, and before `start`.
        """
        self._select_backend(nccl=False)

    def _select_backend(self, nccl: bool) -> None:
        """Exchange tensors of steps over NCCL or over gloo."""
        self.nccl = nccl
        self.staged = self.device.type == "cuda" and not nccl
        own_cores = not nccl and not has_more_ranks_than_cores(self._local_world)
        self._gives_way = own_cores and hasattr(os, "sched_yield")
        """True if this thread should yield its core after posting to gloo's threads (`host`)."""
        self._sends = SendQueue(watched=not nccl)

    def start(self) -> None:
        """Join the other ranks. Unless NCCL is used, pin threads to the rank's CPU cores. Makes no
        process group in a world of one rank, or if this process is already in a process group.
        """
        if self.device.type == "cuda":
            pin_near_device(pci_address(self.device))
        if self.world_size == 1 or dist.is_initialized():
            return
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        with self.heartbeat.waiting():
            store = self._join_store()
        if not self.nccl and "LOCAL_RANK" in os.environ:
            pin_to_cores(int(os.environ["LOCAL_RANK"]), self._local_world)
        with self.heartbeat.waiting(), non_preempting_threads():
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
        """Return the store of all ranks, after the ranks have agreed on NCCL or gloo."""
        store: Store
        self._store = _store_of_launcher(self._patience, signed=True)
        if self._store is None:
            store, _, _ = next(
                rendezvous("env://", self.rank, self.world_size, timeout=self._patience)
            )
        else:
            store = PrefixStore(os.environ[ATTEMPT_VARIABLE], self._store)
        if self._on_cpu:
            return store
        nccl, why = agree_on_nccl(store, self.rank, self.world_size, gpu_of_rank(self.device))
        self._select_backend(nccl)
        self.notices += [why] if why else []
        if nccl:
            if int(os.environ[_QUEUES_VARIABLE]) < HARDWARE_QUEUES:
                self.notices.append(
                    f"{_QUEUES_VARIABLE} is {os.environ[_QUEUES_VARIABLE]}: "
                    f"the program is proven free of deadlocks for {HARDWARE_QUEUES}"
                )
            if (plain := _store_of_launcher(self._patience, signed=False)) is not None:
                self._store = plain
                store = PrefixStore(os.environ[ATTEMPT_VARIABLE], plain)
        return store

    def make_control_group(self) -> ControlGroup:
        """Return a new control group. Its time-out includes the writing of the slowest rank's
        checkpoint.
        """
        patience_s = self.timeouts.checkpoint_s + self.timeouts.step_s
        control_group = ControlGroup(self.rank, self.world_size, patience_s, self.heartbeat)
        self._control_groups.append(control_group)
        return control_group

    def connect(self, groups: Iterable[tuple[int, ...]], channels: Iterable[Channel] = ()) -> None:
        """Create all process groups and channels that any rank uses, before the first step. All
        ranks must pass the same groups and channels.
        """
        members = {tuple(sorted(ranks)) for ranks in groups if len(ranks) > 1}
        channels = tuple(channels)
        for each in channels:
            for gradient, buffers in ((False, each.buffers), (True, each.gradient_buffers)):
                self._buffers[each.number, gradient] = RecvBufferPool(buffers)
                self._paths[each.number, gradient] = message_path(each, gradient)
        with self.heartbeat.waiting(), non_preempting_threads():
            if self.nccl:
                self._nccl.make_groups(members)
                self._nccl.make_message_paths(channels)
                self._nccl.wait_until_all_work()
                return
            for ranks in sorted(members - self._groups.keys()):
                if len(ranks) < self.world_size:
                    self._groups[ranks] = dist.new_group(list(ranks), timeout=self._patience)

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the process group of these ranks, in any order; None for all ranks over gloo,
        torch's default group.
        """
        if len(ranks) == self.world_size and not self.nccl:
            return None
        return (self._nccl.groups if self.nccl else self._groups)[tuple(sorted(ranks))]

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Run the P2P operations of the block as one NCCL batch. All must have the same peer and
        direction, and the peer must batch the matching operations. Over gloo there are no batches.
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
        """Start an NCCL operation, or add it to the current batch."""
        if self._batch is None:
            self._post([(operation, pending)])
        else:
            self._batch.append((operation, pending))

    def send(self, tensor: torch.Tensor, rank: int, channel: int, gradient: bool) -> PendingSend:
        """Start to send a tensor to `rank`; `gradient` is True for the gradients of the channel."""
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

    def recv(self, like: TensorForm, rank: int, channel: int, gradient: bool) -> PendingRecv:
        """Post the receive of a tensor with the type and shape `like` from `rank`."""
        dtype, shape = like
        if self.staged:  # Torch's allocator reuses pinned memory when copies from it have ended.
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
            raise LaunchError(
                f"rank {self.rank} cannot receive from rank {rank}: torch.distributed returned "
                "no request"
            )
        if self._gives_way:
            os.sched_yield()
        return PendingRecv(work, buffer, self.device)

    def start_all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> PendingRecv:
        """Start the all-reduce of a gradient over `ranks`, possibly in place."""
        self.traffic["gradient"] += tensor.nbytes
        return start_all_reduce(tensor, self.group(ranks))

    def start_reduce_scatter(self, row: torch.Tensor, ranks: tuple[int, ...]) -> PendingRecv:
        """Start the reduce-scatter of a row of gradients over `ranks`, split evenly."""
        self.traffic["gradient"] += row.nbytes
        return start_reduce_scatter(row.view(len(ranks), -1), self.group(ranks))

    def gather(self, row: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """All-gather a row over `ranks`; each rank's part of the row is filled before. The caller
        counts the bytes.
        """
        rows = row.view(len(ranks), -1)
        all_gather(rows[ranks.index(self.rank)], self.group(ranks), rows)

    def maximum(self, number: torch.Tensor) -> torch.Tensor:
        """Return the maximum over all ranks of a scalar on the device, []. Not counted in
        `traffic`.
        """
        return self._of_all_ranks(number, dist.ReduceOp.MAX)

    def total(self, number: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks of a scalar on the device, [], equal on all ranks. Not
        counted in `traffic`.
        """
        return self._of_all_ranks(number, dist.ReduceOp.SUM)

    def _of_all_ranks(self, number: torch.Tensor, how: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.world_size == 1:
            return number
        return start_all_reduce(number, self.group(tuple(range(self.world_size))), how).wait()

    def total_over(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> torch.Tensor:
        """Return the sum of a tensor over `ranks`. Not counted in `traffic`."""
        with self.heartbeat.waiting():
            return start_all_reduce(tensor, self.group(ranks)).wait()

    def gather_numbers(self, numbers: list[float]) -> list[list[float]]:
        """Return the lists of all ranks, in the order of ranks. All must have the same length."""
        if self.world_size == 1:
            return [numbers]
        with self.heartbeat.waiting():
            found: list[list[float]] = all_gather(
                torch.tensor(numbers, dtype=torch.float64), None
            ).tolist()
        return found

    def finish(self) -> None:
        """Wait until all tensors of the step have been sent."""
        self._sends.finish()

    def stop(self) -> None:
        """Leave all process groups, and the world if `start` joined it. Collective over all ranks:
        gloo aborts a rank whose peer ends while it closes its threads.
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


def _store_of_launcher(patience: timedelta, signed: bool) -> Store | None:
    """Return the launcher's store, None if another program started the rank; torch then finds or
    creates one.

    NCCL's threads use the store, also while they are being stopped, when they must not wait for
    Python. So they need the unsigned store.
    """
    if ATTEMPT_VARIABLE not in os.environ:
        return None
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=patience
    )
    key = os.environ.pop(KEY_VARIABLE, "")  # A bare torchrun sets no key.
    if not signed or not key:
        return store
    return SignedStore(
        store, Signer(bytes.fromhex(key), os.environ["TORCHELASTIC_RUN_ID"]), patience
    )


def _choose_device(wanted: str) -> torch.device:
    if wanted in ("cpu", "meta"):
        return torch.device("cpu")
    # CUDA reads these variables when it starts.
    os.environ.setdefault(_QUEUES_VARIABLE, str(HARDWARE_QUEUES))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os.environ.setdefault(_MODULE_LOADING_VARIABLE, "EAGER")
    if wanted == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError("CUDA is not available on this machine", hint="set --device cpu")
    local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def pci_address(device: torch.device) -> str:
    """Return the PCI address of a GPU, for example `0000:cd:00.0`; "" if this version of torch does
    not provide it.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        domain = f"{properties.pci_domain_id:04x}"
        return f"{domain}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return ""
