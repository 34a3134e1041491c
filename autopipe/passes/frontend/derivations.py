"""Search for a derivation: ONNX operators that compute one tensor of a file from another. The
search compares the data of the tensors.

Exporters evaluate operators on weights (constant folding), so that a file contains the result
instead of the operators. A derivation is accepted only if it reproduces every element. The match
must be exact if the operators move, scale or shift elements. For a function such as Sigmoid, which
libraries round differently, the relative error may be up to `ROUNDINGS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from autopipe.passes.frontend.tables import is_uniform

BLOCK: Final = 1 << 20
"""Number of elements that are compared at a time, to bound the memory of a comparison."""
SAMPLED: Final = 64
"""Maximum number of elements that are compared before the full tensors. Most pairs of tensors
already differ in these elements.
"""
MAX_AXES: Final = 4
"""Maximum number of axes of size above 1 for which all permutations are tried."""
MAX_BYTES: Final = 1 << 24
"""Maximum bytes of each of two tensors if the elements of one are searched for in the other."""
MIN_ELEMENTS: Final = 4
"""Minimum number of distinct elements that must match before a tensor counts as a function of
another tensor. Fewer elements may match by coincidence.
"""
MOVES: Final = frozenset({"Transpose", "Reshape", "Expand", "Gather", "StopGradient"})
"""Operators of steps that do not change the values of elements: they move, repeat or drop elements.
"""
ROUNDINGS: Final = 4e-6
"""Maximum relative difference between two libraries' float32 results of one function."""


def _softplus(array: np.ndarray) -> np.ndarray:
    """Return log(1 + exp(x)) for each element x, computed in float64."""
    return np.asarray(np.logaddexp(0, array.astype(np.float64)))


FUNCTIONS: Final[Mapping[str, Callable[[np.ndarray], np.ndarray]]] = {
    "Neg": np.negative,
    "Exp": np.exp,
    "Sigmoid": lambda array: np.asarray(1 / (1 + np.exp(-array))),
    "Tanh": np.tanh,
    "Softplus": _softplus,
    "Relu": lambda array: np.asarray(np.maximum(array, 0)),
    "Abs": np.abs,
    "Sqrt": np.sqrt,
    "Log": np.log,
    "Reciprocal": np.reciprocal,
    "Sin": np.sin,
    "Cos": np.cos,
}
"""The elementwise functions that the search tries: ONNX operator with one operand, and the numpy
function that computes it.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One ONNX operator of a derivation, which is applied to a tensor."""

    operator: str
    shape: tuple[int, ...]
    """Shape of the result."""
    perm: tuple[int, ...] = ()
    """The attribute `perm` of a Transpose."""
    operand: np.ndarray | None = None
    """Data of the second operand: the indices of a Gather, the summand of an Add, the factor of a
    Mul, the minuend of a Sub, or the exponent of a Pow. None if there is none or if it is the
    parameter `other`.
    """
    other: str = ""
    """Name of the parameter that is the second operand; "" if it is `operand` or if there is none.
    """
    moves: tuple[Step, ...] = ()
    """Transpositions and reshapes that are applied to the parameter `other` before it becomes the
    second operand.
    """
    axis: int = 0
    """The axis of a Concat; not used by other operators."""

    def apply(
        self, array: np.ndarray, others: Mapping[str, np.ndarray] | None = None
    ) -> np.ndarray:
        """Return the result of this step for the tensor `array`. `others` maps names of parameters
        to their data; it is required if `self.other` is not "".
        """
        other: Any = self.operand
        if others is not None and self.other:
            other = apply_steps(self.moves, others[self.other])
        match self.operator:
            case "Transpose":
                return array.transpose(self.perm)
            case "Reshape":
                return array.reshape(self.shape)
            case "StopGradient":
                return array
            case "Expand":
                return np.broadcast_to(array, self.shape)
            case "Gather":
                return np.asarray(array[other])
            case "Add":
                return np.asarray(array + other)
            case "Mul":
                return np.asarray(array * other)
            case "Sub":
                return np.asarray(other - array)
            case "Div":
                return np.asarray(array / other)
            case "MatMul":
                return np.asarray(array @ other)
            case "ReduceSum":
                return np.asarray(array.sum())
            case "Concat":
                return np.concatenate((array, other), self.axis)
            case "Pow":
                return np.asarray(np.power(array, other))
        return np.asarray(FUNCTIONS[self.operator](array).astype(array.dtype))

    def inverse(self, shape: tuple[int, ...]) -> Step:
        """Return the step that reverses this Transpose, Reshape or Gather. `shape` is the shape of
        the tensor to which this step was applied. A Gather must be a permutation of a tensor of
        that shape.
        """
        if self.operator == "Transpose":
            return Step("Transpose", shape, tuple(int(axis) for axis in np.argsort(self.perm)))
        if self.operator == "Gather":
            assert self.operand is not None and self.shape == shape, (
                "a Gather of other elements has no inverse"
            )
            return Step("Gather", shape, operand=np.argsort(self.operand))
        assert self.operator == "Reshape", f"{self.operator} has no inverse"
        return Step("Reshape", shape)


