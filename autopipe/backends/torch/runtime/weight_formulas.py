"""Gradients of weights by formula: of products, convolutions and lookups, which are most of what a model trains.

The operator runs with its weight cut off, so that autograd's own backward gives what flows and nothing else; a hook on
its result takes the gradient from which, with the operand kept, the weight's gradient follows later. That costs a few
microseconds an operator, where a graph of autograd for each costs a hundred.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

Function = Callable[..., torch.Tensor]
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

    operands: tuple[Any, ...]
    source: torch.Tensor
    """The operand beside the weight."""
    add: Add

    def run(self, function: Function, settings: Mapping[str, Any], queue: Callable[[Waits], None]) -> torch.Tensor:
        """The operator's result. Backward puts on the queue what waits as soon as the result's gradient is there."""
        result = function(*self.operands, **settings)
        source, add = self.source.detach(), self.add
        if result.grad_fn is not None:
            result.grad_fn.register_prehook(lambda gradients: queue(FormulaGradient(add, source, gradients[0])))
            return result

        def arrived(leaf: torch.Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            assert gradient is not None
            queue(FormulaGradient(add, source, gradient))

        # Nothing flows through the operator, but its result's gradient is needed all the same.
        result.requires_grad_(True).register_post_accumulate_grad_hook(arrived)
        return result


class Waits(Protocol):
    """Gradients of one operator's parameters that are not computed yet."""

    def compute(self) -> None:
        """Add them to `parameter.grad`."""


@dataclass(frozen=True, slots=True)
class FormulaGradient:
    """A weight's gradient, by formula."""

    add: Add
    source: torch.Tensor
    gradient: torch.Tensor
    """Of the result."""

    def compute(self) -> None:
        """Add it to `parameter.grad`."""
        with torch.no_grad():
            self.add(self.source, self.gradient)


def formula_of(
    function: Function, operands: tuple[Any, ...], settings: Mapping[str, Any], waits: tuple[bool, ...]
) -> Formula | None:
    """The formula for one use of an operator, of whose operands those of `waits` are weights; None where there is none.

    There is none under autocast, which casts weights and what flows alike.
    """
    found = _FORMULAS.get(function)
    if found is None or waits.index(True) != found.place or sum(waits) != 1:
        return None
    source, operand = operands[1 - found.place], operands[found.place]
    weight = Weight.of(operand)
    if weight is None or torch.is_autocast_enabled(operand.device.type):
        return None
    return found.make(source, weight, operands, settings)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Operators whose weight stands at `place`, and what makes their formula of one use."""

    place: int
    make: Callable[[torch.Tensor, Weight, tuple[Any, ...], Mapping[str, Any]], Formula | None]


def _product(rows_first: bool) -> _Kind:
    """`x @ weight`, or `x @ weight.t()` where the weight has the rows of the result first."""

    def make(
        source: torch.Tensor, weight: Weight, operands: tuple[Any, ...], settings: Mapping[str, Any]
    ) -> Formula | None:
        if settings or source.dim() < 2 or operands[1].dim() != 2:
            return None
        parameter, flip = weight.parameter, rows_first is not weight.transposed

        def add(source: torch.Tensor, gradient: torch.Tensor) -> None:
            left, right = source.flatten(0, -2), gradient.flatten(0, -2)
            left, right = (right, left) if flip else (left, right)
            if parameter.grad is None:
                parameter.grad = left.t() @ right
            else:
                parameter.grad.addmm_(left.t(), right)

        return Formula((source, operands[1].detach(), *operands[2:]), source, add)

    return _Kind(1, make)


def _convolution(transposed: bool) -> _Kind:
    """A convolution; its bias waits with the weight, since libraries compute both gradients in one."""

    def make(
        source: torch.Tensor, weight: Weight, operands: tuple[Any, ...], settings: Mapping[str, Any]
    ) -> Formula | None:
        bias: torch.Tensor | None = operands[2] if len(operands) > 2 else None
        trained = bias if bias is not None and bias.requires_grad else None
        if weight.transposed or len(operands) > 3 or (trained is not None and not trained.is_leaf):
            return None
        axes = weight.parameter.dim() - 2
        if source.dim() != axes + 2 or isinstance(settings.get("padding"), str):
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

        rest = () if bias is None else (bias.detach(),)
        return Formula((source, operands[1].detach(), *rest), source, add)

    return _Kind(1, make)


def _lookup(
    source: torch.Tensor, weight: Weight, operands: tuple[Any, ...], settings: Mapping[str, Any]
) -> Formula | None:
    if settings or weight.transposed or len(operands) != 2:
        return None
    rows = len(weight.parameter)

    def add(source: torch.Tensor, gradient: torch.Tensor) -> None:
        weight.add(torch.ops.aten.embedding_dense_backward(gradient, source, rows, -1, False))

    return Formula((source, operands[1].detach()), source, add)


_FORMULAS: dict[Function, _Kind] = {
    F.linear: _product(rows_first=True),
    torch.matmul: _product(rows_first=False),
    torch.mm: _product(rows_first=False),
    F.embedding: _Kind(1, _lookup),
    F.conv1d: _convolution(transposed=False),
    F.conv2d: _convolution(transposed=False),
    F.conv3d: _convolution(transposed=False),
    F.conv_transpose1d: _convolution(transposed=True),
    F.conv_transpose2d: _convolution(transposed=True),
    F.conv_transpose3d: _convolution(transposed=True),
}
