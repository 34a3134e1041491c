"""Operators that compute one tensor of a file from another, found by comparing the data of both.

A derivation is accepted only if it reproduces every element: exactly if it moves, scales or shifts
elements, and within a few roundings if it applies a function such as Sigmoid, which libraries round
differently.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from autopipe.passes.frontend.tables import is_uniform

BLOCK: Final = 1 << 20
"""Elements compared at a time."""
SAMPLED: Final = 64
"""Elements that are compared first: most tensors differ in them."""
MOST_AXES: Final = 4
"""Axes up to which every transposition is tried."""
LARGEST: Final = 1 << 24
"""Maximum bytes of a tensor whose elements are looked up one by one in another."""
LEAST: Final = 4
"""Minimum different elements of a tensor for which equality with a function of another is no
accident.
"""
MOVES: Final = frozenset({"Transpose", "Reshape", "Expand", "Gather", "StopGradient"})
"""Steps that leave elements as they are."""
ROUNDINGS: Final = 4e-6
"""Maximum relative difference between two libraries' float32 results of one function."""


def _softplus(array: np.ndarray) -> np.ndarray:
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
"""Operators of one operand."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One operator of ONNX's on a tensor, with the shape of its result."""

    operator: str
    shape: tuple[int, ...]
    perm: tuple[int, ...] = ()
    """Transpose's order of the axes."""
    operand: np.ndarray | None = None
    """The other operand: Gather's indices, what Add adds, Mul multiplies by, Sub takes the tensor
    from.
    """
    other: str = ""
    """Name of the parameter that is the other operand in place of `operand`."""
    moves: tuple[Step, ...] = ()
    """Changes of layout of the parameter `other` before it is an operand."""
    axis: int = 0
    """Concat's axis."""

    def apply(
        self, array: np.ndarray, others: Mapping[str, np.ndarray] | None = None
    ) -> np.ndarray:
        """Return the result; `others` has the parameters that are other operands, by name."""
        other: Any = self.operand
        if others is not None and self.other:
            other = applied(self.moves, others[self.other])
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
        """Return the operator that undoes this change of layout of a tensor of `shape`."""
        if self.operator == "Transpose":
            return Step("Transpose", shape, tuple(int(axis) for axis in np.argsort(self.perm)))
        if self.operator == "Gather":
            assert self.operand is not None and self.shape == shape, (
                "elements were lost or repeated"
            )
            return Step("Gather", shape, operand=np.argsort(self.operand))
        assert self.operator == "Reshape", f"{self.operator} is no change of layout"
        return Step("Reshape", shape)


def applied(
    steps: tuple[Step, ...], array: np.ndarray, others: Mapping[str, np.ndarray] | None = None
) -> np.ndarray:
    """Return the result of all steps, in their order."""
    for step in steps:
        array = step.apply(array, others)
    return array


def weighted_sum(elements: Mapping[str, np.ndarray], result: np.ndarray) -> tuple[Step, ...] | None:
    """Return the operators that make `result` of the first of `elements`, scalars by name, as a
    constant of at most two digits times the sum of all; None if it is not one.
    """
    numbers = [float(each.reshape(())) for each in elements.values()]
    total = sum(numbers)
    size = sum(map(abs, numbers))
    wanted = float(result.reshape(()))
    if not total or not wanted:
        return None
    factor = float(f"{wanted / total:.2g}")
    if abs(factor * total - wanted) > ROUNDINGS * abs(factor) * size:
        return None
    shape = result.shape
    steps = [Step("Reshape", shape)] if next(iter(elements.values())).shape != shape else []
    steps += [Step("Add", shape, other=name) for name in list(elements)[1:]]
    return (*steps, Step("Mul", shape, operand=np.full((), factor, result.dtype)))


def derived(first: np.ndarray, second: np.ndarray) -> tuple[Step, ...] | None:
    """Return the operators that make `second` of `first`; None if no derivation of this module
    does.

    Tries, in this order: moving all elements, one function or one constant for all elements after
    such a move, expansion, and taking elements of `first`, some of which a mask sets to 0.
    """
    if first.size == second.size:
        for moves in moves_between(first.shape, second.shape):
            found = _function(first, moves, second)
            if found is not None:
                return (*moves, *found)
    expanded = expansion(first, second)
    return expanded if expanded is not None else _selection(first, second)


def moves_between(shape: tuple[int, ...], wanted: tuple[int, ...]) -> Iterator[tuple[Step, ...]]:
    """Yield the transpositions and reshapings that make a tensor of shape `wanted` of one of
    `shape`.

    The first one keeps the order of the elements.
    """
    reshaped = (Step("Reshape", wanted),)
    yield () if shape == wanted else reshaped
    wide = [axis for axis, extent in enumerate(shape) if extent > 1]
    if len(wide) > MOST_AXES:
        return
    for order in itertools.permutations(wide):
        if list(order) == wide:
            continue
        # Axes of one element stay where they are.
        axes = iter(order)
        perm = tuple(next(axes) if extent > 1 else axis for axis, extent in enumerate(shape))
        moved = tuple(shape[axis] for axis in perm)
        turned = (Step("Transpose", moved, perm),)
        yield turned if moved == wanted else (*turned, *reshaped)


