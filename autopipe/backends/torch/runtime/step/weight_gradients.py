"""Deferred gradients of weights: the second half (W) of a split backward.

Objective: let a schedule run the backward of a stage in two tasks. The first task (I) computes the
gradients of activations, for which earlier stages wait. The second task (W) computes the gradients
of weights and can fill idle time (Qi et al., "Zero Bubble Pipeline Parallelism", 2024, section 2).

The forward calls matmuls, convolutions and embeddings through `WeightGradQueue`. For y = x w^T with
the gradient g of y, task I computes g w, and task W computes g^T x. An operator runs in one of two
ways:

By formula (`_FORMULA_BY_FUNCTION`): the operator runs with its weight detached. A hook on the
result stores g, and W computes the gradient of w from g and x.

By a graph of its own (`_DeferredWeightGradient`), for operators without a formula: autograd runs
this graph twice, first for the activations, then for the parameters.

Invariants: W adds to `parameter.grad`, and runs after the I of the same micro-batch. I and W
together give the gradients of an unsplit backward. If no gradient of y arrives, W adds nothing for
the operator. x and g stay in memory until W has run.
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
AddGradient = Callable[[torch.Tensor, torch.Tensor], None]
"""A function (x, g) that adds the gradient of a weight to `parameter.grad`. x is the first operand
of the operator, g the gradient of its result.
"""
GradientFormula = tuple[tuple[torch.Tensor, ...], AddGradient]
"""(operands, add) for one call of an operator. operands: the detached weight, and the bias if there
is one, with which the operator runs in place of its operands after the first. add: adds the
gradients of the weight and the bias.
"""


def add_to_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add `gradient` to the gradient of a parameter. If the parameter has none, store the tensor
    `gradient` itself.
    """
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def _matmul_formula(
    rows_first: bool,
    parameter: torch.Tensor,
    transposed: bool,
    operands: Operands,
    settings: Settings,
) -> GradientFormula | None:
    """Return the formula (code that computes the gradient of a weight without autograd) for `x @
    weight` or, with `rows_first`, for `F.linear`, `x @ weight.t()`. `transposed` is True if the
    weight in `operands` is the transpose of `parameter`. Return None if the weight is not
    two-dimensional, x is a vector, or there are keyword arguments.
    """
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


def _convolution_formula(
    upwards: bool, parameter: torch.Tensor, transposed: bool, operands: Operands, settings: Settings
) -> GradientFormula | None:
    """Return the formula (code that computes the gradients of parameters without autograd) for a
    convolution or, with `upwards`, a transposed convolution. The gradient of a trained bias is
    deferred too, because libraries compute both gradients in one call. Return None for calls that
    the formula does not cover, for example with padding given as text.
    """
    bias: torch.Tensor | None = operands[2] if len(operands) > 2 else None
    trained = bias if bias is not None and bias.requires_grad else None
    if transposed or len(operands) > 3 or (trained is not None and not trained.is_leaf):
        return None
    axes = parameter.dim() - 2
    if operands[0].dim() != axes + 2 or isinstance(settings.get("padding"), str):
        return None

    def per_axis(name: str, neutral: int) -> list[int]:
        """Return the setting `name` as one integer per spatial axis. `neutral` is its default."""
        value = settings.get(name, neutral)
        return [value] * axes if isinstance(value, int) else list(value)

    words = (
        per_axis("stride", 1),
        per_axis("padding", 0),
        per_axis("dilation", 1),
        upwards,
        per_axis("output_padding", 0),
    )
    groups = settings.get("groups", 1)
    sizes = None if trained is None else list(trained.shape)

    def add(source: torch.Tensor, gradient: torch.Tensor) -> None:
        _, found, shifts = torch.ops.aten.convolution_backward(
            gradient, source, parameter, sizes, *words, groups, [False, True, trained is not None]
        )
        add_to_gradient(parameter, found)
        if trained is not None:
            add_to_gradient(trained, shifts)

    return tuple(each.detach() for each in operands[1:] if each is not None), add


def _embedding_formula(
    parameter: torch.Tensor, transposed: bool, operands: Operands, settings: Settings
) -> GradientFormula | None:
    """Return the formula (code that computes the gradient of the weight without autograd) for
    `F.embedding`. Return None if the call has keyword arguments or the weight is transposed.
    """
    if settings or transposed or len(operands) != 2:
        return None

    def add(source: torch.Tensor, gradient: torch.Tensor) -> None:
        found = torch.ops.aten.embedding_dense_backward(gradient, source, len(parameter), -1, False)
        add_to_gradient(parameter, found)

    return (operands[1].detach(),), add


