"""Search for operators that compute one tensor of a file from several parameters of the file. The
search compares the data of the tensors.

A derivation is accepted only if it reproduces every element: exactly for concatenations and
elementwise operators, and up to rounding errors for matrix products and sums of squares.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from autopipe.passes.frontend.derivations import Step, apply_steps, moves_between

Derivation = tuple[str, tuple[Step, ...]]
"""(name, steps): applied to the parameter of that name, the steps compute the tensor. They read the
other parameters as second operands.
"""
Arrays = Mapping[str, np.ndarray]
"""Data of parameters by name."""
MAX_PARAMETERS: Final = 4
"""Maximum number of parameters. The limit is needed because all of their orders are tried."""
MAX_BYTES: Final = 1 << 26
"""Maximum bytes of the result and of each parameter."""
SAMPLED: Final = 64
"""Maximum number of elements that are compared before the full tensors."""
ROUNDINGS: Final = 1e-6
"""Maximum rounding error of an element of a matrix product, relative to the sum of the absolute
values of its terms.
"""
SUM_ROUNDINGS: Final = 4e-6
"""Maximum relative error of a sum of float32 numbers."""
MIN_ELEMENTS: Final = 4
"""Minimum number of distinct elements that a tensor must have to count as a function of parameters.
Fewer elements may match by coincidence.
"""


def find_joint_derivation(arrays: Arrays, result: np.ndarray) -> Derivation | None:
    """Return the derivation of the tensor `result` from all of the parameters `arrays`; None if
    none is found.

    The search tries, in this order:

    - A concatenation.
    - For two parameters: a product, sum, difference or quotient with broadcasting, then a constant
      times a matrix product.
    - For three parameters: the sum of one of them and a constant times the matrix product of the
      other two.
    """
    sizes = [each.nbytes for each in (*arrays.values(), result)]
    if (
        not 2 <= len(arrays) <= MAX_PARAMETERS
        or max(sizes) > MAX_BYTES
        or len(np.unique(result)) < MIN_ELEMENTS
    ):
        return None
    found = _find_concatenation(arrays, result)
    if found is None and len(arrays) == 2:
        found = _find_elementwise(arrays, result) or _find_scaled_product(arrays, result)
    return _find_sum_with_product(arrays, result) if found is None and len(arrays) > 2 else found


def find_sum_of_squares(arrays: Arrays, result: np.ndarray) -> tuple[Step, ...] | None:
    """Return the steps that compute the tensor `result`, which consists of one element, as a
    constant times the sum of the squares of all elements of `arrays`. None if `result` is not such
    a sum.

    The steps are applied to the first array. The constant is rounded to two significant digits.
    """
    total = sum(float((each.astype(np.float64) ** 2).sum()) for each in arrays.values())
    expected = float(result.reshape(()))
    if not total or not expected:
        return None
    factor = float(f"{expected / total:.2g}")
    if abs(factor * total - expected) > SUM_ROUNDINGS * abs(expected):
        return None
    first, *others = arrays
    steps = list(_sum_of_squares_steps(arrays[first]))
    steps += [
        Step("Add", (), other=name, moves=_sum_of_squares_steps(arrays[name])) for name in others
    ]
    steps.append(Step("Mul", (), operand=np.full((), factor, result.dtype)))
    return tuple(steps) if not result.shape else (*steps, Step("Reshape", result.shape))


def _sum_of_squares_steps(array: np.ndarray) -> tuple[Step, ...]:
    """Return the steps that compute the sum of the squares of all elements of `array`."""
    return Step("Pow", array.shape, operand=np.full((), 2, array.dtype)), Step("ReduceSum", ())


def _find_concatenation(arrays: Arrays, result: np.ndarray) -> Derivation | None:
    """Return the derivation of `result` as the concatenation of all `arrays` in some order; None if
    it is none.
    """
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
                return order[0], tuple(_concat_steps(parts, order, axis))
    return None


def _concat_steps(parts: list[np.ndarray], order: tuple[str, ...], axis: int) -> Iterator[Step]:
    """Yield the steps that append the second and later parts to the first along `axis`. `order` has
    the names of the parts.
    """
    shape = list(parts[0].shape)
    for part, name in zip(parts[1:], order[1:], strict=True):
        shape[axis] += part.shape[axis]
        yield Step("Concat", tuple(shape), other=name, axis=axis)


def _find_elementwise(arrays: Arrays, result: np.ndarray) -> Derivation | None:
    """Return the derivation of `result` as product, sum, difference or quotient of two parameters,
    which may be transposed, reshaped or broadcast. None if it is none of these.
    """
    for first_name, second_name in itertools.permutations(arrays):
        for (first, first_moves), (second, second_moves) in itertools.product(
            _broadcastable_forms(arrays[first_name], result.shape),
            _broadcastable_forms(arrays[second_name], result.shape),
        ):
            if np.broadcast_shapes(first.shape, second.shape) != result.shape:
                continue
            sampled = (
                _sample_elements(np.broadcast_to(first, result.shape)),
                _sample_elements(np.broadcast_to(second, result.shape)),
            )
            for operator in ("Mul", "Add", "Sub", "Div"):
                step = Step(operator, result.shape, other=second_name, moves=second_moves)
                sample = Step(operator, sampled[0].shape, other=second_name)
                with np.errstate(all="ignore"):
                    if not np.array_equal(
                        sample.apply(sampled[0], {second_name: sampled[1]}),
                        _sample_elements(result),
                    ):
                        continue
                    if np.array_equal(step.apply(first, arrays), result):
                        return first_name, (*first_moves, step)
    return None


def _sample_elements(array: np.ndarray) -> np.ndarray:
    """Return at most `SAMPLED` elements of `array`. Arrays of the same shape yield elements at the
    same positions.
    """
    places = np.linspace(0, array.size - 1, min(SAMPLED, array.size)).astype(np.int64)
    return np.asarray(array[np.unravel_index(places, array.shape)])


def _broadcastable_forms(
    array: np.ndarray, shape: tuple[int, ...]
) -> Iterator[tuple[np.ndarray, tuple[Step, ...]]]:
    """Yield (array, steps): variants of `array` that numpy can broadcast to `shape`, and the steps
    that compute each variant. If the array has the number of elements of `shape`, the variants are
    its transpositions and reshapes; otherwise axes of size 1 are inserted.
    """
    if array.size == math.prod(shape):
        for moves in moves_between(array.shape, shape):
            yield apply_steps(moves, array), moves
        return
    for ones in itertools.product((False, True), repeat=len(shape)):
        expected = tuple(1 if one else extent for one, extent in zip(ones, shape, strict=True))
        if math.prod(expected) == array.size:
            moves = () if array.shape == expected else (Step("Reshape", expected),)
            if _sizes_above_one(array.shape) == _sizes_above_one(expected):
                yield apply_steps(moves, array), moves


def _sizes_above_one(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes above 1."""
    return tuple(extent for extent in shape if extent > 1)