def moved(first: np.ndarray, second: np.ndarray) -> tuple[Step, ...] | None:
    """Return the transposition and reshaping that make the second of the first."""
    for steps in moves_between(first.shape, second.shape):
        near, wanted = _samples(first, steps, second)
        if np.array_equal(near, wanted) and _is_equal(
            _transposed(first, steps), second.reshape(-1)
        ):
            return steps
    return None


def _transposed(array: np.ndarray, moves: tuple[Step, ...]) -> np.ndarray:
    """Return the array after the Transpose of `moves`, without a copy; a Reshape keeps the order of
    the elements.
    """
    return moves[0].apply(array) if moves and moves[0].operator == "Transpose" else array


def _samples(
    first: np.ndarray, moves: tuple[Step, ...], second: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return some elements of `first` after `moves`, and those of `second` at the same indices."""
    sampled = np.linspace(0, second.size - 1, min(SAMPLED, second.size)).astype(np.int64)
    turned = np.atleast_1d(_transposed(first, moves))
    near = np.asarray(turned[np.unravel_index(sampled, turned.shape)])
    return near, np.asarray(second.reshape(-1)[sampled])


def _is_equal(array: np.ndarray, flat: np.ndarray) -> bool:
    """Return True if `array`, read row by row, has the elements of `flat`."""
    array = np.atleast_1d(array)
    rows = max(1, BLOCK * len(array) // array.size)
    width = array.size // len(array)
    return all(
        np.array_equal(
            array[start : start + rows].reshape(-1), flat[start * width : (start + rows) * width]
        )
        for start in range(0, len(array), rows)
    )


def expansion(first: np.ndarray, second: np.ndarray) -> tuple[Step, ...] | None:
    """Return the Expand that makes the second of the first."""
    if first.size >= second.size or first.ndim > second.ndim:
        return None
    padded = (1,) * (second.ndim - first.ndim) + first.shape
    fits = all(have in (1, want) for have, want in zip(padded, second.shape, strict=True))
    if fits and np.array_equal(np.broadcast_to(first, second.shape), second):
        return (Step("Expand", second.shape),)
    return None


def _function(
    first: np.ndarray, moves: tuple[Step, ...], second: np.ndarray
) -> tuple[Step, ...] | None:
    """Return the operators that make `second` of `first` after `moves`, element by element."""
    near, wanted = _samples(first, moves, second)
    if np.array_equal(near, wanted) and _is_equal(_transposed(first, moves), second.reshape(-1)):
        return ()
    if len(np.unique(near)) < LEAST or is_uniform(wanted):
        return None
    for step in _constants(near, wanted, second.shape):
        if np.array_equal(step.apply(near), wanted) and np.array_equal(
            step.apply(applied(moves, first)), second
        ):
            return (step,)
    with np.errstate(all="ignore"):
        for operator, function in FUNCTIONS.items():
            if _is_close(function(near), wanted) and _is_close(
                function(applied(moves, first)), second
            ):
                return (Step(operator, second.shape),)
        if _is_close(near * near, wanted) and _is_close(applied(moves, first) ** 2, second):
            return (Step("Pow", second.shape, operand=np.full((), 2, first.dtype)),)
    return None


def _is_close(found: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.allclose(found, wanted, rtol=ROUNDINGS, atol=0))


def _constants(near: np.ndarray, wanted: np.ndarray, shape: tuple[int, ...]) -> Iterator[Step]:
    """Yield the steps with one constant for all elements that fit the sampled element whose size is
    the largest.
    """
    dtype = near.dtype
    at = int(np.argmax(np.abs(near)))
    one = float(near[at])
    other = float(wanted[at])
    yield Step("Sub", shape, operand=np.ones((), dtype))
    if one:
        for factor in _near(other / one, dtype):
            yield Step("Neg", shape) if factor == -1 else Step("Mul", shape, operand=factor)
    for offset in _near(other - one, dtype):
        yield Step("Add", shape, operand=offset)
    for offset in _near(other + one, dtype):
        yield Step("Sub", shape, operand=offset)


def _near(number: float, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield the constants that a program may have for a number computed with a rounding: short ones
    first.
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


def _selection(first: np.ndarray, second: np.ndarray) -> tuple[Step, ...] | None:
    """Return the lookup that takes each element of `second` from `first`, 0 at some indices; None
    if an element is neither, or if `first` has equal elements, so that nothing tells which one was
    taken.
    """
    if max(first.nbytes, second.nbytes) > LARGEST or not second.size:
        return None
    flat = np.ascontiguousarray(first).reshape(-1)
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    if flat.size < min(LEAST, second.size) or not flat.all() or (ordered[1:] == ordered[:-1]).any():
        return None
    places = np.minimum(np.searchsorted(ordered, second), flat.size - 1)
    is_taken = ordered[places] == second
    if not (is_taken | (second == 0)).all() or is_taken.sum() < min(LEAST, flat.size):
        return None
    indices = np.where(is_taken, order[places], 0).astype(np.int64)
    steps: tuple[Step, ...] = () if first.ndim == 1 else (Step("Reshape", (flat.size,)),)
    steps = (*steps, Step("Gather", second.shape, operand=indices))
    if is_taken.all():
        return steps
    return (*steps, Step("Mul", second.shape, operand=is_taken.astype(first.dtype)))