def apply_steps(
    steps: tuple[Step, ...], array: np.ndarray, others: Mapping[str, np.ndarray] | None = None
) -> np.ndarray:
    """Return the result of applying the steps to `array` in order. `others` contains the data of
    the parameters that steps use as second operand.
    """
    for step in steps:
        array = step.apply(array, others)
    return array


def find_weighted_sum(
    elements: Mapping[str, np.ndarray], result: np.ndarray
) -> tuple[Step, ...] | None:
    """Return the steps that compute `result` as a constant times the sum of `elements`; None if
    `result` is not such a sum.

    `elements` maps names to tensors of one element. The steps are applied to the first tensor, and
    add the other tensors. The constant is rounded to two significant digits.
    """
    numbers = [float(each.reshape(())) for each in elements.values()]
    total = sum(numbers)
    size = sum(map(abs, numbers))
    expected = float(result.reshape(()))
    if not total or not expected:
        return None
    factor = float(f"{expected / total:.2g}")
    if abs(factor * total - expected) > ROUNDINGS * abs(factor) * size:
        return None
    shape = result.shape
    steps = [Step("Reshape", shape)] if next(iter(elements.values())).shape != shape else []
    steps += [Step("Add", shape, other=name) for name in list(elements)[1:]]
    return (*steps, Step("Mul", shape, operand=np.full((), factor, result.dtype)))


def find_derivation(first: np.ndarray, second: np.ndarray) -> tuple[Step, ...] | None:
    """Return the steps that compute the tensor `second` from the tensor `first`; None if none are
    found.

    The search tries, in this order:

    - A transposition and a reshape, alone or followed by one arithmetic operation with a constant
      or by one function of `FUNCTIONS` or a square.
    - An Expand.
    - A Gather of elements of `first`. A mask may set some of the results to 0.
    """
    if first.size == second.size:
        for moves in moves_between(first.shape, second.shape):
            found = _find_elementwise(first, moves, second)
            if found is not None:
                return (*moves, *found)
    expanded = find_expand(first, second)
    return expanded if expanded is not None else _find_gather(first, second)


def moves_between(shape: tuple[int, ...], expected: tuple[int, ...]) -> Iterator[tuple[Step, ...]]:
    """Yield each combination of Transpose and Reshape that turns a tensor of `shape` into a tensor
    of shape `expected`. The first combination has no Transpose. Shapes with more than `MAX_AXES`
    axes of size above 1 yield only the first.
    """
    reshaped = (Step("Reshape", expected),)
    yield () if shape == expected else reshaped
    wide = [axis for axis, extent in enumerate(shape) if extent > 1]
    if len(wide) > MAX_AXES:
        return
    for order in itertools.permutations(wide):
        if list(order) == wide:
            continue
        # Axes of size 1 are not permuted: that would not change the order of the elements.
        axes = iter(order)
        perm = tuple(next(axes) if extent > 1 else axis for axis, extent in enumerate(shape))
        moved = tuple(shape[axis] for axis in perm)
        transpose = (Step("Transpose", moved, perm),)
        yield transpose if moved == expected else (*transpose, *reshaped)


