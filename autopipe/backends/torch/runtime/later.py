"""Gradients of parameters that wait: the second half of a split backward.

Where a schedule splits a stage's backward, its generated forward calls costly operators through `Later`. Autograd then
gives at once only the gradients of what flows through the stage, as in Qi et al., "Zero Bubble Pipeline Parallelism"
(2024), section 2; the gradients of the operators' parameters are queued and computed when the schedule says so: by
formula where there is one, else by a graph of autograd of the operator's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopipe.backends.torch.runtime.weight_formulas import Waits, formula_of


@dataclass(frozen=True, slots=True)
class GraphGradient:
    """What gives the gradients of one operator's parameters: where its graph begins and ends, and what comes in."""

    result: GradientEdge
    gradients: tuple[torch.Tensor, ...]
    """Of the result."""
    operands: list[GradientEdge]
    parameters: list[torch.Tensor]

    def compute(self) -> None:
        """Add them to `parameter.grad`."""
        torch.autograd.backward(self.parameters, torch.autograd.grad([self.result], self.operands, self.gradients))


Waiting = deque[Waits]
"""Gradients of parameters that are not computed yet."""


def compute_all(waiting: Waiting) -> None:
    """Compute them, in the order in which they were queued, each freeing what it alone needed."""
    while waiting:
        waiting.popleft().compute()


class Later:
    """Calls operators such that their backward leaves the gradients of `parameters` for later."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        # A bias is no such parameter: its gradient is a sum, cheaper computed than waited for.
        self._weights = {id(each) for each in parameters if each.requires_grad and each.dim() > 1}
        self._waiting: Waiting = deque()
        self.used = False
        """Whether a forward has called an operator such that gradients may wait."""

    def __call__(self, function: Callable[..., torch.Tensor], *operands: object, **settings: object) -> torch.Tensor:
        """`function(*operands, **settings)`, one tensor. Parameters count as such also through views of them."""
        later = tuple(isinstance(each, torch.Tensor) and self._is_weight(each) for each in operands)
        self.used = self.used or any(later)
        if not any(later) or not torch.is_grad_enabled():
            return function(*operands, **settings)
        formula = formula_of(function, operands, settings, later)
        if formula is not None:
            return formula.run(function, settings, self.add)
        result: torch.Tensor = _Deferred.apply(self, function, settings, later, *operands)  # type: ignore[no-untyped-call]
        return result

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        return id(tensor if tensor._base is None else tensor._base) in self._weights

    def add(self, gradient: Waits) -> None:
        """Queue one operator's gradients of parameters."""
        self._waiting.append(gradient)

    def take(self) -> Waiting:
        """What has been queued since the last time."""
        taken, self._waiting = self._waiting, deque()
        return taken


class _Deferred(torch.autograd.Function):
    """One operator with a graph of its own, run backwards twice: for what flows, then for its parameters.

    That graph keeps what the operator's own backward keeps, until the second time.
    """

    @staticmethod
    def forward(
        context: Any,
        later: Later,
        function: Callable[..., torch.Tensor],
        settings: dict[str, object],
        waits: tuple[bool, ...],
        *operands: object,
    ) -> torch.Tensor:
        copies = tuple(_cut_off(each) for each in operands)
        with torch.enable_grad():
            result = function(*copies, **settings)
        context.later, context.waits = later, waits
        context.edge = get_gradient_edge(result)
        context.inputs = tuple(_edge(each) for each in copies)
        context.weights = [each for each, wait in zip(operands, waits, strict=True) if wait]
        return result.detach()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        waits = context.waits
        flowing = [each for each, wait in zip(context.inputs, waits, strict=True) if each is not None and not wait]
        waiting = [each for each, wait in zip(context.inputs, waits, strict=True) if wait]
        found = iter(torch.autograd.grad([context.edge], flowing, gradients, retain_graph=True) if flowing else ())
        context.later.add(GraphGradient(context.edge, gradients, waiting, context.weights))
        given = (
            None if each is None or wait else next(found) for each, wait in zip(context.inputs, waits, strict=True)
        )
        return (None, None, None, None, *given)


def _cut_off(operand: object) -> object:
    """A tensor without its history, asking for a gradient if the operand does; anything else as it is."""
    if not isinstance(operand, torch.Tensor):
        return operand
    return operand.detach().requires_grad_(operand.requires_grad)


def _edge(operand: object) -> GradientEdge | None:
    """Where an operand's gradient comes out."""
    return get_gradient_edge(operand) if isinstance(operand, torch.Tensor) and operand.requires_grad else None
