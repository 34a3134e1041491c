"""One stage on one rank: what its file says it takes and gives, and the verbs that a generated step is made of."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Protocol, TypeVar

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopipe.backends.torch.runtime.data import Slices
from autopipe.backends.torch.runtime.failures import Options
from autopipe.backends.torch.runtime.heartbeat import Heartbeat
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.parameters import Arguments
from autopipe.backends.torch.runtime.random_streams import Random
from autopipe.backends.torch.runtime.transport import ControlGroup, Form, PendingRecv, PendingSend, Transport
from autopipe.backends.torch.runtime.weight_gradients import Waiting, compute_all
from autopipe.ir.schedule import MicroBatchSlice, Task

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Data:
    """An argument read from the batch: the block `box` of one micro-batch of the graph input `name`."""

    argument: str
    name: str
    box: Slices


@dataclass(frozen=True, slots=True)
class Receive:
    """An argument, or the block `box` of it, that comes from a stage on `rank`; its gradient goes back there.

    `slice` is the index and count of the `MicroBatchSlice` of the stage's micro-batches of which it carries something.
    """

    argument: str
    rank: int
    stage: int
    channel: int
    gradient: bool = True
    box: Slices | None = None
    slice: tuple[int, int] = (0, 1)


@dataclass(frozen=True, slots=True)
class Send:
    """A result, or the block `box` of it, that goes to a stage on `rank`; its gradient comes back from there.

    `slice` is as in `Receive`.
    """

    result: int
    rank: int
    stage: int
    channel: int
    gradient: bool = True
    box: Slices | None = None
    slice: tuple[int, int] = (0, 1)


@dataclass(frozen=True, slots=True)
class Loss:
    """The result that is the loss; `share` is its weight in the step's loss, over all ranks and micro-batches."""

    result: int
    share: float


Port = Data | Receive | Send | Loss
_Between = TypeVar("_Between", Receive, Send)

Block = tuple[torch.Tensor, Slices | None]
"""A block of a tensor, and where in it; None for all of it."""


@dataclass(frozen=True, slots=True)
class OutputEdge:
    """A result's place in autograd's graph (None where no gradient flows through it), without the result's numbers."""

    edge: GradientEdge | None
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def output_edge(result: torch.Tensor) -> OutputEdge:
    edge = get_gradient_edge(result) if result.requires_grad else None
    return OutputEdge(edge, result.shape, result.dtype, result.device)


def _part(tensor: torch.Tensor, box: Slices | None) -> torch.Tensor:
    return tensor if box is None else tensor[tuple(slice(*each) for each in box)]


