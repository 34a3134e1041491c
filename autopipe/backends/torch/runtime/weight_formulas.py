"""Gradients of weights by formula: of products, convolutions and lookups, which are most of what a model trains.

The operator runs with its weight cut off, so that autograd's own backward gives what flows and nothing else; a hook on
its result takes the gradient from which, with the operand kept, the weight's gradient follows later. Between operators
of a model this code finds nothing of itself in the caches, so there is little of it on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

Function = Callable[..., torch.Tensor]
Operands = tuple[Any, ...]
Settings = Mapping[str, Any]
Add = Callable[[torch.Tensor, torch.Tensor], None]
"""Adds a weight's gradient to `parameter.grad`: takes the operand beside the weight, and the result's gradient."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A whole parameter as an operator reads it: as it is, or its transpose."""

    parameter: torch.Tensor
    transposed: bool

    @staticmethod
    def of(operand: torch.Tensor) -> Weight | None:
        """The parameter that an operand is; None where it is another view of one."""
        base = operand if operand._base is None else operand._base
        if operand.shape == base.shape and operand.stride() == base.stride():
            return Weight(base, False)
        if base.dim() == 2 and operand.shape == base.shape[::-1] and operand.stride() == base.stride()[::-1]:
            return Weight(base, True)
        return None

    def add(self, gradient: torch.Tensor) -> None:
        """Add to the parameter's gradient."""
        add_to(self.parameter, gradient)


def add_to(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add to a parameter's gradient; the first one is taken as it is."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


@dataclass(frozen=True, slots=True)
class Formula:
    """How an operator runs without the history of its weight, and how the weight's gradient comes about."""

    function: Function
    cut_off: tuple[torch.Tensor, ...]
    """The weight, and what waits with it, in place of the operands behind the first."""
    add: Add


@dataclass(slots=True)
class FormulaGradient:
    """A weight's gradient, by formula."""

    add: Add
    source: torch.Tensor
    arrived: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    """The gradient of the result, once backward has come to it."""

    def follow(self, result: torch.Tensor) -> None:
        """Have backward note the gradient of the operator's result."""
        if result.grad_fn is not None:
            result.grad_fn.register_prehook(self.arrived.append)
        else:
            # Nothing flows through the operator, but its result's gradient is needed all the same.
            result.requires_grad_(True).register_post_accumulate_grad_hook(self._take)

    def _take(self, result: torch.Tensor) -> None:
        gradient, result.grad = result.grad, None
        assert gradient is not None
        self.arrived.append((gradient,))

    def compute(self) -> None:
        """Add it to `parameter.grad`."""
        for (gradient,) in self.arrived:
            self.add(self.source, gradient)


def formula_of(function: Function, operands: Operands, settings: Settings, places: tuple[int, ...]) -> Formula | None:
    """The formula for calls of an operator of whose operands those at `places` are weights; None where there is none.

    There is none under autocast, which casts weights and what flows alike.
    """
    make = _FORMULAS.get(function)
    if make is None or places != (1,):
        return None
    weight = Weight.of(operands[1])
    if weight is None or torch.is_autocast_enabled(operands[1].device.type):
        return None
    found = make(weight, operands, settings)
    return None if found is None else Formula(function, *found)


_Found = tuple[tuple[torch.Tensor, ...], Add]
"""The parameter that is detached, and how its gradient is added."""
_Make = Callable[[Weight, Operands, Settings], _Found | None]


def _product(rows_first: bool) -> _Make:
    """`x @ weight`, or `x @ weight.t()` where the weight has the rows of the result first."""

    def make(weight: Weight, operands: Operands, settings: Settings) -> _Found | None:
        if settings or operands[0].dim() < 2 or operands[1].dim() != 2:
            return None
        parameter, flip = weight.parameter, rows_first is not weight.transposed

        def add(source: torch.Tensor, gradient: torch.Tensor) -> None:
            left, right = source.flatten(0, -2), gradient.flatten(0, -2)
            left, right = (right, left) if flip else (left, right)
            if parameter.grad is None:
                parameter.grad = left.t() @ right
            else:
                parameter.grad.addmm_(left.t(), right)

        return (operands[1].detach(),), add

    return make


def _convolution(transposed: bool) -> _Make:
    """A convolution; its bias waits with the weight, since libraries compute both gradients in one."""

    def make(weight: Weight, operands: Operands, settings: Settings) -> _Found | None:
        bias: torch.Tensor | None = operands[2] if len(operands) > 2 else None
        trained = bias if bias is not None and bias.requires_grad else None
        if weight.transposed or len(operands) > 3 or (trained is not None and not trained.is_leaf):
            return None
        axes = weight.parameter.dim() - 2
        if operands[0].dim() != axes + 2 or isinstance(settings.get("padding"), str):
            return None

        def each(name: str, neutral: int) -> list[int]:
            value = settings.get(name, neutral)
            return [value] * axes if isinstance(value, int) else list(value)

        words = each("stride", 1), each("padding", 0), each("dilation", 1), transposed, each("output_padding", 0)
        groups, sizes = settings.get("groups", 1), None if trained is None else list(trained.shape)

        def add(source: torch.Tensor, gradient: torch.Tensor) -> None:
            _, found, shifts = torch.ops.aten.convolution_backward(
                gradient, source, weight.parameter, sizes, *words, groups, [False, True, trained is not None]
            )
            weight.add(found)
            if trained is not None:
                add_to(trained, shifts)

        return tuple(each.detach() for each in operands[1:] if each is not None), add

    return make


def _lookup(weight: Weight, operands: Operands, settings: Settings) -> _Found | None:
    if settings or weight.transposed or len(operands) != 2:
        return None
    rows = len(weight.parameter)

    def add(source: torch.Tensor, gradient: torch.Tensor) -> None:
        weight.add(torch.ops.aten.embedding_dense_backward(gradient, source, rows, -1, False))

    return (operands[1].detach(),), add


_FORMULAS: dict[Function, _Make] = {
    F.linear: _product(rows_first=True),
    torch.matmul: _product(rows_first=False),
    torch.mm: _product(rows_first=False),
    F.embedding: _lookup,
    F.conv1d: _convolution(transposed=False),
    F.conv2d: _convolution(transposed=False),
    F.conv3d: _convolution(transposed=False),
    F.conv_transpose1d: _convolution(transposed=True),
    F.conv_transpose2d: _convolution(transposed=True),
    F.conv_transpose3d: _convolution(transposed=True),
}
