"""The second half of a split backward: gradients of parameters that wait until the schedule says
so.

Where a schedule splits a stage's backward, its forward calls costly operators through
`WeightGradQueue`. Autograd then gives at once only the gradients of what flows through the stage
(Qi et al., "Zero Bubble Pipeline Parallelism", 2024, section 2). By formula, an operator runs with
its weight detached, and a hook on its result takes the gradient from which, with the operand kept,
the weight's follows. Operators without a formula get a graph of autograd of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge

from autopipe.backends.torch.torch_interfaces import accumulate_gradients, input_gradients

Function = Callable[..., torch.Tensor]
Operands = tuple[Any, ...]
Settings = Mapping[str, Any]
Add = Callable[[torch.Tensor, torch.Tensor], None]
"""Adds a weight's gradient to `parameter.grad`: takes the operand beside the weight, and the
result's gradient.
"""
Formula = tuple[tuple[torch.Tensor, ...], Add]
"""How an operator runs without the history of its weight: the weight, and what waits with it,
detached, in place of the operands behind the first; and how the weight's gradient comes about.
"""


def add_to(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add to a parameter's gradient; the first one is taken as it is."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def _product(
    rows_first: bool,
    parameter: torch.Tensor,
    transposed: bool,
    operands: Operands,
    settings: Settings,
) -> Formula | None:
    """`x @ weight`, or `x @ weight.t()` where the weight has the rows of the result first."""
    if settings or operands[0].dim() < 2 or operands[1].dim() != 2:
        return None
    flip = rows_first is not transposed

    def add(source: torch.Tensor, gradient: torch.Tensor) -> None:
        left = source.flatten(0, -2)
        right = gradient.flatten(0, -2)
        left, right = (right, left) if flip else (left, right)
        if parameter.grad is None:
            parameter.grad = left.t() @ right
        else:
            parameter.grad.addmm_(left.t(), right)

    return (operands[1].detach(),), add


def _convolution(
    upwards: bool, parameter: torch.Tensor, transposed: bool, operands: Operands, settings: Settings
) -> Formula | None:
    """A convolution, `upwards` a transposed one; its bias waits with the weight, since libraries
    compute both gradients in one.
    """
    bias: torch.Tensor | None = operands[2] if len(operands) > 2 else None
    trained = bias if bias is not None and bias.requires_grad else None
    if transposed or len(operands) > 3 or (trained is not None and not trained.is_leaf):
        return None
    axes = parameter.dim() - 2
    if operands[0].dim() != axes + 2 or isinstance(settings.get("padding"), str):
        return None

    def each(name: str, neutral: int) -> list[int]:
        value = settings.get(name, neutral)
        return [value] * axes if isinstance(value, int) else list(value)

    words = (
        each("stride", 1),
        each("padding", 0),
        each("dilation", 1),
        upwards,
        each("output_padding", 0),
    )
    groups = settings.get("groups", 1)
    sizes = None if trained is None else list(trained.shape)

    def add(source: torch.Tensor, gradient: torch.Tensor) -> None:
        _, found, shifts = torch.ops.aten.convolution_backward(
            gradient, source, parameter, sizes, *words, groups, [False, True, trained is not None]
        )
        add_to(parameter, found)
        if trained is not None:
            add_to(trained, shifts)

    return tuple(each.detach() for each in operands[1:] if each is not None), add


def _lookup(
    parameter: torch.Tensor, transposed: bool, operands: Operands, settings: Settings
) -> Formula | None:
    if settings or transposed or len(operands) != 2:
        return None

    def add(source: torch.Tensor, gradient: torch.Tensor) -> None:
        found = torch.ops.aten.embedding_dense_backward(gradient, source, len(parameter), -1, False)
        add_to(parameter, found)

    return (operands[1].detach(),), add


_FORMULAS: dict[Function, Callable[[torch.Tensor, bool, Operands, Settings], Formula | None]] = {
    F.linear: partial(_product, True),
    torch.matmul: partial(_product, False),
    torch.mm: partial(_product, False),
    F.embedding: _lookup,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), partial(_convolution, False)),
    **dict.fromkeys(
        (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), partial(_convolution, True)
    ),
}


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """The gradients of one operator's parameters, that wait: `add` adds them up from the gradient
    of its result.
    """

    add: Callable[[torch.Tensor], None]
    arrived: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    """The gradient of the result, once backward has come to it."""

    def take(self, result: torch.Tensor) -> None:
        """Note the gradient of a result through which nothing flows."""
        gradient = result.grad
        result.grad = None
        assert gradient is not None
        self.arrived.append((gradient,))


Waiting = list[WeightGradient]
"""Of a forward's operators, in the order in which it called them. One that backward does not come
to adds nothing.
"""


def compute_all(waiting: Waiting) -> None:
    """Compute them, the last first, each freeing what it alone needed."""
    with torch.no_grad():
        while waiting:
            last = waiting.pop()
            for (gradient,) in last.arrived:
                last.add(gradient)


class WeightGradQueue:
    """Calls operators such that their backward leaves the gradients of `parameters` for later."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        # A bias is no such parameter: its gradient is a sum, cheaper computed than waited for.
        self._weights = {id(each) for each in parameters if each.requires_grad and each.dim() > 1}
        self._known: dict[str, list[tuple[Function, Formula | None]]] = {}
        """Of the calls of a forward, or a segment of one by its name, which are always the same."""
        self.begin()
        self._waiting: Waiting = []
        self.used = False  # True if a forward has called an operator such that gradients may wait.

    def begin(self, part: str = "") -> None:
        """From now on a forward runs, or this part of one."""
        self._formulas = self._known.setdefault(part, [])
        self._calls = 0

    def __call__(self, function: Function, *operands: Any, **settings: Any) -> torch.Tensor:
        """`function(*operands, **settings)`, one tensor. Parameters count as such also through
        views of them. Forwards call the same operators with the same parameters in the same order:
        what is known of a call is looked up by its number, since a forward waits for this code.
        """
        self.used = True
        if not torch.is_grad_enabled():
            return function(*operands, **settings)
        if self._calls == len(self._formulas):
            self._formulas.append((function, self._formula_of(function, operands, settings)))
        known, formula = self._formulas[self._calls]
        self._calls += 1
        if formula is None or known is not function:
            places = self._places(operands)
            if not places:
                return function(*operands, **settings)
            deferred: torch.Tensor = _Deferred.apply(
                self._waiting, function, settings, places, *operands
            )  # type: ignore[no-untyped-call]
            return deferred
        detached, add = formula
        result = function(operands[0], *detached, *operands[1 + len(detached) :], **settings)
        waits = WeightGradient(partial(add, operands[0].detach()))
        self._waiting.append(waits)
        if result.grad_fn is not None:
            result.grad_fn.register_prehook(waits.arrived.append)
        else:  # Nothing flows through the operator, but its result's gradient is needed all the same.
            result.requires_grad_(True).register_post_accumulate_grad_hook(waits.take)
        return result

    def _formula_of(
        self, function: Function, operands: Operands, settings: Settings
    ) -> Formula | None:
        """The formula for a call; None where there is none, as under autocast, which casts weights
        and what flows.
        """
        make = _FORMULAS.get(function)
        if (
            make is None
            or self._places(operands) != (1,)
            or torch.is_autocast_enabled(operands[1].device.type)
        ):
            return None
        weight = operands[1]
        parameter = weight if weight._base is None else weight._base
        shapes = (weight.shape, parameter.shape)
        strides = (weight.stride(), parameter.stride())
        if shapes[0] == shapes[1] and strides[0] == strides[1]:
            return make(parameter, False, operands, settings)
        if parameter.dim() == 2 and shapes[0] == shapes[1][::-1] and strides[0] == strides[1][::-1]:
            return make(parameter, True, operands, settings)
        return None  # Another view of a parameter.

    def _places(self, operands: Operands) -> tuple[int, ...]:
        return tuple(
            place
            for place, each in enumerate(operands)
            if isinstance(each, torch.Tensor)
            and id(each if each._base is None else each._base) in self._weights
        )

    def take(self) -> Waiting:
        """Deferred gradients of the forward that has just run, for after its backward."""
        taken = self._waiting
        self._waiting = []
        self.begin()
        return taken


