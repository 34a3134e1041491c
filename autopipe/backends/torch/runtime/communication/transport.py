"""Process groups and P2P communication of a rank. Ranks exchange the tensors of a step over NCCL if
each rank has its own GPU, otherwise over gloo. All other communication uses gloo.

Over gloo, collectives on tensors in host memory are direct: every rank sends to all other ranks at
once. Gloo's own collectives send around a ring of ranks, and its reduce-scatter sets up a new ring
for each call. If several ranks share a CPU core, each step of a ring waits until the next rank gets
the core. `benchmarks/gloo_collectives.py` compares both.
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
    NcclCommunicators,
    RankPair,
    agree_on_nccl,
    as_nccl_type,
    check_reducible,
    sender_and_receiver,
    start_p2p_batch,
    unique_gpu_name,
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

TensorForm = tuple[torch.dtype, tuple[int, ...]]  # The pair (element type, shape) of a tensor.


@dataclass(slots=True)
class PendingRecv:
    """A receive or a collective that has been started, and its result.

    If `reduce` is None, the result is `buffer`. Otherwise `buffer` receives the tensors of all
    ranks, [ranks, ...], and the result is their sum or maximum over the first dimension.
    """

    work: dist.Work | None
    buffer: torch.Tensor
    device: torch.device
    sent: torch.Tensor | None = None
    """A tensor that the operation sends. It must stay alive until the operation has ended."""
    reduce: dist.ReduceOp.RedOpType | None = None

    def wait(self) -> torch.Tensor:
        """Wait for the operation and return its result on `device`. Over gloo the host waits; over
        NCCL only the current stream of the device waits.
        """
        if self.work is not None:
            self.work.wait()
            # The handle of the operation is removed, because a second wait on a handle of gloo
            # would never return.
            self.work = self.sent = None
        if self.reduce == dist.ReduceOp.MAX:
            return self.buffer.amax(0)
        if self.reduce is not None:
            # `buffer` contains the tensors of all ranks. Each rank adds them in the order of ranks,
            # so that the rounded sums are equal on all ranks.
            return self.buffer.sum(0, dtype=self.buffer.dtype)
        return (
            self.buffer
            if self.buffer.device == self.device
            else self.buffer.to(self.device, non_blocking=True)
        )


class PendingSend:
    """A send that has been started. `tensor` must not change or be freed before the send has
    ended.
    """

    def __init__(self, work: dist.Work | None, tensor: torch.Tensor) -> None:
        self.work = work
        self.tensor: torch.Tensor | None = tensor
        self.bytes = tensor.nbytes
        self._lock = threading.Lock()

    def has_been_sent(self) -> bool:
        """Return True if the send has ended. Does not wait."""
        return self.work is None or self.work.is_completed()

    def wait(self) -> None:
        """Wait until the send has ended, then release the tensor. Several threads may call this."""
        with self._lock:
            if self.work is not None:
                self.work.wait()
                # The handle of the operation is removed, because a second wait on a handle of gloo
                # would never return.
                self.work = None
            self.tensor = None


_MAX_HELD_BYTES = 4 * 2**20
"""Default maximum of the bytes of tensors that a rank holds because their sends may not have ended;
beyond it, a thread waits for sends. Such a wait costs the rank up to 0.1 ms, more than a small send
takes, so small tensors are held instead.
"""


class SendQueue:
    """All sends of a rank that have been started and whose tensors are still held."""

    def __init__(self, watched: bool, most_bytes: int = _MAX_HELD_BYTES) -> None:
        """`watched` is True if only a wait shows that a send has ended, as with gloo. Then all
        tensors are held until the end of the step, as long as they have at most `most_bytes` bytes
        together. Beyond that, a thread waits for the earliest sends and releases their tensors.
        """
        self._watched = watched
        self._most_bytes = most_bytes
        self._under_way: deque[PendingSend] = deque()
        self._held_bytes = 0
        self._thread = ThreadPoolExecutor(1, "sends")
        self._waited_for: deque[Future[None]] = deque()

    def add(self, message: PendingSend) -> None:
        """Hold the tensor of a send until the send has ended. Raise the error of an earlier send
        that failed.
        """
        while self._waited_for and self._waited_for[0].done():
            self._wait_for_first()
        self._under_way.append(message)
        self._held_bytes += message.bytes
        if not self._watched:
            while self._under_way and self._under_way[0].has_been_sent():
                self._pop_earliest()
            return
        while self._held_bytes > self._most_bytes:
            self._waited_for.append(self._thread.submit(self._pop_earliest().wait))

    def _pop_earliest(self) -> PendingSend:
        """Remove the earliest send from the queue and return it."""
        earliest = self._under_way.popleft()
        self._held_bytes -= earliest.bytes
        return earliest

    def _wait_for_first(self) -> None:
        """Wait for the earliest of the sends for which the queue's thread waits. If the send
        failed, raise its error and keep the send, so that later calls raise the error again.
        """
        self._waited_for[0].result()
        self._waited_for.popleft()

    def finish(self) -> None:
        """Wait until all sends have ended. Raise the error of a send that failed."""
        while self._under_way:
            self._pop_earliest().wait()
        while self._waited_for:
            self._wait_for_first()

    def close(self) -> None:
        """End the thread that waits for sends, after all its sends have ended."""
        self._thread.shutdown()


class RecvBufferPool:
    """The receive buffers of one channel in one direction, allocated at first use. The pool keeps
    buffers of one shape only, the shape of the last received tensor.

    A buffer is free if nothing but the pool refers to its memory: no view, no tensor that is saved
    for backward, and no send. `size` is the maximum number of buffers that the pool keeps: the
    number that a step uses at once. If no buffer is free and the pool is full, `take` allocates a
    buffer that does not join the pool.

    On a GPU a buffer may be free although kernels that read it have not run yet. This is safe,
    because the stream that receives first waits for all kernels launched before the receive was
    posted.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._buffers: list[torch.Tensor] = []

    def take(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a free buffer of this shape and element type, whose contents are undefined."""
        if self._buffers and self._buffers[0].shape != shape:
            self._buffers.clear()
        for place, buffer in enumerate(self._buffers):
            # A buffer of the pool is free if `storage_users` counts two references: the tensor in
            # the pool and the storage object in this expression.
            if storage_users(buffer.untyped_storage()) == 2:
                self._buffers.append(self._buffers.pop(place))
                return buffer.detach()
        found = torch.empty(shape, dtype=dtype, device=device)
        if len(self._buffers) < self._size:
            self._buffers.append(found)
        return found.detach()


_MAX_DIRECT_BYTES = 1 << 17
"""Maximum bytes of a tensor whose all-reduce is direct: each rank sends its tensor to all others.
The traffic of a direct all-reduce grows with the number of ranks, so larger tensors use gloo's
ring.
"""


def uses_direct_exchange(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Return True if collectives on `tensor` send from every rank to all other ranks directly: if
    `tensor` is in host memory and the backend of `group` is gloo. (For the size limit of
    all-reduces see `_MAX_DIRECT_BYTES`.)
    """
    return tensor.device.type == "cpu" and dist.get_backend(group) == "gloo"


def start_direct_exchange(
    rows: torch.Tensor,
    group: dist.ProcessGroup | None,
    reduce: dist.ReduceOp.RedOpType | None = None,
) -> PendingRecv:
    """Start to send row i of `rows`, [ranks, ...], to rank i of the group. Row i of the result is
    the row that arrives from rank i. With `reduce`, the result is the sum or maximum over all rows
    that arrive.
    """
    rows = rows.detach().contiguous()
    received = torch.empty_like(rows)
    work = dist.all_to_all_single(received, rows, group=group, async_op=True)
    return PendingRecv(_require_work(work), received, received.device, rows, reduce)


def _require_work(work: dist.Work | None) -> dist.Work:
    """Return the handle `work` of a collective. Raise LaunchError if it is None, which torch
    returns on ranks outside of the group.
    """
    if work is None:
        raise LaunchError(
            f"rank {dist.get_rank()} called a collective of a process group that does not "
            "contain this rank"
        )
    return work


def rows_for_all_ranks(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the argument `rows` of `start_direct_exchange` that sends `tensor` to every rank of
    the group: a view [ranks, ...] with equal rows.
    """
    return tensor.expand(dist.get_world_size(group), *tensor.shape)


def all_gather(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the tensors of all ranks of the group, [ranks, ...], in the order of ranks. If `rows`
    is given, the tensors are written into `rows`, which is returned. Waits for the result.
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
    """Start the all-reduce of `tensor` with the operation `how`. With `in_place`, the result may
    overwrite `tensor`, but need not.
    """
    if tensor.nbytes <= _MAX_DIRECT_BYTES and uses_direct_exchange(tensor, group):
        return start_direct_exchange(rows_for_all_ranks(tensor, group), group, how)
    if dist.get_backend(group) == "nccl":
        check_reducible(tensor)
    total = tensor if in_place else tensor.clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(total, how, group=group, async_op=True)
    return PendingRecv(_require_work(work), total, total.device)


def start_reduce_scatter(rows: torch.Tensor, group: dist.ProcessGroup | None) -> PendingRecv:
    """Start the reduce-scatter of `rows`, [ranks, ...]. The result on rank i of the group is the
    sum over all ranks of their row i.
    """
    if uses_direct_exchange(rows, group):
        return start_direct_exchange(rows, group, dist.ReduceOp.SUM)
    backend = dist.get_backend(group)
    if rows.is_cuda and backend == "gloo":
        # Gloo's reduce-scatter accepts tensors in host memory only, but its all-reduce also accepts
        # GPU tensors. So each rank computes all sums and selects its row.
        sums = start_all_reduce(rows, group, in_place=False)
        return replace(sums, buffer=sums.buffer[dist.get_rank(group)])
    if backend == "nccl":
        check_reducible(rows)
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
    """Send `outgoing[i]` elements of the one-dimensional tensor `sent` to rank i of the group, and
    receive `incoming[i]` elements from rank i into `arrives`. The elements of both tensors are in
    the order of ranks. Waits for the result.
    """
    if dist.get_backend(group) == "nccl":
        size = sent.element_size()
        arrives = as_nccl_type(arrives)
        sent = as_nccl_type(sent)
        factor = size // sent.element_size()
        incoming, outgoing = ([factor * each for each in sizes] for sizes in (incoming, outgoing))
    dist.all_to_all_single(arrives, sent, incoming, outgoing, group=group)


class ControlGroup:
    """A separate gloo process group of all ranks, so that another thread can communicate while the
    main thread runs a step. In a world of one rank there is no process group, and collectives
    return at once.
    """

    def __init__(self, rank: int, world_size: int, patience_s: float, heartbeat: Heartbeat) -> None:
        """Create the process group. Collective over all ranks. A collective of the group fails if
        not all ranks have joined it after `patience_s` seconds.
        """
        self.rank = rank
        self.world_size = world_size
        self.waits = False
        """True while this rank is in a collective of the group."""
        self.heartbeat = heartbeat
        self._group = None
        if world_size > 1:
            with heartbeat.record_wait(), non_preempting_threads():
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience_s))

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the `data` of all ranks, in the order of ranks. The lengths may differ."""
        if self.world_size == 1:
            return [data]
        # The heartbeat states the activity of the main thread, so waits of other threads are not
        # recorded in it.
        with (
            self.heartbeat.record_wait()
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
        """Call `act` on every rank. Return the results of all ranks, in the order of ranks, after
        conversion to JSON and back. `task` is the name of the work in error messages.

        If `act` raises an AutopipeError on any rank, all ranks raise the error of the lowest such
        rank.
        """
        try:
            outcome = {"done": act()}
        except AutopipeError as error:
            outcome = {"failed": asdict(describe_failure(error, self.rank, task))}
        outcomes = [json.loads(each) for each in self._gather_bytes(json.dumps(outcome).encode())]
        for each in outcomes:
            if "failed" in each:
                raise Failure(**each["failed"]).error()
        return [each["done"] for each in outcomes]

    def close(self) -> None:
        """Destroy the process group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


ATTEMPT_VARIABLE = "AUTOPIPE_ATTEMPT"
"""Name of an environment variable that the launcher sets if it hosts the rendezvous store. Its
value names the current attempt: a launch starts a new attempt after a failure. The attempt is the
prefix of the store keys of its ranks.
"""


_QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_MODULE_LOADING_VARIABLE = "CUDA_MODULE_LOADING"
"""Name of the environment variable that states when CUDA loads kernels: by default (`LAZY`) at
their first launch.

Loading a kernel may wait until the device is idle (CUDA Programming Guide, "Lazy Loading",
potential hazards). A receive that is posted early keeps the device busy until its sender has
computed the tensor. In schedules with pipelines in both directions (Chimera, DualPipe), ranks would
then wait for one another in their first step. So autopipe sets `EAGER`.
"""


class Transport:
    """This rank's connection to all other ranks: its channels and process groups. A channel
    connects two stages on different ranks and transfers activations one way and gradients the other
    way. The tensors of a channel arrive in the order in which they were sent.

    Gloo drops an operation if its handle is freed, so handles are kept until a wait. If ranks share
    a GPU, NCCL cannot be used; tensors are then copied to pinned host memory and exchanged over
    gloo.
    """

    def __init__(
        self, device: str, timeouts: Timeouts = DEFAULT_TIMEOUTS, heartbeat: Heartbeat | None = None
    ) -> None:
        """`device` is the value of `--device`: `auto`, `cuda`, `cpu` or `meta`. Rank and world size
        come from torch's environment variables. Nothing is connected before `start`.
        """
        self.timeouts = timeouts
        self.heartbeat = heartbeat or Heartbeat()
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = _choose_device(device)
        if self.device.type == "cpu":
            keep_freed_memory()
        # `--device` is equal on all ranks, so this is True only if no rank uses a GPU. Then the
        # ranks need not agree on a choice between NCCL and gloo.
        self._on_cpu = device in ("cpu", "meta")
        self._local_world = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.world_size)))
        self.notices: list[str] = []
        """Lines for the user about how ranks exchange tensors."""
        # This is the time-out of torch's collectives. A rank may be late both in its start-up and
        # in a task of a step, so the two time-outs are added. The launcher applies each time-out
        # separately, so it detects a rank that hangs earlier.
        self._patience = timedelta(seconds=self.timeouts.start_s + self.timeouts.step_s)
        self._nccl = NcclCommunicators(self.rank, self.device, self._patience)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._paths: dict[tuple[int, bool], RankPair] = {}
        self._batch: list[tuple[dist.P2POp, PendingRecv | PendingSend]] | None = None
        self._buffers: dict[tuple[int, bool], RecvBufferPool] = {}
        self.traffic: Counter[str] = Counter()
        """Bytes that the communication of the current step has moved so far on this rank, by kind
        of communication (the names are those of `ir/program.py`).
        """
        self._control_groups: list[ControlGroup] = []
        self._joined = False
        self._store: Store | None = None
        """The launcher's store, which `store` may wrap. Kept because the Python object must live as
        long as C++ uses it.
        """
        self.store: Store | None = None
        """The store of this attempt, which all ranks share; None in a world of one rank, and before
        `start`.
        """
        self._select_backend(nccl=False)

    def _select_backend(self, nccl: bool) -> None:
        """Select NCCL or gloo for the tensors of steps. Called again after the ranks have
        agreed.
        """
        self.nccl = nccl
        self.staged = self.device.type == "cuda" and not nccl
        own_cores = not nccl and not has_more_ranks_than_cores(self._local_world)
        self._gives_way = own_cores and hasattr(os, "sched_yield")
        """True if this thread should yield its CPU core after it has given an operation to gloo's
        threads; the module `host` says why.
        """
        self._sends = SendQueue(watched=not nccl)

    def start(self) -> None:
        """Join the other ranks of the world, unless the world has one rank or this process already
        has a process group.

        Also pin threads to CPU cores. If the device is a GPU, these are the cores near it. A rank
        that joins others without NCCL, and with LOCAL_RANK set, is then pinned to its part of the
        machine's cores instead.
        """
        if self.device.type == "cuda":
            pin_near_device(pci_address(self.device))
        if self.world_size == 1 or dist.is_initialized():
            return
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        with self.heartbeat.record_wait():
            store = self._join_store()
        if not self.nccl and "LOCAL_RANK" in os.environ:
            pin_to_cores(int(os.environ["LOCAL_RANK"]), self._local_world)
        with self.heartbeat.record_wait(), non_preempting_threads():
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
        """Connect to the store that all ranks share, agree with the other ranks on NCCL or gloo,
        and return the store.
        """
        store: Store
        self._store = _connect_to_launcher_store(self._patience, signed=True)
        if self._store is None:
            store, _, _ = next(
                rendezvous("env://", self.rank, self.world_size, timeout=self._patience)
            )
        else:
            store = PrefixStore(os.environ[ATTEMPT_VARIABLE], self._store)
        if self._on_cpu:
            return store
        nccl, why = agree_on_nccl(store, self.rank, self.world_size, unique_gpu_name(self.device))
        self._select_backend(nccl)
        self.notices += [why] if why else []
        if nccl:
            if int(os.environ[_QUEUES_VARIABLE]) < HARDWARE_QUEUES:
                self.notices.append(
                    f"{_QUEUES_VARIABLE} is {os.environ[_QUEUES_VARIABLE]}: "
                    f"the program is proven free of deadlocks for {HARDWARE_QUEUES}"
                )
            if (plain := _connect_to_launcher_store(self._patience, signed=False)) is not None:
                self._store = plain
                store = PrefixStore(os.environ[ATTEMPT_VARIABLE], plain)
        return store

    def make_control_group(self) -> ControlGroup:
        """Return a new control group. Collective over all ranks. The time-out of its collectives
        allows for the time in which the slowest rank writes a checkpoint.
        """
        patience_s = self.timeouts.checkpoint_s + self.timeouts.step_s
        control_group = ControlGroup(self.rank, self.world_size, patience_s, self.heartbeat)
        self._control_groups.append(control_group)
        return control_group

    def connect(self, groups: Iterable[tuple[int, ...]], channels: Iterable[Channel] = ()) -> None:
        """Create the process groups and channels that any rank uses, before the first step.
        Collective: all ranks must pass equal groups and channels.
        """
        members = {tuple(sorted(ranks)) for ranks in groups if len(ranks) > 1}
        channels = tuple(channels)
        for each in channels:
            for gradient, buffers in ((False, each.buffers), (True, each.gradient_buffers)):
                self._buffers[each.number, gradient] = RecvBufferPool(buffers)
                self._paths[each.number, gradient] = sender_and_receiver(each, gradient)
        with self.heartbeat.record_wait(), non_preempting_threads():
            if self.nccl:
                self._nccl.make_group_communicators(members)
                self._nccl.make_p2p_communicators(channels)
                self._nccl.wait_until_connected()
                return
            for ranks in sorted(members - self._groups.keys()):
                if len(ranks) < self.world_size:
                    self._groups[ranks] = dist.new_group(list(ranks), timeout=self._patience)

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the torch process group of these ranks, which may be in any order. Return None,
        torch's default group, for all ranks over gloo. `connect` must have created the group.
        """
        if len(ranks) == self.world_size and not self.nccl:
            return None
        return (self._nccl.groups if self.nccl else self._groups)[tuple(sorted(ranks))]

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Run all P2P operations that the block starts as one NCCL batch. The operations must have
        one peer and one direction, and the peer must batch the matching operations. Over gloo the
        operations are started one by one.
        """
        if not self.nccl:
            yield
            return
        batch: list[tuple[dist.P2POp, PendingRecv | PendingSend]] = []
        self._batch = batch
        yield
        self._batch = None
        if batch:
            self._start_batch(batch)

    def _start_batch(self, batch: list[tuple[dist.P2POp, PendingRecv | PendingSend]]) -> None:
        """Start operations of one peer and one direction as one NCCL batch."""
        work = start_p2p_batch([operation for operation, _ in batch])
        for _, pending in batch:
            pending.work = work
            if isinstance(pending, PendingSend):
                self._sends.add(pending)

    def _start_or_add_to_batch(
        self, operation: dist.P2POp, pending: PendingRecv | PendingSend
    ) -> None:
        """Add an NCCL operation to the batch of the surrounding `batch` block. Start it at once if
        there is none.
        """
        if self._batch is None:
            self._start_batch([(operation, pending)])
        else:
            self._batch.append((operation, pending))

    def send(self, tensor: torch.Tensor, rank: int, channel: int, gradient: bool) -> PendingSend:
        """Start to send a tensor to rank `rank` on a channel. `gradient` is True if the tensor is
        the gradient of a tensor that was received on the channel.
        """
        self.traffic["send"] += tensor.nbytes
        tensor = tensor.detach().contiguous()
        if self.nccl:
            group = self._nccl.messages[self._paths[channel, gradient]]
            pending = PendingSend(None, tensor)
            self._start_or_add_to_batch(
                dist.P2POp(dist.isend, as_nccl_type(tensor), rank, group), pending
            )
            return pending
        if self.staged:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor)
            tensor = host
        with self.heartbeat.record_peer_on_error(rank, channel):
            pending = PendingSend(dist.isend(tensor, rank, tag=2 * channel + int(gradient)), tensor)
        self._sends.add(pending)
        if self._gives_way:
            os.sched_yield()
        return pending

    def recv(self, like: TensorForm, rank: int, channel: int, gradient: bool) -> PendingRecv:
        """Post the receive of a tensor from rank `rank` on a channel. `like` gives its element type
        and shape. `gradient` is True if the tensor is the gradient of a tensor that was sent on the
        channel.
        """
        dtype, shape = like
        # A pinned buffer needs no pool of receive buffers, because torch's allocator reuses pinned
        # memory when the copies from it have ended.
        if self.staged:
            buffer = torch.empty(shape, dtype=dtype, pin_memory=True)
        else:
            buffer = self._buffers[channel, gradient].take(shape, dtype, self.device)
        if self.nccl:
            group = self._nccl.messages[self._paths[channel, gradient]]
            pending = PendingRecv(None, buffer, self.device)
            self._start_or_add_to_batch(
                dist.P2POp(dist.irecv, as_nccl_type(buffer), rank, group), pending
            )
            return pending
        with self.heartbeat.record_peer_on_error(rank, channel):
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
        """Start the all-reduce of a gradient, or of a flat bucket of gradients, over `ranks`. The
        sum may overwrite `tensor`.
        """
        self.traffic["gradient"] += tensor.nbytes
        return start_all_reduce(tensor, self.group(ranks))

    def start_reduce_scatter(self, row: torch.Tensor, ranks: tuple[int, ...]) -> PendingRecv:
        """Start the reduce-scatter of a one-dimensional tensor of gradients over `ranks`. The
        tensor is split into one equal part per rank; the result is the sum of this rank's part.
        """
        self.traffic["gradient"] += row.nbytes
        return start_reduce_scatter(row.view(len(ranks), -1), self.group(ranks))

    def all_gather_in_place(self, row: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """All-gather the one-dimensional tensor `row` over `ranks`, in place. The row consists of
        one equal part per rank; before the call, this rank's part is up to date. The caller adds
        the bytes to `traffic`.
        """
        rows = row.view(len(ranks), -1)
        all_gather(rows[ranks.index(self.rank)], self.group(ranks), rows)

    def scalar_max(self, number: torch.Tensor) -> torch.Tensor:
        """Return the maximum of a scalar tensor over all ranks, [] on the device. Does not count in
        `traffic`.
        """
        return self._all_reduce_scalar(number, dist.ReduceOp.MAX)

    def scalar_sum(self, number: torch.Tensor) -> torch.Tensor:
        """Return the sum of a scalar tensor over all ranks, [] on the device, bitwise equal on all
        ranks. Does not count in `traffic`.
        """
        return self._all_reduce_scalar(number, dist.ReduceOp.SUM)

    def _all_reduce_scalar(
        self, number: torch.Tensor, how: dist.ReduceOp.RedOpType
    ) -> torch.Tensor:
        """Return the all-reduce of a scalar tensor over all ranks with the operation `how`."""
        if self.world_size == 1:
            return number
        return start_all_reduce(number, self.group(tuple(range(self.world_size))), how).wait()

    def sum_over_ranks(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> torch.Tensor:
        """Return the elementwise sum of a tensor over `ranks`. Does not count in `traffic`."""
        with self.heartbeat.record_wait():
            return start_all_reduce(tensor, self.group(ranks)).wait()

    def gather_numbers(self, numbers: list[float]) -> list[list[float]]:
        """Return the lists `numbers` of all ranks, in the order of ranks. The lists must have equal
        lengths.
        """
        if self.world_size == 1:
            return [numbers]
        with self.heartbeat.record_wait():
            found: list[list[float]] = all_gather(
                torch.tensor(numbers, dtype=torch.float64), None
            ).tolist()
        return found

    def finish(self) -> None:
        """Wait until all sends of the step have ended."""
        self._sends.finish()

    def stop(self) -> None:
        """Leave all process groups and, if `start` joined the world, the world. Collective over all
        ranks: it begins with a barrier, because gloo aborts a rank whose peer ends while the rank
        closes its threads.
        """
        self._sends.close()
        if not dist.is_initialized():
            return
        with self.heartbeat.record_wait():
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


def _connect_to_launcher_store(patience: timedelta, signed: bool) -> Store | None:
    """Return a connection to the store that the launcher hosts; None if another program started
    this rank, so that torch finds or creates a store.

    With `signed`, the store verifies signatures (`SignedStore`) if the launcher has set a key.
    NCCL's threads need the unsigned store: they use the store even while they are being stopped,
    and must not wait for Python then.
    """
    if ATTEMPT_VARIABLE not in os.environ:
        return None
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=patience
    )
    # The key is missing if torchrun, and not autopipe's launcher, has started the rank.
    key = os.environ.pop(KEY_VARIABLE, "")
    if not signed or not key:
        return store
    return SignedStore(
        store, Signer(bytes.fromhex(key), os.environ["TORCHELASTIC_RUN_ID"]), patience
    )


def _choose_device(wanted: str) -> torch.device:
    """Return the device for the value `wanted` of `--device`. `auto` selects a GPU if there is one.
    Raise LaunchError if CUDA is requested but not available.
    """
    if wanted in ("cpu", "meta"):
        return torch.device("cpu")
    # CUDA_DEVICE_MAX_CONNECTIONS and CUDA_MODULE_LOADING must be set before the first CUDA call,
    # because CUDA reads them when it starts.
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
    not report it.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        domain = f"{properties.pci_domain_id:04x}"
        return f"{domain}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return ""