def _joined(pieces: list[Block], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if len(pieces) == 1 and pieces[0][1] is None:
        return pieces[0][0]
    whole = torch.empty(shape, dtype=dtype, device=pieces[0][0].device)
    for tensor, box in pieces:
        _part(whole, box).copy_(tensor)
    return whole


def _added(pieces: list[Block], result: OutputEdge) -> torch.Tensor:
    """The sum of a result's gradients, each of a block; blocks that no one uses have gradient zero."""
    if len(pieces) == 1 and pieces[0][1] is None:
        return pieces[0][0]
    total = torch.zeros(result.shape, dtype=result.dtype, device=result.device)
    for tensor, box in pieces:
        _part(total, box).add_(tensor)
    return total


@dataclass(frozen=True, slots=True)
class MeasuredSpan:
    """A task's compute time, in seconds from the start of the step."""

    task: str
    start: float
    end: float


Mark = float | torch.cuda.Event


class Clock:
    """Marks in time: the host's clock on the CPU, events on a CUDA stream, which cost the stream nothing."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._begin: Mark = 0.0
        self.began = 0.0
        """When the step began, in seconds since 1970: what puts the steps of several ranks on one axis."""
        self._spans: list[tuple[str, Mark, Mark]] = []

    def mark(self) -> Mark:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin_step(self) -> None:
        self._spans = []
        self.began = time.time()
        self._begin = self.mark()

    def add(self, task: str, start: Mark) -> None:
        """A task that started at `start` and ends now."""
        self._spans.append((task, start, self.mark()))

    def spans(self) -> list[MeasuredSpan]:
        """The step's tasks; waits for the device to have done them."""
        if self._cuda:
            torch.cuda.synchronize()
        return [MeasuredSpan(task, self._since(start), self._since(end)) for task, start, end in self._spans]

    def _since(self, mark: Mark) -> float:
        if isinstance(mark, float):
            assert isinstance(self._begin, float)
            return mark - self._begin
        assert not isinstance(self._begin, float)
        return float(self._begin.elapsed_time(mark)) / 1000.0


class RankContext(Protocol):
    """The rank as its stages, its reports and the order of blocking messages see it."""

    number: int
    train: bool
    task: str
    steps_done: int
    options: Options
    manifest: Manifest
    device: torch.device
    transport: Transport
    control_group: ControlGroup
    heartbeat: Heartbeat
    clock: Clock
    stages: dict[int, Stage]
    parameters: dict[int, torch.Tensor]

    def autocast(self) -> AbstractContextManager[object]: ...
    def begin_drawing(self, stage: int, micro_batch: int, random: Random) -> None: ...
    def read(self, stage: int, micro_batch: int, data: Data) -> torch.Tensor: ...
    def collect(self, stage: int, micro_batch: int, results: tuple[torch.Tensor, ...]) -> None: ...
    def before_last_gradients(self, stage: Stage) -> None: ...
    def after_gradients(self, stage: Stage) -> None: ...
    def comes_to(self, task: Task) -> bool: ...


@dataclass(slots=True)
class ForwardState:
    """Tensors that a forward leaves for its backward."""

    arguments: Tensors
    results: tuple[OutputEdge, ...]
    """Their numbers are kept by nobody but those operators that need them."""
    gradients: dict[int, list[Block]] = field(default_factory=dict)
    """Gradients of results as they come in from stages on this rank."""
    waiting: Waiting = field(default_factory=list)
    """Where backwards are split: gradients of parameters that the first half leaves."""


class Stage:
    """Runs a stage's forward and backward and its part of the exchanges, micro-batch by micro-batch."""

    def __init__(
        self, rank: RankContext, number: int, module: ModuleType, arguments: Arguments, ports: tuple[Port, ...]
    ) -> None:
        self._rank = rank
        self.number = number
        self._inputs: dict[str, Form] = module.INPUTS
        self._outputs: tuple[Form, ...] = tuple(module.OUTPUTS.values())
        self._p = arguments
        self._data = [port for port in ports if isinstance(port, Data)]
        self.receives = tuple(port for port in ports if isinstance(port, Receive))
        self.sends = tuple(port for port in ports if isinstance(port, Send))
        between = (port for port in ports if isinstance(port, Receive | Send))
        self._slices = {port.channel: MicroBatchSlice(*port.slice) for port in between}
        self._loss = next((port for port in ports if isinstance(port, Loss)), None)
        self._forward = module.forward
        self.readers = Counter(int(name[1:]) for segment in getattr(module, "SEGMENTS", ()) for name in segment)
        """By parameter the segments that run again and read it."""
        self._arriving: dict[tuple[int, bool], dict[int, PendingRecv]] = {}
        """By micro-batch, and whether they are gradients, the messages that come, by channel."""
        self._leaving: dict[tuple[int, bool], dict[int, torch.Tensor]] = {}
        """In the same way what is to be sent."""
        self._local: dict[int, dict[int, torch.Tensor]] = {}
        """By micro-batch and channel the arguments from stages on this rank."""
        self._kept: dict[int, ForwardState] = {}
        self._waiting: dict[int, Waiting] = {}
        self.backwards = 0
        """Micro-batches of this step whose gradients of parameters are being or have been computed."""
        self.losses: dict[int, torch.Tensor] = {}

    @property
    def loss_share(self) -> float:
        """Weight of one micro-batch's loss on this rank in the step's loss; 0 where the stage gives no loss."""
        return 0.0 if self._loss is None else self._loss.share

    def _due(self, ports: tuple[_Between, ...], micro_batch: int, gradient: bool = False) -> list[_Between]:
        return [
            port for port in ports if self._slices[port.channel].has(micro_batch) and (port.gradient or not gradient)
        ]

    def _is_remote(self, port: Receive | Send) -> bool:
        return port.rank != self._rank.number

    def _form(self, port: Receive | Send) -> Form:
        """Of what goes through a port, and of its gradient."""
        dtype, shape = self._outputs[port.result] if isinstance(port, Send) else self._inputs[port.argument]
        return dtype, shape if port.box is None else tuple(stop - start for start, stop in port.box)

    def receive(self, micro_batch: int, source: int | None = None) -> None:
        """Post the receives of the arguments that come from other ranks, all or those of one stage."""
        for port in self._due(self.receives, micro_batch):
            if self._is_remote(port) and source in (None, port.stage):
                self.post_recv(port, micro_batch)

    def receive_gradient(self, micro_batch: int, source: int | None = None) -> None:
        """Post the receives of the results' gradients, all or those of one stage."""
        for port in self._due(self.sends, micro_batch, gradient=True):
            if self._is_remote(port) and source in (None, port.stage):
                self.post_recv(port, micro_batch)

    def send(self, micro_batch: int) -> None:
        """Start sending the results that other ranks need."""
        for port in self._due(self.sends, micro_batch):
            if self._is_remote(port):
                self.start_send(port, micro_batch)

    def send_gradient(self, micro_batch: int) -> None:
        """Start sending the arguments' gradients to where the arguments came from."""
        for port in self._due(self.receives, micro_batch, gradient=True):
            if self._is_remote(port):
                self.start_send(port, micro_batch)

    def post_recv(self, port: Receive | Send, micro_batch: int) -> PendingRecv:
        """Post the receive of what comes through a port: an argument, or the gradient of a result."""
        gradient = isinstance(port, Send)
        pending = self._rank.transport.receive(self._form(port), port.rank, port.channel, gradient)
        self._arriving.setdefault((micro_batch, gradient), {})[port.channel] = pending
        return pending

    def start_send(self, port: Receive | Send, micro_batch: int) -> PendingSend:
        """Start sending what goes through a port: a result, or the gradient of an argument."""
        gradient = isinstance(port, Receive)
        block = self._leaving[micro_batch, gradient].pop(port.channel)
        return self._rank.transport.send(block, port.rank, port.channel, gradient)

    def forward(self, micro_batch: int) -> None:
        """Wait for the arguments and compute."""
        rank = self._rank
        rank.task = task = f"{self.number}F{micro_batch}"
        arguments = self._arguments(micro_batch)
        rank.begin_drawing(self.number, micro_batch, self._p.random)
        start = rank.clock.mark()
        results = self._results(arguments)
        rank.clock.add(task, start)
        if rank.train:
            state = ForwardState(_with_gradients(arguments), tuple(map(output_edge, results)))
            state.waiting = self._p.weight_grads.take()
            self._kept[micro_batch] = state
        leaving = self._leaving[micro_batch, False] = {}
        for port in self._due(self.sends, micro_batch):
            block = _part(results[port.result].detach(), port.box)
            if self._is_remote(port):
                leaving[port.channel] = block
            else:
                number = self._slices[port.channel].message(micro_batch)
                rank.stages[port.stage].accept(number, port.channel, block)
        if self._loss is not None:
            self.losses[micro_batch] = results[self._loss.result].detach()
        if not rank.train:
            rank.collect(self.number, micro_batch, results)

    def _results(self, arguments: Tensors) -> tuple[torch.Tensor, ...]:
        """The results in the types that those who receive them expect: autocast computes in narrower ones."""
        with torch.set_grad_enabled(self._rank.train), self._rank.autocast():
            results = self._forward(self._p, *arguments.values())
            return tuple(result.to(dtype) for result, (dtype, _) in zip(results, self._outputs, strict=True))

    def _arguments(self, micro_batch: int) -> Tensors:
        found = {data.argument: self._rank.read(self.number, micro_batch, data) for data in self._data}
        parts: dict[str, list[Block]] = {}
        pending = self._arriving.pop((micro_batch, False), {})
        local = self._local.pop(micro_batch, {})
        for port in self._due(self.receives, micro_batch):
            tensor = self._await(pending[port.channel]) if self._is_remote(port) else local[port.channel]
            parts.setdefault(port.argument, []).append((tensor, port.box))
        gradients = {port.argument for port in self.receives if port.gradient} if self._rank.train else ()
        for name, pieces in parts.items():
            tensor = _joined(pieces, *self._inputs[name])
            found[name] = tensor.requires_grad_(True) if name in gradients else tensor
        return {name: found[name] for name in self._inputs}

    def _await(self, pending: PendingRecv) -> torch.Tensor:
        with self._rank.heartbeat.waiting():
            return pending.wait()

    def accept(self, number: int, channel: int, tensor: torch.Tensor) -> None:
        """The message of this `number` on a channel from a stage on this rank: an argument."""
        # A copy, because requires_grad is set on what arrives, and two stages may share the tensor.
        self._local.setdefault(self._slices[channel].micro_batch(number), {})[channel] = tensor.clone()

    def accept_gradient(self, number: int, channel: int, tensor: torch.Tensor) -> None:
        """The message of this `number` on a channel from a stage on this rank: the gradient of a result."""
        port = next(port for port in self.sends if port.channel == channel)
        state = self._kept[self._slices[channel].micro_batch(number)]
        state.gradients.setdefault(port.result, []).append((tensor, port.box))

    def backward(self, micro_batch: int) -> None:
        """Wait for the results' gradients and compute those of parameters and arguments."""
        self.backwards += 1
        if not self._p.weight_grads.used:
            self._rank.before_last_gradients(self)
        self._propagate(micro_batch, "B")
        self._rank.after_gradients(self)

    def input_gradient(self, micro_batch: int) -> None:
        """The first half of a backward: wait for the results' gradients and compute those of arguments."""
        self._propagate(micro_batch, "I")

    def weight_gradient(self, micro_batch: int) -> None:
        """The second half: compute the gradients of parameters that the first half left."""
        self._rank.task = task = f"{self.number}W{micro_batch}"
        self.backwards += 1
        start = self._rank.clock.mark()
        compute_all(self._waiting.pop(micro_batch))
        self._rank.clock.add(task, start)
        self._rank.after_gradients(self)

    def _propagate(self, micro_batch: int, phase: str) -> None:
        """Run autograd; gradients that a split backward defers are left, or computed behind it."""
        self._rank.task = task = f"{self.number}{phase}{micro_batch}"
        state = self._kept.pop(micro_batch)
        incoming = self._incoming(state, micro_batch)
        start = self._rank.clock.mark()
        if seeds := self._seeds(state, incoming):
            torch.autograd.backward([edge for edge, _ in seeds], [gradient for _, gradient in seeds])
        state.waiting += self._p.weight_grads.take()  # What ran again leaves.
        if phase == "I":
            self._waiting[micro_batch] = state.waiting
        else:
            compute_all(state.waiting)
        self._rank.clock.add(task, start)
        gradients = {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in state.arguments.items()
        }
        leaving = self._leaving[micro_batch, True] = {}
        for port in self._due(self.receives, micro_batch, gradient=True):
            block = _part(gradients[port.argument], port.box)
            if self._is_remote(port):
                leaving[port.channel] = block
            else:
                number = self._slices[port.channel].message(micro_batch)
                self._rank.stages[port.stage].accept_gradient(number, port.channel, block)

    def _incoming(self, state: ForwardState, micro_batch: int) -> dict[int, list[Block]]:
        """Wait for the gradients of results, and give them by result."""
        pending = self._arriving.pop((micro_batch, True), {})
        found: dict[int, list[Block]] = dict(state.gradients)
        for port in self.sends:
            if port.channel in pending:
                found.setdefault(port.result, []).append((self._await(pending[port.channel]), port.box))
        return found

    def _seeds(self, state: ForwardState, incoming: dict[int, list[Block]]) -> list[tuple[GradientEdge, torch.Tensor]]:
        """Where backward starts, and the gradients there."""
        if self._loss is not None:
            loss = state.results[self._loss.result]
            share = torch.full(loss.shape, self._loss.share, dtype=loss.dtype, device=loss.device)
            incoming.setdefault(self._loss.result, []).append((share, None))
        if self._p.group.size > 1:
            # Exchanges in backward wait for the whole group, so a rank that no gradient comes to takes part too.
            for index in range(len(state.results)):
                incoming.setdefault(index, [])
        return [
            (edge, _added(pieces, state.results[index]))
            for index, pieces in sorted(incoming.items())
            if (edge := state.results[index].edge) is not None
        ]

    def end_step(self) -> None:
        self._kept.clear()
        self._leaving.clear()
        self.losses.clear()
        self.backwards = 0


def _with_gradients(arguments: Tensors) -> Tensors:
    return {name: tensor for name, tensor in arguments.items() if tensor.requires_grad}
