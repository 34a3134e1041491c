"""Dry run (`--dry-run`): the step of one rank without the other ranks. Received tensors are filled
with zeros; sent tensors are only counted.

With `--device meta`, tensors have no memory: they are fake tensors (torch's `FakeTensor`) that
report device CPU. Torch's device `meta` is not used, because it has no autocast, so that a plan in
bf16 would run in other types. With `--device cuda` on a machine without a GPU, fake tensors report
a GPU (`fake_cuda`).
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopipe.backends.torch import fake_cuda
from autopipe.backends.torch.runtime.communication.transport import (
    PendingRecv,
    PendingSend,
    TensorForm,
    Transport,
)
from autopipe.backends.torch.runtime.modes.execution import Execution
from autopipe.backends.torch.runtime.state.parameters import dtype_name
from autopipe.backends.torch.runtime.step.ports import Recv, Send
from autopipe.backends.torch.runtime.step.stage import RankContext, Stage, Tensors
from autopipe.backends.torch.runtime.step.update import ParameterUpdate
from autopipe.backends.torch.runtime.watch.heartbeat import Heartbeat, Timeouts
from autopipe.backends.torch.runtime.watch.report import Reporter, peak_memory
from autopipe.backends.torch.torch_interfaces import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeStore,
    FakeTensorMode,
    TorchDispatchMode,
    completed_work_handle,
    result_count,
    storage_key,
)
from autopipe.ir.errors import LaunchError
from autopipe.ir.program import order_by_kind


@dataclass(frozen=True, slots=True)
class DryMessage:
    """A transfer on a channel from rank `source` to rank `target`; `size` in bytes. The dry runs of
    both ranks report equal transfers, so their reports can be compared.
    """

    channel: int
    gradient: bool
    source: int
    target: int
    dtype: str
    shape: tuple[int, ...]
    size: int


class DryTransport(Transport):
    """A transport without other ranks, on torch's process group backend `fake`. It counts
    transfers.
    """

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.nccl = self.staged = False
        self.messages: Counter[DryMessage] = Counter()

    def start(self) -> None:
        if self.world_size > 1:
            dist.init_process_group(
                "fake", rank=self.rank, world_size=self.world_size, store=FakeStore()
            )

    def send(self, tensor: torch.Tensor, rank: int, channel: int, gradient: bool) -> PendingSend:
        self._count_message(tensor, self.rank, rank, channel, gradient)
        pending = super().send(tensor, rank, channel, gradient)
        pending.wait()
        return pending

    def recv(self, like: TensorForm, rank: int, channel: int, gradient: bool) -> PendingRecv:
        pending = super().recv(like, rank, channel, gradient)
        pending.buffer.zero_()
        self._count_message(pending.buffer, rank, self.rank, channel, gradient)
        return pending

    def _count_message(
        self, tensor: torch.Tensor, source: int, target: int, channel: int, gradient: bool
    ) -> None:
        """Count the transfer of `tensor` from rank `source` to rank `target`."""
        form = dtype_name(tensor.dtype), tuple(tensor.shape)
        self.messages[DryMessage(channel, gradient, source, target, *form, tensor.nbytes)] += 1


class DryStage(Stage):
    """A stage that checks types and shapes of arguments, results and sent tensors against the
    generated code. In a dry run there is no other rank that would notice a difference.
    """

    def start_send(self, port: Recv | Send, micro_batch: int) -> PendingSend:
        block = self._leaving[micro_batch, isinstance(port, Recv)][port.channel]
        self._check_form(
            f"what goes to rank {port.rank} on channel {port.channel}",
            block,
            self._form_of_port(port),
        )
        return super().start_send(port, micro_batch)

    def _run_forward(self, arguments: Tensors) -> tuple[torch.Tensor, ...]:
        for name, tensor in arguments.items():
            self._check_form(f"argument {name}", tensor, self._inputs[name])
        results = super()._run_forward(arguments)
        for index, (result, form) in enumerate(zip(results, self._outputs, strict=True)):
            self._check_form(f"result {index}", result, form)
        return results

    def _check_form(self, what: str, tensor: torch.Tensor, form: TensorForm) -> None:
        """Raise LaunchError if the type or shape of a tensor differs from `form`. `what` names the
        tensor in the message.
        """
        found = tensor.dtype, tuple(tensor.shape)
        if found != form:
            there, here = (f"{dtype_name(dtype)} {list(shape)}" for dtype, shape in (found, form))
            raise LaunchError(f"{what} of stage {self.number} is {there}, expected {here}")


class DryExecution(Execution):
    """Runs one rank without the other ranks. With `--device meta`, and if there is a fake GPU,
    tensors have no values.
    """

    stage_type = DryStage
    probes = True
    can_skip_updates = False

    def __init__(self) -> None:
        self._tracker: MemoryTracker | None = None

    def make_transport(self, device: str, timeouts: Timeouts, heartbeat: Heartbeat) -> Transport:
        return DryTransport(device, timeouts, heartbeat)

    @contextmanager
    def context(self, rank: RankContext) -> Iterator[None]:
        if rank.options.device != "meta" and not fake_cuda.is_loaded():
            yield
            return
        self.has_values = False
        with use_fake_tensors(rank.device) as self._tracker:
            yield

    def make_reporter(self, rank: RankContext) -> Reporter:
        assert isinstance(rank.transport, DryTransport)
        return DryReporter(rank, rank.transport, self._tracker)

    def on_optimizer(self, update: ParameterUpdate) -> None:
        # A dry run runs a single step. Its peak memory must equal the peak of later steps, in which
        # the optimizer's state exists from the start, so the state is allocated here.
        update.make_optimizer_state()


class DryReporter(Reporter):
    """Reports tasks, transfers and memory of one rank in one step. The base class reports metrics
    of all ranks instead.
    """

    def __init__(
        self, rank: RankContext, transport: DryTransport, tracker: MemoryTracker | None
    ) -> None:
        super().__init__(rank)
        self._transport = transport
        self._tracker = tracker

    def end_step(self) -> None:
        rank = self._rank
        messages = self._transport.messages
        tracker = self._tracker
        times = rank.clock.end_step()
        times.wait()
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        for each, count in messages.items():
            if each.source == rank.number:
                sent[each.target] += count * each.size
            else:
                received[each.source] += count * each.size
        report = {
            "rank": rank.number,
            "world_size": rank.manifest.world_size,
            "stages": tuple(rank.stages),
            "tasks": tuple(span.task for span in times.spans()),
            "messages": tuple(asdict(each) | {"count": count} for each, count in messages.items()),
            # `sent_bytes` and `received_bytes` count activations and their gradients by rank.
            # `communication_bytes` counts all communication by kind.
            "sent_bytes": dict(sorted(sent.items())),
            "received_bytes": dict(sorted(received.items())),
            "communication_bytes": order_by_kind(self._transport.traffic),
            "parameters": sum(tensor.numel() for tensor in rank.parameters.values()),
            "parameter_bytes": sum(tensor.nbytes for tensor in rank.parameters.values()),
            # Torch measures no memory of fake tensors, so the tracker computes their peak.
            "peak_memory_bytes": peak_memory(rank.device)
            if tracker is None
            else tracker.peak_bytes,
        }
        messages.clear()
        if rank.options.report is not None:
            rank.options.report.write_text(json.dumps(report) + "\n", encoding="utf-8")


_NEEDS_VALUES_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
_FAKE_TENSOR_MESSAGE = "is not supported for tensor subclasses"
"""Part of the message of torch's error if `tolist` or `numpy` is called on a fake tensor."""