def find_moves(first: np.ndarray, second: np.ndarray) -> tuple[Step, ...] | None:
    """Return the steps, at most a Transpose and a Reshape, that compute `second` from `first`,
    which has equally many elements. None if there are none.
    """
    for steps in moves_between(first.shape, second.shape):
        sampled, expected = _sample_both(first, steps, second)
        if np.array_equal(sampled, expected) and _is_equal(
            _apply_transpose(first, steps), second.reshape(-1)
        ):
            return steps
    return None


def _apply_transpose(array: np.ndarray, moves: tuple[Step, ...]) -> np.ndarray:
    """Return a view of `array` after the Transpose in `moves`, or `array` itself if `moves` has
    none. The Reshape is omitted because it keeps the order of the elements.
    """
    return moves[0].apply(array) if moves and moves[0].operator == "Transpose" else array


def _sample_both(
    first: np.ndarray, moves: tuple[Step, ...], second: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return two vectors of at most `SAMPLED` elements: elements of `first` after the steps
    `moves`, and the elements of `second` at the same positions.
    """
    indices = np.linspace(0, second.size - 1, min(SAMPLED, second.size)).astype(np.int64)
    transposed = np.atleast_1d(_apply_transpose(first, moves))
    found = np.asarray(transposed[np.unravel_index(indices, transposed.shape)])
    return found, np.asarray(second.reshape(-1)[indices])


def _is_equal(array: np.ndarray, flat: np.ndarray) -> bool:
    """True if the elements of `array` in row-major order equal the vector `flat`. Compares `BLOCK`
    elements at a time.
    """
    array = np.atleast_1d(array)
    rows = max(1, BLOCK * len(array) // array.size)
    width = array.size // len(array)
    return all(
        np.array_equal(
            array[start : start + rows].reshape(-1), flat[start * width : (start + rows) * width]
        )
        for start in range(0, len(array), rows)
    )


def find_expand(first: np.ndarray, second: np.ndarray) -> tuple[Step, ...] | None:
    """Return the Expand that computes `second` from `first` as a tuple of one step; None if there
    is none.
    """
    if first.size >= second.size or first.ndim > second.ndim:
        return None
    padded = (1,) * (second.ndim - first.ndim) + first.shape
    fits = all(have in (1, want) for have, want in zip(padded, second.shape, strict=True))
    if fits and np.array_equal(np.broadcast_to(first, second.shape), second):
        return (Step("Expand", second.shape),)
    return None


def _find_elementwise(
    first: np.ndarray, moves: tuple[Step, ...], second: np.ndarray
) -> tuple[Step, ...] | None:
    """Return the steps that, applied after `moves`, compute `second` from `first`: () if `moves`
    suffice, otherwise one elementwise step. None if no step is found.
    """
    sampled, expected = _sample_both(first, moves, second)
    if np.array_equal(sampled, expected) and _is_equal(
        _apply_transpose(first, moves), second.reshape(-1)
    ):
        return ()
    if len(np.unique(sampled)) < MIN_ELEMENTS or is_uniform(expected):
        return None
    for step in _constant_steps(sampled, expected, second.shape):
        if np.array_equal(step.apply(sampled), expected) and np.array_equal(
            step.apply(apply_steps(moves, first)), second
        ):
            return (step,)
    with np.errstate(all="ignore"):
        for operator, function in FUNCTIONS.items():
            if _is_close(function(sampled), expected) and _is_close(
                function(apply_steps(moves, first)), second
            ):
                return (Step(operator, second.shape),)
        if _is_close(sampled * sampled, expected) and _is_close(
            apply_steps(moves, first) ** 2, second
        ):
            return (Step("Pow", second.shape, operand=np.full((), 2, first.dtype)),)
    return None


def _is_close(found: np.ndarray, expected: np.ndarray) -> bool:
    """True if all elements agree up to a relative error of `ROUNDINGS`."""
    return bool(np.allclose(found, expected, rtol=ROUNDINGS, atol=0))


def _constant_steps(
    sampled: np.ndarray, expected: np.ndarray, shape: tuple[int, ...]
) -> Iterator[Step]:
    """Yield candidates for the arithmetic step that computes `expected` from the vector `sampled`.
    The first is `1 - x`. The others are products, sums and differences with one constant that fits
    the sampled element with the largest absolute value. `shape` is the shape of the step's result.
    """
    dtype = sampled.dtype
    largest = int(np.argmax(np.abs(sampled)))
    element = float(sampled[largest])
    result = float(expected[largest])
    yield Step("Sub", shape, operand=np.ones((), dtype))
    if element:
        for factor in _candidate_constants(result / element, dtype):
            yield Step("Neg", shape) if factor == -1 else Step("Mul", shape, operand=factor)
    for offset in _candidate_constants(result - element, dtype):
        yield Step("Add", shape, operand=offset)
    for offset in _candidate_constants(result + element, dtype):
        yield Step("Sub", shape, operand=offset)


def _candidate_constants(number: float, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield the constants that a rounded `number` may stand for, as scalars of type `dtype`: first
    decimal numbers with few digits, then inverses of such numbers, then the nearest representable
    numbers.
    """
    with np.errstate(over="ignore"):
        exact = np.asarray(number, dtype)
        found = [np.asarray(float(f"{number:.{digits}g}"), dtype) for digits in (1, 2, 3, 4, 5, 6)]
    inverse = 1 / number if number else 0.0
    found += [
        np.asarray(1 / float(f"{inverse:.{digits}g}"), dtype) for digits in (2, 4, 6) if inverse
    ]
    found += [
        exact,
        np.nextafter(exact, np.asarray(np.inf, dtype)),
        np.nextafter(exact, np.asarray(-np.inf, dtype)),
    ]
    seen: set[float] = set()
    for each in found:
        if np.isfinite(each) and float(each) not in seen:
            seen.add(float(each))
            yield np.asarray(each, dtype)


def _find_gather(first: np.ndarray, second: np.ndarray) -> tuple[Step, ...] | None:
    """Return the Gather that reads each element of `second` from `first`, followed by a Mul with a
    mask if `second` has zeros. A Reshape precedes it if `first` is not a vector.

    Returns None if an element of `second` is neither 0 nor an element of `first`, if `first`
    contains 0 or equal elements (the indices would be ambiguous), if fewer than `MIN_ELEMENTS`
    elements match, or if a tensor is larger than `MAX_BYTES`.
    """
    if max(first.nbytes, second.nbytes) > MAX_BYTES or not second.size:
        return None
    flat = np.ascontiguousarray(first).reshape(-1)
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    if (
        flat.size < min(MIN_ELEMENTS, second.size)
        or not flat.all()
        or (ordered[1:] == ordered[:-1]).any()
    ):
        return None
    places = np.minimum(np.searchsorted(ordered, second), flat.size - 1)
    is_taken = ordered[places] == second
    if not (is_taken | (second == 0)).all() or is_taken.sum() < min(MIN_ELEMENTS, flat.size):
        return None
    indices = np.where(is_taken, order[places], 0).astype(np.int64)
    steps: tuple[Step, ...] = () if first.ndim == 1 else (Step("Reshape", (flat.size,)),)
    steps = (*steps, Step("Gather", second.shape, operand=indices))
    if is_taken.all():
        return steps
    return (*steps, Step("Mul", second.shape, operand=is_taken.astype(first.dtype)))