class _Deferred(torch.autograd.Function):
    """One operator with a graph of its own, run backwards twice: for what flows, then for its
    parameters. That graph keeps what the operator's own backward keeps, until the second time.
    """

    @staticmethod
    def forward(
        context: Any,
        waiting: Waiting,
        function: Function,
        settings: dict[str, object],
        places: tuple[int, ...],
        *operands: object,
    ) -> torch.Tensor:
        copies = [
            each.detach().requires_grad_(each.requires_grad)
            if isinstance(each, torch.Tensor)
            else each
            for each in operands
        ]
        with torch.enable_grad():
            result = get_gradient_edge(output := function(*copies, **settings))
        edges = [
            get_gradient_edge(each)
            if isinstance(each, torch.Tensor) and each.requires_grad
            else None
            for each in copies
        ]
        weights = [each for place in places if (each := edges[place]) is not None]
        parameters = [
            operand for place in places if isinstance(operand := operands[place], torch.Tensor)
        ]

        def add(gradient: torch.Tensor) -> None:
            accumulate_gradients(parameters, input_gradients([result], weights, [gradient]))

        waits = WeightGradient(add)
        waiting.append(waits)
        context.result = result
        context.arrived = waits.arrived
        context.flowing = [None if place in places else each for place, each in enumerate(edges)]
        return output.detach()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flowing = [each for each in context.flowing if each is not None]
        found = iter(
            input_gradients([context.result], flowing, gradients, retain_graph=True)
            if flowing
            else ()
        )
        context.arrived.append(gradients)
        return (
            None,
            None,
            None,
            None,
            *(None if each is None else next(found) for each in context.flowing),
        )
