"""Operators that compute a tensor of a file from several parameters that the file also holds, found
by comparing data.

A derivation is accepted only if it reproduces every element: exactly if it joins or combines single
elements, and within the roundings of its sum if it is a matrix product or a sum of squares.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from autopipe.passes.frontend.derivations import Step, applied, moves_between

Derivation = tuple[str, tuple[Step, ...]]
"""Name of the parameter that the steps begin with, and the steps."""
Arrays = Mapping[str, np.ndarray]
MOST: Final = 4
"""Maximum number of parameters that are tried in every order."""
LARGEST: Final = 1 << 26
"""Maximum bytes of a tensor that is looked for in every combination."""
SAMPLED: Final = 64
"""Elements that are compared first."""
ROUNDINGS: Final = 1e-6
"""Maximum difference of a matrix product from its exact value, relative to the sum of the sizes of
its terms.
"""
SUM_ROUNDINGS: Final = 4e-6
"""Maximum relative difference of a sum of float32 numbers from its exact value."""
LEAST: Final = 4
"""Minimum elements of a tensor for which equality with a combination of others is no accident."""


def jointly_derived(arrays: Arrays, result: np.ndarray) -> Derivation | None:
    """Return the operators that make `result` of all of `arrays`, parameters by name; None if none
    is found.

    Tries, in this order: joining them along an axis, a sum, difference, product or quotient of two
    whose elements are spread, a matrix product of two with a constant factor, and the sum of such a
    product and a third one.
    """
    sizes = [each.nbytes for each in (*arrays.values(), result)]
    if not 2 <= len(arrays) <= MOST or max(sizes) > LARGEST or len(np.unique(result)) < LEAST:
        return None
    found = _joined(arrays, result)
    if found is None and len(arrays) == 2:
        found = _combined(arrays, result) or _multiplied(arrays, result)
    return _added(arrays, result) if found is None and len(arrays) > 2 else found


def sum_of_squares(arrays: Arrays, result: np.ndarray) -> tuple[Step, ...] | None:
    """Return the operators that make `result`, a scalar, of the first of `arrays`, as a constant of
    at most two digits times the sum of the squares of all; None if it is not one.
    """
    total = sum(float((each.astype(np.float64) ** 2).sum()) for each in arrays.values())
    wanted = float(result.reshape(()))
    if not total or not wanted:
        return None
    factor = float(f"{wanted / total:.2g}")
    if abs(factor * total - wanted) > SUM_ROUNDINGS * abs(wanted):
        return None
    first, *others = arrays
    steps = list(_squares(arrays[first]))
    steps += [Step("Add", (), other=name, moves=_squares(arrays[name])) for name in others]
    steps.append(Step("Mul", (), operand=np.full((), factor, result.dtype)))
    return tuple(steps) if not result.shape else (*steps, Step("Reshape", result.shape))


def _squares(array: np.ndarray) -> tuple[Step, ...]:
    """Return the operators that add up the squares of all elements."""
    return Step("Pow", array.shape, operand=np.full((), 2, array.dtype)), Step("ReduceSum", ())


def _joined(arrays: Arrays, result: np.ndarray) -> Derivation | None:
    if any(each.ndim != result.ndim for each in arrays.values()):
        return None
    for axis in range(result.ndim):
        if sum(each.shape[axis] for each in arrays.values()) != result.shape[axis]:
            continue
        for order in itertools.permutations(arrays):
            parts = [arrays[name] for name in order]
            fits = all(
                have == want
                for each in parts
                for at, (have, want) in enumerate(zip(each.shape, result.shape, strict=True))
                if at != axis
            )
            if fits and np.array_equal(np.concatenate(parts, axis), result):
                return order[0], tuple(_join_steps(parts, order, axis))
    return None


def _join_steps(parts: list[np.ndarray], order: tuple[str, ...], axis: int) -> Iterator[Step]:
    shape = list(parts[0].shape)
    for part, name in zip(parts[1:], order[1:], strict=True):
        shape[axis] += part.shape[axis]
        yield Step("Concat", tuple(shape), other=name, axis=axis)


def _combined(arrays: Arrays, result: np.ndarray) -> Derivation | None:
    for one, other in itertools.permutations(arrays):
        for (first, moves), (second, others) in itertools.product(
            _spread(arrays[one], result.shape), _spread(arrays[other], result.shape)
        ):
            if np.broadcast_shapes(first.shape, second.shape) != result.shape:
                continue
            near = (
                _sampled(np.broadcast_to(first, result.shape)),
                _sampled(np.broadcast_to(second, result.shape)),
            )
            for operator in ("Mul", "Add", "Sub", "Div"):
                step = Step(operator, result.shape, other=other, moves=others)
                sample = Step(operator, near[0].shape, other=other)
                with np.errstate(all="ignore"):
                    if not np.array_equal(
                        sample.apply(near[0], {other: near[1]}), _sampled(result)
                    ):
                        continue
                    if np.array_equal(step.apply(first, arrays), result):
                        return one, (*moves, step)
    return None


def _sampled(array: np.ndarray) -> np.ndarray:
    """Return some elements of an array, of arrays of one shape those at the same indices."""
    places = np.linspace(0, array.size - 1, min(SAMPLED, array.size)).astype(np.int64)
    return np.asarray(array[np.unravel_index(places, array.shape)])


def _spread(
    array: np.ndarray, shape: tuple[int, ...]
) -> Iterator[tuple[np.ndarray, tuple[Step, ...]]]:
    """Yield an array in the forms that numpy broadcasts to `shape`, with the steps that make each:
    with axes of one element, or transposed.
    """
    if array.size == math.prod(shape):
        for moves in moves_between(array.shape, shape):
            yield applied(moves, array), moves
        return
    for ones in itertools.product((False, True), repeat=len(shape)):
        wanted = tuple(1 if one else extent for one, extent in zip(ones, shape, strict=True))
        if math.prod(wanted) == array.size:
            moves = () if array.shape == wanted else (Step("Reshape", wanted),)
            if _wide(array.shape) == _wide(wanted):
                yield applied(moves, array), moves


def _wide(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(extent for extent in shape if extent > 1)


def _multiplied(arrays: Arrays, result: np.ndarray) -> Derivation | None:
    """Return the steps of a constant times the product of two matrices, each perhaps transposed."""
    for one, other in itertools.permutations(arrays):
        for (first, moves), (second, others) in itertools.product(
            _turned(arrays[one]), _turned(arrays[other])
        ):
            if first.ndim != 2 or second.ndim != 2 or first.shape[1] != second.shape[0]:
                continue
            if (first.shape[0], second.shape[1]) != result.shape:
                continue
            factor = _factor_of_product(first, second, result)
            if factor is not None:
                steps = (*moves, Step("MatMul", result.shape, other=other, moves=others))
                scaled = Step("Mul", result.shape, operand=np.full((), factor, result.dtype))
                return one, steps if factor == 1 else (*steps, scaled)
    return None


def _turned(array: np.ndarray) -> Iterator[tuple[np.ndarray, tuple[Step, ...]]]:
    yield array, ()
    if array.ndim == 2:
        yield array.T, (Step("Transpose", array.shape[::-1], (1, 0)),)


def _factor_of_product(first: np.ndarray, second: np.ndarray, result: np.ndarray) -> float | None:
    """Return the constant of at most three digits by which the product is multiplied; None if there
    is none.
    """
    exact = first.astype(np.float64) @ second.astype(np.float64)
    sizes = np.abs(first.astype(np.float64)) @ np.abs(second.astype(np.float64))
    at = np.unravel_index(int(np.abs(exact).argmax()), exact.shape)
    if not exact[at]:
        return None
    factor = float(f"{float(result[at]) / exact[at]:.3g}")
    if np.all(np.abs(factor * exact - result) <= ROUNDINGS * abs(factor) * sizes):
        return factor
    return None


def _added(arrays: Arrays, result: np.ndarray) -> Derivation | None:
    """Return the steps of the sum of one parameter and a combination of two others."""
    if len(arrays) != 3:
        return None
    for name, array in arrays.items():
        if array.shape != result.shape:
            continue
        others = {other: each for other, each in arrays.items() if other != name}
        found = _multiplied_beside(others, result, array)
        if found is not None:
            return found[0], (*found[1], Step("Add", result.shape, other=name))
    return None


def _multiplied_beside(arrays: Arrays, result: np.ndarray, beside: np.ndarray) -> Derivation | None:
    """Return the steps of a constant times a product of two matrices that is the difference of two
    tensors.
    """
    found = _multiplied(arrays, result.astype(np.float64) - beside)
    if found is None:
        return None
    name, steps = found
    return name, tuple(
        each if each.operand is None else replace(each, operand=each.operand.astype(result.dtype))
        for each in steps
    )