_FORMULA_BY_FUNCTION: dict[
    Function, Callable[[torch.Tensor, bool, Operands, Settings], GradientFormula | None]
] = {
    F.linear: partial(_matmul_formula, True),
    torch.matmul: partial(_matmul_formula, False),
    torch.mm: partial(_matmul_formula, False),
    F.embedding: _embedding_formula,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), partial(_convolution_formula, False)),
    **dict.fromkeys(
        (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        partial(_convolution_formula, True),
    ),
}


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """The deferred gradients of the parameters of one operator call. `add` adds them to the
    parameters; its argument is the gradient of the operator's result.
    """

    add: Callable[[torch.Tensor], None]
    arrived: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    """The gradient of the result, as a tuple of one tensor, once a backward has reached the
    operator; before that, empty.
    """

    def store_gradient(self, result: torch.Tensor) -> None:
        """Move the gradient of `result` to `arrived`. Used as a hook if no operand of the operator
        requires a gradient, so that `result` is a leaf of autograd's graph.
        """
        gradient = result.grad
        result.grad = None
        assert gradient is not None
        self.arrived.append((gradient,))


PendingWeightGradients = list[WeightGradient]
"""The deferred gradients of one forward, in the order in which its operators were called."""


def compute_weight_gradients(waiting: PendingWeightGradients) -> None:
    """Compute and add all deferred gradients, and empty the list. The last operator comes first.
    The tensors that an operator needs are freed before the next operator.
    """
    with torch.no_grad():
        while waiting:
            last = waiting.pop()
            for (gradient,) in last.arrived:
                last.add(gradient)


class WeightGradQueue:
    """Calls operators so that their backward defers the gradients of `parameters`. Generated code
    uses it as `p.weight_grads(function, *operands, **settings)`.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        # Gradients of vectors, for example biases, are not deferred: each is a sum, which is cheap
        # to compute at once.
        self._weights = {id(each) for each in parameters if each.requires_grad and each.dim() > 1}
        self._known: dict[str, list[tuple[Function, GradientFormula | None]]] = {}
        """(function, formula) of each operator call, in the order of the calls, by name of the
        recomputed segment in which the calls are; "" for calls outside of segments. The order is
        equal in every forward.
        """
        self.begin()
        self._waiting: PendingWeightGradients = []
        self.used = False
        """True if a forward has called an operator through this object."""

    def begin(self, part: str = "") -> None:
        """Note that a forward starts or, if `part` is given, the recomputed segment of this
        name.
        """
        self._formulas = self._known.setdefault(part, [])
        self._calls = 0

    def __call__(self, function: Function, *operands: Any, **settings: Any) -> torch.Tensor:
        """Return `function(*operands, **settings)`, one tensor, and defer the gradients of
        parameters among the operands, or of parameters of which operands are views.

        Every forward calls the same operators with the same parameters in the same order. So the
        formula of a call is stored by the index of the call, which keeps the overhead of a call
        small.
        """
        self.used = True
        if not torch.is_grad_enabled():
            return function(*operands, **settings)
        if self._calls == len(self._formulas):
            self._formulas.append((function, self._formula_of(function, operands, settings)))
        known, formula = self._formulas[self._calls]
        self._calls += 1
        if formula is None or known is not function:
            places = self._parameter_positions(operands)
            if not places:
                return function(*operands, **settings)
            deferred: torch.Tensor = _DeferredWeightGradient.apply(
                self._waiting, function, settings, places, *operands
            )  # type: ignore[no-untyped-call]
            return deferred
        detached, add = formula
        result = function(operands[0], *detached, *operands[1 + len(detached) :], **settings)
        waits = WeightGradient(partial(add, operands[0].detach()))
        self._waiting.append(waits)
        if result.grad_fn is not None:
            result.grad_fn.register_prehook(waits.arrived.append)
        # No operand requires a gradient, so `result` has no backward. A hook of `result` stores its
        # gradient, because the gradient of the weight depends on it.
        else:
            result.requires_grad_(True).register_post_accumulate_grad_hook(waits.store_gradient)
        return result

    def _formula_of(
        self, function: Function, operands: Operands, settings: Settings
    ) -> GradientFormula | None:
        """Return the formula of a call: code that computes the gradients of its parameters without
        autograd. Return None if there is none:

        - the operator has no formula, or none for these operands and settings,
        - the second operand is not the only one that is a parameter whose gradient is deferred,
        - autocast is on, which casts weights and activations, or
        - the weight is a view that is neither the whole parameter nor its transpose.
        """
        make = _FORMULA_BY_FUNCTION.get(function)
        if (
            make is None
            or self._parameter_positions(operands) != (1,)
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
        return None

    def _parameter_positions(self, operands: Operands) -> tuple[int, ...]:
        """Return the positions of the operands that are parameters, or views of parameters, whose
        gradients are deferred.
        """
        return tuple(
            place
            for place, each in enumerate(operands)
            if isinstance(each, torch.Tensor)
            and id(each if each._base is None else each._base) in self._weights
        )

    def take(self) -> PendingWeightGradients:
        """Return the deferred gradients since the last call of `take`, and start a new list."""
        taken = self._waiting
        self._waiting = []
        self.begin()
        return taken


class _DeferredWeightGradient(torch.autograd.Function):
    """Runs one operator in an autograd graph of its own, through which backward runs twice: first
    for the activations, later for the parameters. The graph keeps its saved tensors until the
    second time.
    """

    @staticmethod
    def forward(
        context: Any,
        waiting: PendingWeightGradients,
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
