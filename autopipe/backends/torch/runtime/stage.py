"""One stage on one rank: the verbs that a generated step is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from autopipe.backends.torch.runtime.blocks import Block, added, extents, joined, part
from autopipe.backends.torch.runtime.later import Waiting
from autopipe.backends.torch.runtime.parameters import Arguments
from autopipe.backends.torch.runtime.pending import Arrival
from autopipe.backends.torch.runtime.recomputation import RandomState
from autopipe.backends.torch.runtime.wiring import Data, Loss, Receive, Recompute, Send, Wire

if TYPE_CHECKING:
    from autopipe.backends.torch.runtime.rank import Rank

Tensors = dict[str, torch.Tensor]


@dataclass(slots=True)
class Kept:
    """What a forward leaves for its backward."""

    arguments: Tensors
    results: tuple[torch.Tensor, ...]
    random: RandomState | None = None
    """Where the forward has to be run again: how it drew random numbers."""
    gradients: dict[int, list[Block]] = field(default_factory=dict)
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
        self._recomputes = rank.train and Recompute() in wires
        self._forward = module.forward
        self._arrivals: dict[int, dict[int, Arrival]] = {}
        self._gradient_arrivals: dict[int, dict[int, Arrival]] = {}
        self._handed: dict[int, dict[int, torch.Tensor]] = {}
        self._kept: dict[int, Kept] = {}
        self._input_gradients: dict[int, Tensors] = {}
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
        arrivals = self._arrivals.setdefault(micro_batch, {})
        for wire in self._receives:
            if wire.rank != self._rank.number and source in (None, wire.stage):
                dtype, shape = self._inputs[wire.argument]
                like = (dtype, shape if wire.box is None else extents(wire.box))
                arrivals[wire.channel] = self._rank.transport.receive(like, wire.rank, wire.channel, False)

    def forward(self, micro_batch: int) -> None:
        """Wait for the arguments and compute."""
        self._rank.task = task = f"{self.number}F{micro_batch}"
        arguments = self._arguments(micro_batch)
        start = self._rank.clock.mark()
        random = RandomState.now(self._rank.device) if self._recomputes else None
        results = self._results(arguments, self._rank.train and not self._recomputes)
        self._rank.clock.add(task, start)
        if self._rank.train or self._sends:
            self._kept[micro_batch] = Kept(arguments, results, random)
        if self._loss is not None:
            self.losses[micro_batch] = results[self._loss.result].detach()
        self._hand_over(micro_batch, results)
        if not self._rank.train:
            self._rank.collect(self.number, micro_batch, results)

    def _results(self, arguments: Tensors, for_backward: bool) -> tuple[torch.Tensor, ...]:
        """The results in the types that those who receive them expect: autocast computes in narrower ones."""
        with torch.set_grad_enabled(for_backward), self._rank.autocast():
            results = self._forward(self._p, *arguments.values())
            return tuple(result.to(dtype) for result, (dtype, _) in zip(results, self._outputs, strict=True))

    def _arguments(self, micro_batch: int) -> Tensors:
        found: Tensors = {}
        parts: dict[str, list[Block]] = {}
        for data in self._data:
            found[data.argument] = self._rank.read(data.name, micro_batch, data.box)
        arrivals = self._arrivals.pop(micro_batch, {})
        handed = self._handed.pop(micro_batch, {})
        for wire in self._receives:
            tensor = handed[wire.channel] if wire.rank == self._rank.number else arrivals[wire.channel].wait()
            parts.setdefault(wire.argument, []).append((tensor, wire.box))
        gradients = {wire.argument for wire in self._receives if wire.gradient}
        for name, pieces in parts.items():
            tensor = joined(pieces, *self._inputs[name])
            found[name] = tensor.requires_grad_(True) if name in gradients and self._rank.train else tensor
        return {name: found[name] for name in self._inputs}

    def _hand_over(self, micro_batch: int, results: tuple[torch.Tensor, ...]) -> None:
        """Give results to stages on this same rank."""
        for wire in self._sends:
            if wire.rank == self._rank.number:
                block = part(results[wire.result].detach(), wire.box)
                self._rank.stages[wire.stage].take(micro_batch, wire.channel, block)

    def take(self, micro_batch: int, channel: int, tensor: torch.Tensor) -> None:
        """An argument from a stage on this rank."""
        # A copy, because requires_grad is set on what arrives, and two stages may share the tensor.
        self._handed.setdefault(micro_batch, {})[channel] = tensor.clone()

    def send(self, micro_batch: int) -> None:
        """Start sending the results that other ranks need."""
        kept = self._kept[micro_batch] if self._rank.train else self._kept.pop(micro_batch)
        for wire in self._sends:
            if wire.rank != self._rank.number:
                block = part(kept.results[wire.result], wire.box)
                self._rank.transport.send(block, wire.rank, wire.channel, False)

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
        return dtype, shape if wire.box is None else extents(wire.box)

    def backward(self, micro_batch: int) -> None:
        """Wait for the results' gradients and compute those of parameters and arguments."""
        self.backwards += 1
        if not self._p.later.used:
            self._rank.before_last_gradients(self)
        self._propagate(micro_batch, "B")
        self._compute_waiting(micro_batch)

    def input_gradient(self, micro_batch: int) -> None:
        """The first half of a backward: wait for the results' gradients and compute those of arguments."""
        self._propagate(micro_batch, "I")

    def weight_gradient(self, micro_batch: int) -> None:
        """The second half: compute the gradients of parameters that the first half left."""
        self._rank.task = task = f"{self.number}W{micro_batch}"
        self.backwards += 1
        start = self._rank.clock.mark()
        self._compute_waiting(micro_batch)
        self._rank.clock.add(task, start)

    def _compute_waiting(self, micro_batch: int) -> None:
        for compute in self._waiting.pop(micro_batch):
            compute()
        self._rank.after_gradients(self)

    def _propagate(self, micro_batch: int, phase: str) -> None:
        """Run autograd, which leaves gradients of parameters waiting if the stage's backward is ever split."""
        self._rank.task = task = f"{self.number}{phase}{micro_batch}"
        kept = self._kept.pop(micro_batch)
        start = self._rank.clock.mark()
        if kept.random is not None:
            with kept.random.again():
                kept.results = self._results(kept.arguments, True)
        results, gradients = self._seeds(kept, micro_batch)
        if results:
            torch.autograd.backward(results, gradients)
        self._waiting[micro_batch] = self._p.later.take()
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
        found: dict[int, list[Block]] = dict(kept.gradients)
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
            (kept.results[index], added(pieces, kept.results[index]))
            for index, pieces in sorted(found.items())
            if kept.results[index].requires_grad
        ]
        return [result for result, _ in seeds], [gradient for _, gradient in seeds]

    def _hand_back(self, micro_batch: int, gradients: Tensors) -> None:
        """Give gradients to stages on this same rank."""
        for wire in self._receives:
            if wire.gradient and wire.rank == self._rank.number:
                block = part(gradients[wire.argument], wire.box)
                self._rank.stages[wire.stage].take_gradient(micro_batch, wire.channel, block)

    def take_gradient(self, micro_batch: int, channel: int, tensor: torch.Tensor) -> None:
        """The gradient of a result from a stage on this rank."""
        wire = next(wire for wire in self._sends if wire.channel == channel)
        self._kept[micro_batch].gradients.setdefault(wire.result, []).append((tensor, wire.box))

    def send_gradient(self, micro_batch: int) -> None:
        """Start sending the arguments' gradients to where the arguments came from."""
        gradients = self._input_gradients.pop(micro_batch)
        for wire in self._receives:
            if wire.gradient and wire.rank != self._rank.number:
                self._rank.transport.send(part(gradients[wire.argument], wire.box), wire.rank, wire.channel, True)

    def end_step(self) -> None:
        """Forget the step's micro-batches."""
        self._kept.clear()
        self.losses.clear()
        self.backwards = 0
