"""Gradients of parameters that wait: the second half of a split backward.

Where a schedule splits a stage's backward, its generated forward calls costly operators through `WeightGradQueue`.
Autograd then gives at once only the gradients of what flows through the stage, as in Qi et al., "Zero Bubble Pipeline
Parallelism" (2024), section 2; the gradients of the operators' parameters are queued and computed when the schedule
says so: by formula where there is one, else by a graph of autograd of the operator's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopipe.backends.torch.runtime.weight_formulas import Formula, FormulaGradient, formula_of


class DeferredGradients(Protocol):
    """Gradients of one operator's parameters that may not be computed yet."""

    def compute(self) -> None:
        """Add them to `parameter.grad`, if backward has come to the operator."""


Waiting = list[DeferredGradients]
"""Of a forward's operators, in the order in which it called them."""


def compute_all(waiting: Waiting) -> None:
    """Compute them, the last first, each freeing what it alone needed."""
    with torch.no_grad():
        while waiting:
            waiting.pop().compute()


class WeightGradQueue:
    """Calls operators such that their backward leaves the gradients of `parameters` for later."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        # A bias is no such parameter: its gradient is a sum, cheaper computed than waited for.
        self._weights = {id(each) for each in parameters if each.requires_grad and each.dim() > 1}
        self._known: dict[str, list[Formula | None]] = {}
        """Of the calls of a forward, or a segment of one by its name, which are always the same."""
        self.begin()
        self._waiting: Waiting = []
        self.used = False
        """Whether a forward has called an operator such that gradients may wait."""

    def begin(self, part: str = "") -> None:
        """From now on a forward runs, or this part of one."""
        self._formulas, self._calls = self._known.setdefault(part, []), 0

    def __call__(self, function: Callable[..., torch.Tensor], *operands: Any, **settings: Any) -> torch.Tensor:
        """`function(*operands, **settings)`, one tensor. Parameters count as such also through views of them.

        Forwards call the same operators with the same parameters in the same order: what is known of a call is looked
        up by its number, since a forward waits for this code.
        """
        self.used = True
        if not torch.is_grad_enabled():
            return function(*operands, **settings)
        if self._calls == len(self._formulas):
            self._formulas.append(formula_of(function, operands, settings, self._places(operands)))
        formula = self._formulas[self._calls]
        self._calls += 1
        if formula is None or formula.function is not function:
            return self._by_graph(function, operands, settings)
        result = function(operands[0], *formula.cut_off, *operands[1 + len(formula.cut_off) :], **settings)
        waits = FormulaGradient(formula.add, operands[0].detach())
        self._waiting.append(waits)
        waits.follow(result)
        return result

    def _by_graph(
        self, function: Callable[..., torch.Tensor], operands: tuple[Any, ...], settings: dict[str, Any]
    ) -> torch.Tensor:
        places = self._places(operands)
        if not places:
            return function(*operands, **settings)
        result: torch.Tensor = _Deferred.apply(self._waiting, function, settings, places, *operands)  # type: ignore[no-untyped-call]
        return result

    def _places(self, operands: tuple[Any, ...]) -> tuple[int, ...]:
        """Positions of the operands that are parameters, or views of them."""
        return tuple(
            place for place, each in enumerate(operands) if isinstance(each, torch.Tensor) and self._is_weight(each)
        )

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        return id(tensor if tensor._base is None else tensor._base) in self._weights

    def take(self) -> Waiting:
        """Deferred gradients of the forward that has just run, for after its backward."""
        taken, self._waiting = self._waiting, []
        self.begin()
        return taken


@dataclass(frozen=True, slots=True)
class AutogradWeightGradient:
    """Gradients of one operator's parameters by autograd: where its graph begins and ends, and what comes in."""

    result: GradientEdge
    operands: list[GradientEdge]
    parameters: list[torch.Tensor]
    arrived: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    """The gradient of the result, once backward has come to it."""

    def compute(self) -> None:
        """Add them to `parameter.grad`."""
        for gradients in self.arrived:
            torch.autograd.backward(self.parameters, torch.autograd.grad([self.result], self.operands, gradients))


class _Deferred(torch.autograd.Function):
    """One operator with a graph of its own, run backwards twice: for what flows, then for its parameters.

    That graph keeps what the operator's own backward keeps, until the second time.
    """

    @staticmethod
    def forward(
        context: Any,
        waiting: Waiting,
        function: Callable[..., torch.Tensor],
        settings: dict[str, object],
        places: tuple[int, ...],
        *operands: object,
    ) -> torch.Tensor:
        copies = tuple(_cut_off(each) for each in operands)
        with torch.enable_grad():
            result = function(*copies, **settings)
        edges = [_edge(each) for each in copies]
        weights = [each for place in places if (each := edges[place]) is not None]
        parameters = [operand for place in places if isinstance(operand := operands[place], torch.Tensor)]
        context.waits = AutogradWeightGradient(get_gradient_edge(result), weights, parameters)
        context.flowing = [None if place in places else each for place, each in enumerate(edges)]
        waiting.append(context.waits)
        return result.detach()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        waits, flowing = context.waits, [each for each in context.flowing if each is not None]
        found = iter(torch.autograd.grad([waits.result], flowing, gradients, retain_graph=True) if flowing else ())
        waits.arrived.append(gradients)
        return (None, None, None, None, *(None if each is None else next(found) for each in context.flowing))


def _cut_off(operand: object) -> object:
    """A tensor without its history, asking for a gradient if the operand does; anything else as it is."""
    if not isinstance(operand, torch.Tensor):
        return operand
    return operand.detach().requires_grad_(operand.requires_grad)


def _edge(operand: object) -> GradientEdge | None:
    """Where an operand's gradient comes out."""
    return get_gradient_edge(operand) if isinstance(operand, torch.Tensor) and operand.requires_grad else None
