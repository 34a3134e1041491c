"""One stage on one rank: the verbs that a generated step is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Protocol, TypeVar

import torch
from torch.autograd.graph import GradientEdge

from autopipe.backends.torch.runtime.heartbeat import Heartbeat
from autopipe.backends.torch.runtime.parameters import Arguments
from autopipe.backends.torch.runtime.random_streams import Random
from autopipe.backends.torch.runtime.report import Clock
from autopipe.backends.torch.runtime.stage_io import Data, Loss, Receive, Send, Wire
from autopipe.backends.torch.runtime.transport import (
    Block,
    Form,
    OutputEdge,
    PendingRecv,
    PendingSend,
    Transport,
    added,
    extents,
    joined,
    output_edge,
    part,
)
from autopipe.backends.torch.runtime.weight_gradients import Waiting, compute_all
from autopipe.ir.schedule import MicroBatchSlice, Task

Tensors = dict[str, torch.Tensor]
_End = TypeVar("_End", Receive, Send)


@dataclass(slots=True)
class ForwardState:
    """Tensors that a forward leaves for its backward."""

    arguments: Tensors
    """Arguments whose gradients are needed."""
    roots: tuple[OutputEdge, ...]
    """Of the results, whose numbers are kept by nobody but those operators that need them."""
    gradients: dict[int, list[Block]] = field(default_factory=dict)
    """Gradients of results as they come in from stages on this rank."""
    waiting: Waiting = field(default_factory=list)
    """Where backwards are split: gradients of parameters that the first half leaves."""


class StageContext(Protocol):
    """The rank as its stages see it."""

    task: str

    @property
    def number(self) -> int: ...
    @property
    def train(self) -> bool: ...
    @property
    def transport(self) -> Transport: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def heartbeat(self) -> Heartbeat: ...
    @property
    def stages(self) -> Mapping[int, Stage]: ...
    def autocast(self) -> AbstractContextManager[object]: ...
    def begin_drawing(self, stage: int, micro_batch: int, random: Random) -> None: ...
    def read(self, stage: int, micro_batch: int, data: Data) -> torch.Tensor: ...
    def collect(self, stage: int, micro_batch: int, results: tuple[torch.Tensor, ...]) -> None: ...
    def before_last_gradients(self, stage: Stage) -> None: ...
    def after_gradients(self, stage: Stage) -> None: ...
    def comes_to(self, task: Task) -> bool: ...


class Stage:
    """Runs a stage's forward and backward and its part of the exchanges, micro-batch by micro-batch."""

    def __init__(
        self, rank: StageContext, number: int, module: ModuleType, arguments: Arguments, wires: tuple[Wire, ...]
    ) -> None:
        self._rank = rank
        self.number = number
        self._inputs: dict[str, Form] = module.INPUTS
        self._outputs: tuple[Form, ...] = tuple(module.OUTPUTS.values())
        self._p = arguments
        self._data = [wire for wire in wires if isinstance(wire, Data)]
        self.receives = tuple(wire for wire in wires if isinstance(wire, Receive))
        self.sends = tuple(wire for wire in wires if isinstance(wire, Send))
        self._turns = {wire.channel: MicroBatchSlice(*wire.slice) for wire in wires if isinstance(wire, Receive | Send)}
        """By channel."""
        self._loss = next((wire for wire in wires if isinstance(wire, Loss)), None)
        self._forward = module.forward
        self.readers = Counter(int(name[1:]) for segment in getattr(module, "SEGMENTS", ()) for name in segment)
        """By parameter the segments that run again and read it."""
        self._arriving: dict[tuple[int, bool], dict[int, PendingRecv]] = {}
        """By micro-batch, and whether they are gradients, the messages that come, by channel."""
        self._leaving: dict[tuple[int, bool], dict[int, torch.Tensor]] = {}
        """In the same way what is to be sent."""
        self._handed: dict[int, dict[int, torch.Tensor]] = {}
        self._kept: dict[int, ForwardState] = {}
        self._waiting: dict[int, Waiting] = {}
        self.backwards = 0
        """Micro-batches of this step whose gradients of parameters are being or have been computed."""
        self.losses: dict[int, torch.Tensor] = {}

    @property
    def loss_share(self) -> float:
        """Weight of one micro-batch's loss on this rank in the step's loss; 0 where the stage gives no loss."""
        return 0.0 if self._loss is None else self._loss.share

    def receive(self, micro_batch: int, source: int | None = None) -> None:
        """Post the receives of the arguments that come from other ranks, all or those of one stage."""
        for wire in self._due(self.receives, micro_batch):
            if self._is_remote(wire) and source in (None, wire.stage):
                self.ask(wire, micro_batch)

    def _is_remote(self, wire: Receive | Send) -> bool:
        return wire.rank != self._rank.number

    def _due(self, wires: tuple[_End, ...], micro_batch: int) -> list[_End]:
        """The wires that carry something of a micro-batch."""
        return [wire for wire in wires if self._turns[wire.channel].has(micro_batch)]

    def _form(self, wire: Receive | Send) -> Form:
        """Of what goes along a wire, and of its gradient."""
        dtype, shape = self._outputs[wire.result] if isinstance(wire, Send) else self._inputs[wire.argument]
        return dtype, shape if wire.box is None else extents(wire.box)

    def ask(self, wire: Receive | Send, micro_batch: int) -> PendingRecv:
        """Post the receive of what comes along a wire: an argument, or the gradient of a result."""
        gradient = isinstance(wire, Send)
        arrival = self._rank.transport.receive(self._form(wire), wire.rank, wire.channel, gradient)
        self._arriving.setdefault((micro_batch, gradient), {})[wire.channel] = arrival
        return arrival

    def give(self, wire: Receive | Send, micro_batch: int) -> PendingSend:
        """Start sending what goes along a wire: a result, or the gradient of an argument."""
        gradient = isinstance(wire, Receive)
        block = self._leaving[micro_batch, gradient].pop(wire.channel)
        return self._rank.transport.send(block, wire.rank, wire.channel, gradient)

    def forward(self, micro_batch: int) -> None:
        """Wait for the arguments and compute."""
        self._rank.task = task = f"{self.number}F{micro_batch}"
        arguments = self._arguments(micro_batch)
        self._rank.begin_drawing(self.number, micro_batch, self._p.random)
        start = self._rank.clock.mark()
        results = self._results(arguments)
        self._rank.clock.add(task, start)
        if self._rank.train:
            kept = ForwardState(_asking(arguments), tuple(map(output_edge, results)))
            kept.waiting = self._p.weight_grads.take()
            self._kept[micro_batch] = kept
        self._leaving[micro_batch, False] = {
            wire.channel: part(results[wire.result].detach(), wire.box)
            for wire in self._due(self.sends, micro_batch)
            if self._is_remote(wire)
        }
        if self._loss is not None:
            self.losses[micro_batch] = results[self._loss.result].detach()
        self._hand_over(micro_batch, results)
        if not self._rank.train:
            self._rank.collect(self.number, micro_batch, results)

    def _results(self, arguments: Tensors) -> tuple[torch.Tensor, ...]:
        """The results in the types that those who receive them expect: autocast computes in narrower ones."""
        with torch.set_grad_enabled(self._rank.train), self._rank.autocast():
            results = self._forward(self._p, *arguments.values())
            return tuple(result.to(dtype) for result, (dtype, _) in zip(results, self._outputs, strict=True))

    def _arguments(self, micro_batch: int) -> Tensors:
        found: Tensors = {}
        parts: dict[str, list[Block]] = {}
        for data in self._data:
            found[data.argument] = self._rank.read(self.number, micro_batch, data)
        arrivals = self._arriving.pop((micro_batch, False), {})
        handed = self._handed.pop(micro_batch, {})
        for wire in self._due(self.receives, micro_batch):
            tensor = self._await(arrivals[wire.channel]) if self._is_remote(wire) else handed[wire.channel]
            parts.setdefault(wire.argument, []).append((tensor, wire.box))
        gradients = {wire.argument for wire in self.receives if wire.gradient}
        for name, pieces in parts.items():
            tensor = joined(pieces, *self._inputs[name])
            found[name] = tensor.requires_grad_(True) if name in gradients and self._rank.train else tensor
        return {name: found[name] for name in self._inputs}

    def _await(self, arrival: PendingRecv) -> torch.Tensor:
        """Wait for a tensor from another rank."""
        with self._rank.heartbeat.waiting():
            return arrival.wait()

    def _hand_over(self, micro_batch: int, results: tuple[torch.Tensor, ...]) -> None:
        """Give results to stages on this same rank."""
        for wire in self._due(self.sends, micro_batch):
            if not self._is_remote(wire):
                block = part(results[wire.result].detach(), wire.box)
                self._rank.stages[wire.stage].take(self._turns[wire.channel].message(micro_batch), wire.channel, block)

    def take(self, number: int, channel: int, tensor: torch.Tensor) -> None:
        """The message of this `number` on a channel from a stage on this rank: an argument."""
        # A copy, because requires_grad is set on what arrives, and two stages may share the tensor.
        self._handed.setdefault(self._turns[channel].micro_batch(number), {})[channel] = tensor.clone()

    def send(self, micro_batch: int) -> None:
        """Start sending the results that other ranks need."""
        for wire in self._due(self.sends, micro_batch):
            if self._is_remote(wire):
                self.give(wire, micro_batch)

    def receive_gradient(self, micro_batch: int, source: int | None = None) -> None:
        """Post the receives of the results' gradients, all or those of one stage."""
        for wire in self._due(self.sends, micro_batch):
            if wire.gradient and self._is_remote(wire) and source in (None, wire.stage):
                self.ask(wire, micro_batch)

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
        """Run autograd; gradients that a split backward leaves for later are left, or computed behind it."""
        self._rank.task = task = f"{self.number}{phase}{micro_batch}"
        kept = self._kept.pop(micro_batch)
        incoming = self._incoming(kept, micro_batch)
        start = self._rank.clock.mark()
        seeds = self._seeds(kept, incoming)
        if seeds:
            torch.autograd.backward([edge for edge, _ in seeds], [gradient for _, gradient in seeds])
        kept.waiting += self._p.weight_grads.take()  # What ran again leaves.
        if phase == "I":
            self._waiting[micro_batch] = kept.waiting
        else:
            compute_all(kept.waiting)
        self._rank.clock.add(task, start)
        gradients = {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in _asking(kept.arguments).items()
        }
        self._hand_back(micro_batch, gradients)
        self._leaving[micro_batch, True] = {
            wire.channel: part(gradients[wire.argument], wire.box)
            for wire in self._due(self.receives, micro_batch)
            if wire.gradient and self._is_remote(wire)
        }

    def _incoming(self, kept: ForwardState, micro_batch: int) -> dict[int, list[Block]]:
        """Wait for the gradients of results, and give them by result."""
        arrivals = self._arriving.pop((micro_batch, True), {})
        found: dict[int, list[Block]] = dict(kept.gradients)
        for wire in self.sends:
            if wire.channel in arrivals:
                found.setdefault(wire.result, []).append((self._await(arrivals[wire.channel]), wire.box))
        return found

    def _seeds(self, kept: ForwardState, incoming: dict[int, list[Block]]) -> list[tuple[GradientEdge, torch.Tensor]]:
        """Where backward starts, and the gradients there."""
        if self._loss is not None:
            loss = kept.roots[self._loss.result]
            share = torch.full(loss.shape, self._loss.share, dtype=loss.dtype, device=loss.device)
            incoming.setdefault(self._loss.result, []).append((share, None))
        if self._p.group.size > 1:
            # Exchanges in backward wait for the whole group, so a rank that no gradient comes to takes part too.
            for index in range(len(kept.roots)):
                incoming.setdefault(index, [])
        return [
            (edge, added(pieces, kept.roots[index]))
            for index, pieces in sorted(incoming.items())
            if (edge := kept.roots[index].edge) is not None
        ]

    def _hand_back(self, micro_batch: int, gradients: Tensors) -> None:
        """Give gradients to stages on this same rank."""
        for wire in self._due(self.receives, micro_batch):
            if wire.gradient and not self._is_remote(wire):
                block = part(gradients[wire.argument], wire.box)
                number = self._turns[wire.channel].message(micro_batch)
                self._rank.stages[wire.stage].take_gradient(number, wire.channel, block)

    def take_gradient(self, number: int, channel: int, tensor: torch.Tensor) -> None:
        """The message of this `number` on a channel from a stage on this rank: the gradient of a result."""
        wire = next(wire for wire in self.sends if wire.channel == channel)
        kept = self._kept[self._turns[channel].micro_batch(number)]
        kept.gradients.setdefault(wire.result, []).append((tensor, wire.box))

    def send_gradient(self, micro_batch: int) -> None:
        """Start sending the arguments' gradients to where the arguments came from."""
        for wire in self._due(self.receives, micro_batch):
            if wire.gradient and self._is_remote(wire):
                self.give(wire, micro_batch)

    def end_step(self) -> None:
        """Forget the step's micro-batches."""
        self._kept.clear()
        self._leaving.clear()
        self.losses.clear()
        self.backwards = 0


def _asking(arguments: Tensors) -> Tensors:
    """The arguments whose gradients are asked for."""
    return {name: tensor for name, tensor in arguments.items() if tensor.requires_grad}