def _find_scaled_product(arrays: Arrays, result: np.ndarray) -> Derivation | None:
    """Return the derivation of `result` as a constant times the matrix product of two parameters,
    either of which may be transposed. None if it is not such a product.
    """
    for first_name, second_name in itertools.permutations(arrays):
        for (first, first_moves), (second, second_moves) in itertools.product(
            _array_and_transpose(arrays[first_name]), _array_and_transpose(arrays[second_name])
        ):
            if first.ndim != 2 or second.ndim != 2 or first.shape[1] != second.shape[0]:
                continue
            if (first.shape[0], second.shape[1]) != result.shape:
                continue
            factor = _find_product_factor(first, second, result)
            if factor is not None:
                steps = (
                    *first_moves,
                    Step("MatMul", result.shape, other=second_name, moves=second_moves),
                )
                scaled = Step("Mul", result.shape, operand=np.full((), factor, result.dtype))
                return first_name, steps if factor == 1 else (*steps, scaled)
    return None


def _array_and_transpose(array: np.ndarray) -> Iterator[tuple[np.ndarray, tuple[Step, ...]]]:
    """Yield (array, steps) for an array and, if it is a matrix, for its transpose."""
    yield array, ()
    if array.ndim == 2:
        yield array.T, (Step("Transpose", array.shape[::-1], (1, 0)),)


def _find_product_factor(first: np.ndarray, second: np.ndarray, result: np.ndarray) -> float | None:
    """Return the factor, rounded to three significant digits, between `result` and the matrix
    product of `first` and `second`; None if `result` is not a multiple of the product.
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


def _find_sum_with_product(arrays: Arrays, result: np.ndarray) -> Derivation | None:
    """Return the derivation of `result` as the sum of one parameter and a constant times the matrix
    product of two others. None if it is not such a sum.
    """
    if len(arrays) != 3:
        return None
    for name, array in arrays.items():
        if array.shape != result.shape:
            continue
        others = {other: each for other, each in arrays.items() if other != name}
        found = _find_product_of_difference(others, result, array)
        if found is not None:
            return found[0], (*found[1], Step("Add", result.shape, other=name))
    return None


def _find_product_of_difference(
    arrays: Arrays, result: np.ndarray, summand: np.ndarray
) -> Derivation | None:
    """Return the derivation of `result - summand` as a constant times the matrix product of two
    parameters; None if it is not such a product. Constants have the type of `result`.
    """
    found = _find_scaled_product(arrays, result.astype(np.float64) - summand)
    if found is None:
        return None
    name, steps = found
    return name, tuple(
        each if each.operand is None else replace(each, operand=each.operand.astype(result.dtype))
        for each in steps
    )
