"""Arrays of numbers that are polynomials in one symbol: n, the number of rows that data select.

A file computes shapes from n with a few operators. `evaluate_with_sizes` applies these operators to
the coefficients, so that n stays a symbol.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.ops import operators_with
from autopipe.ir.ops.operator import nonnegative_axis

if TYPE_CHECKING:
    import onnx

LINEAR_OPERANDS: dict[str, tuple[int, ...] | None] = {
    "Add": (0, 1),
    "Cast": (0,),
    "Concat": None,
    "Gather": (0,),
    "Identity": (0,),
    "ReduceSum": (0,),
    "Reshape": (0,),
    "ScatterElements": (0, 2),
    "Slice": (0,),
    "Split": (0,),
    "Squeeze": (0,),
    "Sub": (0, 1),
    "Transpose": (0,),
    "Unsqueeze": (0,),
    "Where": (1, 2),
}
"""By operator, the indices of the operands in which the result is linear if the other operands are
constants; None means all operands.
"""
COMPARISONS = operators_with(lambda row: row.comparison)
MINIMA = frozenset({"Min", "ReduceMin"})
ORDER_OPERATORS = COMPARISONS | MINIMA | {"Max", "ReduceMax"}
"""Operators whose result depends only on the order of the elements that they read."""
SIZE_OPERATORS = ORDER_OPERATORS | LINEAR_OPERANDS.keys() | {"Div", "Mul", "Not", "ReduceProd"}
"""Operators with which exporters compute shapes."""

Evaluate = Callable[[Sequence[np.ndarray | None]], tuple[np.ndarray, ...] | None]
"""A function that evaluates one node on constant operands. It returns None if it cannot."""


@dataclass(frozen=True, slots=True)
class SizeArray:
    """An array of polynomials in n, the number of rows that data select: element i is the sum of
    `coefficients[k][i] * n**k` over k.
    """

    coefficients: tuple[np.ndarray, ...]
    """Arrays of equal shape and type, constant terms first. The last one has a nonzero element
    unless it is the only one.
    """

    @staticmethod
    def from_coefficients(coefficients: Sequence[np.ndarray]) -> SizeArray:
        """Return the array of polynomials with these coefficients, constant terms first. Trailing
        coefficients that are all zero are removed.
        """
        count = len(coefficients)
        while count > 1 and not coefficients[count - 1].any():
            count -= 1
        return SizeArray(tuple(coefficients[:count]))

    @staticmethod
    def affine(
        shape: tuple[int, ...], scale: int, offset: int, dtype: type = np.int64
    ) -> SizeArray:
        """Return an array of this shape whose elements are all `scale * n + offset`, where n is the
        number of rows that data select.
        """
        return SizeArray.from_coefficients(
            [np.full(shape, each, dtype) for each in (offset, scale)]
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.coefficients[0].shape

    @property
    def dtype(self) -> np.dtype:
        return self.coefficients[0].dtype

    @property
    def degree(self) -> int:
        """The maximum power of n, the number of rows that data select, in any element."""
        return len(self.coefficients) - 1

    @property
    def offset(self) -> np.ndarray:
        """The constant term of each element."""
        return self.coefficients[0]

    def coefficient(self, power: int) -> np.ndarray:
        """Return the coefficients of `n**power`, one per element; zeros if `power` is beyond the
        degree.
        """
        if power <= self.degree:
            return self.coefficients[power]
        return np.zeros_like(self.offset)

    def value_at(self, number: int) -> np.ndarray:
        """Return the elements for n = `number`, where n is the number of rows that data select."""
        total = np.zeros_like(self.offset)
        for coefficient in reversed(self.coefficients):
            total = total * number + coefficient
        return total

    def elements(self) -> list[tuple[int | float, ...]]:
        """Return the coefficients of each element, the constant term first. Elements are in
        row-major order.
        """
        return list(zip(*(each.reshape(-1).tolist() for each in self.coefficients), strict=True))


Number = np.ndarray | SizeArray | None
"""Elements of an operand of a shape computation: known numbers, or polynomials in n, the number of
rows that data select. None if the operand is absent or not known before running.
"""
Polynomial = tuple[int | float, ...]
"""Coefficients of a polynomial in n, the number of rows that data select; the constant term first.
"""


def evaluate_with_sizes(
    node: onnx.NodeProto, operands: Sequence[Number], evaluate: Evaluate
) -> list[SizeArray] | None:
    """Return the results of a node some of whose operands are polynomials in n, the number of rows
    that data select, and the others constants. None if a result is not known to be a polynomial in
    n.

    Linear operators and products are exact for every n. A quotient of integers is exact for every n
    for which the dividend is at least 0 and the divisor is not 0. Comparisons, minima and maxima
    hold for every sufficiently large n.
    """
    operator = node.op_type
    present = [each for each in operands if each is not None]
    if operator in ORDER_OPERATORS:
        slots = 1 if operator.startswith("Reduce") else len(operands)
        return _apply_by_rank(operator, operands, slots, evaluate)
    if operator in ("Mul", "Div") and len(present) == 2:
        multiply = _multiply_polynomials if operator == "Mul" else _divide_polynomials
        return _combine_elementwise(present[0], present[1], multiply)
    if operator == "ReduceProd":
        return _reduce_product(node, operands)
    if operator in LINEAR_OPERANDS and not _scatters_nonlinearly(node):
        slots_of = LINEAR_OPERANDS[operator]
        linear = range(len(operands)) if slots_of is None else slots_of
        return _apply_by_coefficient(operator, operands, linear, evaluate)
    return None


def _scatters_nonlinearly(node: onnx.NodeProto) -> bool:
    """True if the node has the attribute `reduction` of ScatterElements, with a value that
    multiplies elements or takes their minimum or maximum.
    """
    reductions = {bytes(each.s) for each in node.attribute if each.name == "reduction"}
    return not reductions <= {b"none", b"add"}


def _apply_by_coefficient(
    operator: str, operands: Sequence[Number], linear: Sequence[int], evaluate: Evaluate
) -> list[SizeArray] | None:
    """Apply a linear operator f to polynomials in n by applying it to each coefficient: f(sum a_k
    n^k) = sum f(a_k) n^k. `linear` has the indices of the operands in which the operator is linear.

    None if another operand depends on n, if `evaluate` fails, or if a Cast to integers changes a
    coefficient.
    """
    if any(
        isinstance(each, SizeArray) and slot not in linear for slot, each in enumerate(operands)
    ):
        return None
    degree = max(each.degree for each in operands if isinstance(each, SizeArray))
    results: list[tuple[np.ndarray, ...]] = []
    for power in range(degree + 1):
        arrays: list[np.ndarray | None] = []
        for slot, each in enumerate(operands):
            if isinstance(each, SizeArray):
                arrays.append(each.coefficient(power))
            elif each is not None and slot in linear and power:
                arrays.append(np.zeros_like(each))
            else:
                arrays.append(each)
        found = evaluate(arrays)
        if found is None:
            return None
        read = next(each for each in arrays if each is not None)
        if operator == "Cast" and found[0].dtype.kind == "i" and (found[0] != read).any():
            return None
        results.append(found)
    return [SizeArray.from_coefficients(each) for each in zip(*results, strict=True)]


def _apply_by_rank(
    operator: str, operands: Sequence[Number], slots: int, evaluate: Evaluate
) -> list[SizeArray] | None:
    """Apply an operator whose result depends only on the order of elements to polynomials in n.
    Instead of the elements of its first `slots` operands it gets their ranks, in the order that
    they have for large n.

    None if one of these operands is unknown, if another one depends on n, or if `evaluate` fails.
    """
    arrays = [_convert_to_sizes(each) for each in operands[:slots] if each is not None]
    if len(arrays) < slots or any(isinstance(each, SizeArray) for each in operands[slots:]):
        return None
    elements = {_trim_zeros(each) for array in arrays for each in array.elements()}
    ordered = sorted(elements, key=_order_key)
    rank_of = {each: rank for rank, each in enumerate(ordered)}
    dtype = arrays[0].dtype
    ranks: list[np.ndarray | None] = [
        np.array([rank_of[_trim_zeros(each)] for each in array.elements()], dtype).reshape(
            array.shape
        )
        for array in arrays
    ]
    rest = [each for each in operands[slots:] if not isinstance(each, SizeArray)]
    found = evaluate([*ranks, *rest])
    if found is None:
        return None
    if operator in COMPARISONS:
        return [SizeArray.from_coefficients([found[0]])]
    chosen = [ordered[int(rank)] for rank in found[0].reshape(-1)]
    return [_assemble_array(chosen, found[0].shape, dtype)]


def _order_key(element: Polynomial) -> tuple[int, Polynomial]:
    """Return a sort key that orders polynomials in n as their values for large n: by the degree
    times the sign of the leading coefficient, then by the coefficients from the highest power on.
    """
    leading = element[-1]
    degree = len(element) - 1
    signed_degree = degree if leading >= 0 else -degree
    return signed_degree, tuple(reversed(element))


def _trim_zeros(element: Polynomial) -> Polynomial:
    """Return the polynomial without zeros after its last nonzero coefficient."""
    count = len(element)
    while count > 1 and not element[count - 1]:
        count -= 1
    return element[:count]


def _convert_to_sizes(number: np.ndarray | SizeArray) -> SizeArray:
    """Return an array of constants as polynomials of degree 0; a SizeArray itself."""
    return number if isinstance(number, SizeArray) else SizeArray((number,))


def _assemble_array(
    elements: Sequence[Polynomial], shape: tuple[int, ...], dtype: np.dtype
) -> SizeArray:
    """Return the array of these polynomials, which are in row-major order."""
    columns = list(zip_longest(*elements, fillvalue=0)) or [()]
    return SizeArray.from_coefficients([np.array(each, dtype).reshape(shape) for each in columns])


def _combine_elementwise(
    left: np.ndarray | SizeArray,
    right: np.ndarray | SizeArray,
    combine: Callable[[Polynomial, Polynomial, bool], Polynomial | None],
) -> list[SizeArray] | None:
    """Combine two arrays of polynomials element by element, with broadcasting. `combine` gets two
    polynomials and whether their coefficients are integers. None if it returns None for an element.
    """
    first = _convert_to_sizes(left)
    second = _convert_to_sizes(right)
    shape = np.broadcast_shapes(first.shape, second.shape)
    operands = []
    for each in (first, second):
        wide = [np.broadcast_to(coefficient, shape) for coefficient in each.coefficients]
        operands.append(SizeArray(tuple(wide)).elements())
    is_integer = first.dtype.kind == "i"
    found = []
    for pair in zip(*operands, strict=True):
        element = combine(_trim_zeros(pair[0]), _trim_zeros(pair[1]), is_integer)
        if element is None:
            return None
        found.append(element)
    return [_assemble_array(found, shape, first.dtype)]


def _multiply_polynomials(left: Polynomial, right: Polynomial, is_integer: bool) -> Polynomial:
    """Return left · right. `is_integer` is unused: `_divide_polynomials` has the same
    parameters.
    """
    total: list[int | float] = [0] * (len(left) + len(right) - 1)
    for power, first in enumerate(left):
        for other, second in enumerate(right):
            total[power + other] += first * second
    return _trim_zeros(tuple(total))


def _divide_polynomials(left: Polynomial, right: Polynomial, is_integer: bool) -> Polynomial | None:
    """Return left / right, rounded down if `is_integer`; None if the quotient is not a polynomial.

    A constant integer divisor d > 0 must divide every coefficient except the constant term b, since
    floor((d * p(n) + b) / d) = p(n) + floor(b / d). Division by another divisor must leave no
    remainder.
    """
    if not any(right):
        return None
    if len(right) == 1 and not is_integer:
        return tuple(each / right[0] for each in left)
    if len(right) == 1 and right[0] > 0:
        divisor = right[0]
        if any(each % divisor for each in left[1:]):
            return None
        return tuple(each // divisor for each in left)
    rest = list(left)
    quotient: list[int | float] = [0] * max(len(left) - len(right) + 1, 1)
    for power in reversed(range(len(left) - len(right) + 1)):
        factor = rest[power + len(right) - 1] / right[-1]
        if is_integer and factor != int(factor):
            return None
        quotient[power] = int(factor) if is_integer else factor
        for other, each in enumerate(right):
            rest[power + other] -= quotient[power] * each
    return None if any(rest) else _trim_zeros(tuple(quotient))


def multiply_elements(sizes: SizeArray) -> SizeArray:
    """Return the product of all elements of `sizes`, as an array without dimensions."""
    total: Polynomial = (1,)
    for element in sizes.elements():
        total = _multiply_polynomials(total, element, True)
    return _assemble_array([total], (), sizes.dtype)


def _reduce_product(node: onnx.NodeProto, operands: Sequence[Number]) -> list[SizeArray] | None:
    """Return the result of a ReduceProd of polynomials along its axes. None if the operand is a
    constant, or if the axes depend on n.
    """
    data = operands[0]
    named = {each.name: each for each in node.attribute}
    listed = operands[1] if len(operands) > 1 else None
    if not isinstance(data, SizeArray) or isinstance(listed, SizeArray):
        return None
    rank = len(data.shape)
    axes = [*named["axes"].ints] if "axes" in named else []
    if listed is not None:
        axes = listed.reshape(-1).tolist()
    if not axes and "noop_with_empty_axes" in named and named["noop_with_empty_axes"].i:
        return [data]
    reduced = sorted({nonnegative_axis(int(each), rank) for each in axes} or set(range(rank)))
    kept = [axis for axis in range(rank) if axis not in reduced]
    rows = math.prod(data.shape[axis] for axis in kept)
    flat = [each.transpose([*kept, *reduced]).reshape(rows, -1) for each in data.coefficients]
    products = [
        multiply_elements(SizeArray(tuple(each[row] for each in flat))) for row in range(rows)
    ]
    keeps_axes = named["keepdims"].i if "keepdims" in named else 1
    shape = [1 if axis in reduced else extent for axis, extent in enumerate(data.shape)]
    if not keeps_axes:
        shape = [data.shape[axis] for axis in kept]
    elements = [each.elements()[0] for each in products]
    return [_assemble_array(elements, tuple(shape), data.dtype)]
