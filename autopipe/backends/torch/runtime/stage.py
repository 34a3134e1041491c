"""One stage on one rank: the verbs that a generated step is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import checkpoint

from autopipe.backends.torch.runtime.parameters import Arguments
from autopipe.backends.torch.runtime.pending import Arrival
from autopipe.backends.torch.runtime.wiring import Data, Loss, Receive, Recompute, Send, Slices, Wire

if TYPE_CHECKING:
    from autopipe.backends.torch.runtime.rank import Rank

Tensors = dict[str, torch.Tensor]


@dataclass(slots=True)
class Kept:
    """What a forward leaves for its backward."""

    arguments: Tensors
    results: tuple[torch.Tensor, ...]
    gradients: dict[int, list[tuple[torch.Tensor, Slices | None]]] = field(default_factory=dict)
    """Gradients of results as they come in from stages on this rank."""


class Stage:
    """Runs a stage's forward and backward and its part of the exchanges, micro-batch by micro-batch."""

    def __init__(
        self, rank: Rank, number: int, module: ModuleType, arguments: Arguments, wires: tuple[Wire, ...]
    ) -> None:
        self._rank = rank
        self.number = number
        self._inputs: dict[str, tuple[torch.dtype, tuple[int, ...]]] = module.INPUTS
        self._outputs: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = tuple(module.OUTPUTS.values())
        self._p = arguments
        self._data = [wire for wire in wires if isinstance(wire, Data)]
        self._receives = [wire for wire in wires if isinstance(wire, Receive)]
        self._sends = [wire for wire in wires if isinstance(wire, Send)]
        self._loss = next((wire for wire in wires if isinstance(wire, Loss)), None)
        self._forward = _recomputed(module.forward) if Recompute() in wires else module.forward
        self._arrivals: dict[int, dict[int, Arrival]] = {}
        self._gradient_arrivals: dict[int, dict[int, Arrival]] = {}
        self._handed: dict[int, dict[int, torch.Tensor]] = {}
        self._kept: dict[int, Kept] = {}
        self._input_gradients: dict[int, Tensors] = {}
        self.backwards = 0
        self.losses: dict[int, torch.Tensor] = {}

    @property
    def loss_share(self) -> float:
        """Weight of one micro-batch's loss on this rank in the step's loss; 0 where the stage gives no loss."""
        return 0.0 if self._loss is None else self._loss.share

    def receive(self, micro_batch: int, source: int | None = None) -> None:
        """Post the receives of the arguments that come from other ranks, all or those of one stage."""
        arrivals = self._arrivals.setdefault(micro_batch, {})
        for wire in self._receives:
            if wire.rank != self._rank.number and source in (None, wire.stage):
                dtype, shape = self._inputs[wire.argument]
                like = (dtype, shape if wire.box is None else _extents(wire.box))
                arrivals[wire.channel] = self._rank.transport.receive(like, wire.rank, wire.channel, False)

    def forward(self, micro_batch: int) -> None:
        """Wait for the arguments and compute."""
        self._rank.task = task = f"{self.number}F{micro_batch}"
        arguments = self._arguments(micro_batch)
        start = self._rank.clock.mark()
        with torch.set_grad_enabled(self._rank.train), self._rank.autocast():
            results = self._typed(self._forward(self._p, *arguments.values()))
        self._rank.clock.add(task, start)
        if self._rank.train or self._sends:
            self._kept[micro_batch] = Kept(arguments, results)
        if self._loss is not None:
            self.losses[micro_batch] = results[self._loss.result].detach()
        self._hand_over(micro_batch, results)
        if not self._rank.train:
            self._rank.collect(self.number, micro_batch, results)

    def _typed(self, results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The results in the types that those who receive them expect: autocast computes in narrower ones."""
        return tuple(result.to(dtype) for result, (dtype, _) in zip(results, self._outputs, strict=True))

    def _arguments(self, micro_batch: int) -> Tensors:
        found: Tensors = {}
        parts: dict[str, list[tuple[torch.Tensor, Slices | None]]] = {}
        for data in self._data:
            found[data.argument] = self._rank.read(data.name, micro_batch, data.box)
        arrivals = self._arrivals.pop(micro_batch, {})
        handed = self._handed.pop(micro_batch, {})
        for wire in self._receives:
            tensor = handed[wire.channel] if wire.rank == self._rank.number else arrivals[wire.channel].wait()
            parts.setdefault(wire.argument, []).append((tensor, wire.box))
        gradients = {wire.argument for wire in self._receives if wire.gradient}
        for name, pieces in parts.items():
            tensor = _joined(pieces, *self._inputs[name])
            found[name] = tensor.requires_grad_(True) if name in gradients and self._rank.train else tensor
        return {name: found[name] for name in self._inputs}

    def _hand_over(self, micro_batch: int, results: tuple[torch.Tensor, ...]) -> None:
        """Give results to stages on this same rank."""
        for wire in self._sends:
            if wire.rank == self._rank.number:
                part = _part(results[wire.result].detach(), wire.box)
                self._rank.stages[wire.stage].take(micro_batch, wire.channel, part)

    def take(self, micro_batch: int, channel: int, tensor: torch.Tensor) -> None:
        """An argument from a stage on this rank."""
        # A copy, because requires_grad is set on what arrives, and two stages may share the tensor.
        self._handed.setdefault(micro_batch, {})[channel] = tensor.clone()

    def send(self, micro_batch: int) -> None:
        """Start sending the results that other ranks need."""
        kept = self._kept[micro_batch] if self._rank.train else self._kept.pop(micro_batch)
        for wire in self._sends:
            if wire.rank != self._rank.number:
                part = _part(kept.results[wire.result], wire.box)
                self._rank.transport.send(part, wire.rank, wire.channel, False)

    def receive_gradient(self, micro_batch: int, source: int | None = None) -> None:
        """Post the receives of the results' gradients, all or those of one stage."""
        kept = self._gradient_arrivals.setdefault(micro_batch, {})
        for wire in self._sends:
            if wire.gradient and wire.rank != self._rank.number and source in (None, wire.stage):
                kept[wire.channel] = self._rank.transport.receive(
                    self._result_like(wire), wire.rank, wire.channel, True
                )

    def _result_like(self, wire: Send) -> tuple[torch.dtype, tuple[int, ...]]:
        dtype, shape = self._outputs[wire.result]
        return dtype, shape if wire.box is None else _extents(wire.box)

    def backward(self, micro_batch: int) -> None:
        """Wait for the results' gradients and compute those of parameters and arguments."""
        self._rank.task = task = f"{self.number}B{micro_batch}"
        kept = self._kept.pop(micro_batch)
        results, gradients = self._seeds(kept, micro_batch)
        self.backwards += 1
        self._rank.before_backward(self)
        start = self._rank.clock.mark()
        if results:
            torch.autograd.backward(results, gradients)
        self._rank.clock.add(task, start)
        input_gradients = {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in kept.arguments.items()
            if tensor.requires_grad
        }
        self._hand_back(micro_batch, input_gradients)
        if any(wire.gradient and wire.rank != self._rank.number for wire in self._receives):
            self._input_gradients[micro_batch] = input_gradients

    def _seeds(self, kept: Kept, micro_batch: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The results that backward starts from, and their gradients."""
        arrivals = self._gradient_arrivals.pop(micro_batch, {})
        found: dict[int, list[tuple[torch.Tensor, Slices | None]]] = dict(kept.gradients)
        for wire in self._sends:
            if wire.channel in arrivals:
                found.setdefault(wire.result, []).append((arrivals[wire.channel].wait(), wire.box))
        if self._loss is not None:
            loss = kept.results[self._loss.result]
            found.setdefault(self._loss.result, []).append((torch.full_like(loss, self._loss.share), None))
        if self._p.group.size > 1:
            # Exchanges in backward wait for the whole group, so a rank that no gradient comes to takes part too.
            for index in range(len(kept.results)):
                found.setdefault(index, [])
        seeds = [
            (kept.results[index], _added(pieces, kept.results[index]))
            for index, pieces in sorted(found.items())
            if kept.results[index].requires_grad
        ]
        return [result for result, _ in seeds], [gradient for _, gradient in seeds]

    def _hand_back(self, micro_batch: int, gradients: Tensors) -> None:
        """Give gradients to stages on this same rank."""
        for wire in self._receives:
            if wire.gradient and wire.rank == self._rank.number:
                part = _part(gradients[wire.argument], wire.box)
                self._rank.stages[wire.stage].take_gradient(micro_batch, wire.channel, part)

    def take_gradient(self, micro_batch: int, channel: int, tensor: torch.Tensor) -> None:
        """The gradient of a result from a stage on this rank."""
        wire = next(wire for wire in self._sends if wire.channel == channel)
        self._kept[micro_batch].gradients.setdefault(wire.result, []).append((tensor, wire.box))

    def send_gradient(self, micro_batch: int) -> None:
        """Start sending the arguments' gradients to where the arguments came from."""
        gradients = self._input_gradients.pop(micro_batch)
        for wire in self._receives:
            if wire.gradient and wire.rank != self._rank.number:
                self._rank.transport.send(_part(gradients[wire.argument], wire.box), wire.rank, wire.channel, True)

    def end_step(self) -> None:
        """Forget the step's micro-batches."""
        self._kept.clear()
        self.losses.clear()
        self.backwards = 0


def _recomputed(forward: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The same function, keeping only its arguments for backward."""

    def run(p: Arguments, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results: tuple[torch.Tensor, ...] = checkpoint(forward, p, *arguments, use_reentrant=False)
        return results

    return run


def _extents(box: Slices) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _part(tensor: torch.Tensor, box: Slices | None) -> torch.Tensor:
    """The block of a tensor, as a view."""
    return tensor if box is None else tensor[tuple(slice(*each) for each in box)]


def _joined(
    pieces: list[tuple[torch.Tensor, Slices | None]], dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """The tensor that pieces make up."""
    if len(pieces) == 1 and pieces[0][1] is None:
        return pieces[0][0]
    whole = torch.empty(shape, dtype=dtype, device=pieces[0][0].device)
    for tensor, box in pieces:
        _part(whole, box).copy_(tensor)
    return whole


def _added(pieces: list[tuple[torch.Tensor, Slices | None]], like: torch.Tensor) -> torch.Tensor:
    """The sum of gradients, each of a block; blocks that no one uses have gradient zero."""
    if len(pieces) == 1 and pieces[0][1] is None:
        return pieces[0][0]
    total = torch.zeros_like(like)
    for tensor, box in pieces:
        _part(total, box).add_(tensor)
    return total