@contextmanager
def use_fake_tensors(device: torch.device) -> Iterator[MemoryTracker]:
    """Make tensors that are created in the block fake, and make collectives return at once. Yield a
    tracker of the memory that tensors on `device` would use. Raise LaunchError if an operator reads
    values of a tensor, or if the shape of its result depends on values.
    """
    tensors = MemoryTracker(device)
    try:
        # Data and constants are real tensors, which `allow_non_fake_inputs` permits. They become
        # fake when an operator combines them with a fake tensor.
        with FakeTensorMode(allow_non_fake_inputs=True), tensors:
            yield tensors
    except RuntimeError as error:
        if not isinstance(error, _NEEDS_VALUES_ERRORS) and _FAKE_TENSOR_MESSAGE not in str(error):
            raise
        raise LaunchError(
            f"an operator reads values, but the tensors of a dry run have none: {error}",
            hint="run the dry run of this rank with --device cpu",
        ) from error


class MemoryTracker(TorchDispatchMode):
    """Computes the peak memory of fake tensors on one type of device: the maximum, over time, of
    the bytes of all storages that are alive.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device.type
        self.peak_bytes = 0
        self._live_bytes = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, count the storages of its results, and return the results. A collective
        does not run; its work handle is already completed.
        """
        if function.namespace == "c10d":
            done = completed_work_handle()
            return done if result_count(function) == 1 else (args[0], done)
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor) and each.device.type == self._device_type:
                self._count_storage(each.untyped_storage())
        return result

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        """Count the bytes of `storage`, unless it is counted already, until it is freed."""
        key = storage_key(storage)
        size = storage.nbytes()
        if key in self._storages:
            return

        def forget_storage(_: object) -> None:
            del self._storages[key]
            self._live_bytes -= size

        self._storages[key] = weakref.ref(storage, forget_storage)
        self._live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
