"""Ranges of the values of a graph's inputs, inferred from the operators that read them: indices are
below the size of the indexed dimension, labels are below the number of classes, and lengths are at
least 1. Random data are generated in these ranges, and given data are checked against the ranges of
indices and labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from autopipe.ir.graph import Graph, Node, Value
from autopipe.ir.ops import is_label_loss, operator_of, operators_with
from autopipe.ir.ops.operator import Move, Signature, signature_of
from autopipe.ir.program import InputBounds, InputRange

_MASK_LIMIT = 2
"""Exclusive upper bound for integer inputs that are used neither as an index nor as a label. They
are assumed to be masks of 0 and 1.
"""
_MOST_ELEMENTS = 1 << 22
"""Maximum number of elements for which an input gets a bound per element. A larger input gets one
bound for all elements.
"""
_MOST_VISITS = 1000
"""Maximum number of values of the graph that are searched for uses of one input."""
_MOST_PARTS = 1 << 10
"""Maximum number of different pairs (lower bound, upper bound) of the elements of one input. An
input with more pairs gets no bounds per part. The input of a recommender model has a few dozen
pairs.
"""
_UNBOUNDED = 1 << 62
_FEWEST_CONSECUTIVE = 3
"""Minimum number of consecutive integers in a constant for which a comparison with it reveals a
range. The integers 0 and 1 alone could be the two values of a mask.
"""

_KEEPING = operators_with(lambda row: row.same_elements) | {"Cast", "Expand", "Tile", "Transpose"}
"""Operators whose result contains each element of their first operand."""
_CHANGING = frozenset(["Abs", "Clip", "Max", "Min", "Mod", "Where"])
"""Operators that change elements but map small elements to small results. A range that is inferred
from their result is used to generate data, but not to reject given data.
"""
_COMPARISONS = operators_with(lambda row: row.comparison)
_RECURRENCES = operators_with(lambda row: row.gates)
_SEQUENCE_LENGTHS = 4
"""Index of the operand of a recurrent operator that has the length of each sequence."""
Numbers = npt.NDArray[np.int64]


def input_ranges(graph: Graph) -> tuple[InputRange, ...]:
    """Return the value range of each graph input, in the order of the inputs. A floating-point
    input that is not cast to integers has no range.
    """
    batch_axes = dict(graph.batch_axes)
    found = []
    for value in graph.inputs:
        axis = batch_axes.get(value.name)
        if value.dtype.is_floating and not _is_cast_to_integer(graph, value):
            found.append(InputRange(value, axis, None))
            continue
        bounds, allowed, ignored = _input_bounds(graph, value)
        least = int(bounds.below.min(initial=_UNBOUNDED))
        # Elements are generated in the range [0, below). The upper bound is therefore at least 1,
        # because contradictory bounds would otherwise permit no value.
        below = (
            None
            if value.dtype.is_floating
            else _MASK_LIMIT
            if least == _UNBOUNDED
            else max(least, 1)
        )
        drawn = bounds.bounded_blocks(value, axis, widest=False)
        if len(drawn) == 1 and drawn[0].least <= 0:
            everything = below, (0,) * len(value.shape), value.shape
            drawn = () if (drawn[0].below, drawn[0].starts, drawn[0].stops) == everything else drawn
        found.append(
            InputRange(
                value, axis, below, drawn, allowed.bounded_blocks(value, axis, widest=True), ignored
            )
        )
    return tuple(found)


def _is_cast_to_integer(graph: Graph, value: Value) -> bool:
    """True if the elements of a floating-point input are cast to integers. Exporters of tabular
    models store indices as floating-point numbers.
    """
    waiting = [value.name]
    seen = {value.name}
    while waiting and len(seen) < _MOST_VISITS:
        for index in graph.consumers().get(waiting.pop(), ()):
            node = graph.nodes[index]
            for name in filter(None, node.outputs if _element_move(node) else ()):
                if graph.type_of(name).dtype.is_integer:
                    return True
                if name not in seen:
                    seen.add(name)
                    waiting.append(name)
    return False


def _element_move(node: Node) -> Move | None:
    """Return the function `Operator.moved` of the node's operator, or None if the operator has
    none. Given an array with one number per element of an operand, the function returns the array
    that has these numbers at the positions of the elements in a result.
    """
    row = operator_of(node)
    return None if row is None else row.moved


class _Bounds:
    """The tightest bounds found so far: one pair per element of an input, or one pair for all
    elements. `least` contains the inclusive lower bounds, `below` the exclusive upper bounds.
    """

    def __init__(self, elements: int) -> None:
        self.least = np.full(elements, -_UNBOUNDED)
        self.below = np.full(elements, _UNBOUNDED)

    def tighten(self, places: Numbers | None, least: Numbers, below: Numbers) -> None:
        """Tighten the bounds of the elements at the indices `places` to `least` (inclusive) and
        `below` (exclusive). If `places` is None, tighten the bounds of all elements to the maximum
        of `least` and the minimum of `below`. Negative indices are skipped.
        """
        if places is None:
            np.maximum(self.least, least.max(initial=-_UNBOUNDED), out=self.least)
            np.minimum(self.below, below.min(initial=_UNBOUNDED), out=self.below)
            return
        real = places >= 0
        np.maximum.at(self.least, places[real], np.broadcast_to(least, places.shape)[real])
        np.minimum.at(self.below, places[real], np.broadcast_to(below, places.shape)[real])

    def bounded_blocks(
        self, value: Value, batch_axis: int | None, widest: bool
    ) -> tuple[InputBounds, ...]:
        """Return the rectangular blocks of the input `value` whose elements have equal bounds, in
        ascending order of the bounds.

        Bounds are first combined along the batch axis: the tightest bounds over the samples, or the
        widest if `widest`. Blocks are omitted if they have no bounds, contradictory bounds, or the
        elements with these bounds do not form a rectangle. Time O(n log n) for n elements.
        """
        if not self.below.size:
            return ()
        shape = value.shape if self.below.size == value.elements else (1,) * len(value.shape)
        least = self.least.reshape(shape)
        below = self.below.reshape(shape)
        if batch_axis is not None:
            low, high = (np.min, np.max) if widest else (np.max, np.min)
            least = low(least, batch_axis, keepdims=True)
            below = high(below, batch_axis, keepdims=True)
        found = []
        for first, stop, positions in _group_by_bounds(least.reshape(-1), below.reshape(-1)):
            if (stop == _UNBOUNDED and first == -_UNBOUNDED) or stop <= first:
                continue
            # `np.unravel_index` rejects the shape () of a scalar. A scalar is without axes, so its
            # tuple of axes is empty.
            axes = np.unravel_index(positions, least.shape) if least.ndim else ()
            starts = np.asarray([axis.min() for axis in axes], np.int64)
            stops = np.asarray([axis.max() + 1 for axis in axes], np.int64)
            if np.prod(stops - starts) != len(positions):
                continue
            stops = np.where(np.asarray(least.shape) == 1, value.shape, stops)
            found.append(InputBounds(first, stop, tuple(starts.tolist()), tuple(stops.tolist())))
        return tuple(found)


def _group_by_bounds(least: Numbers, below: Numbers) -> Iterator[tuple[int, int, Numbers]]:
    """Yield (inclusive lower bound, exclusive upper bound, indices of the elements with these
    bounds), in ascending order of the bounds. Yield nothing if there are more than `_MOST_PARTS`
    different pairs.
    """
    # `np.unique` along an axis compares rows as structures, which is many times slower than two
    # sorts of integers.
    order = np.lexsort((below, least))
    least = least[order]
    below = below[order]
    changes = np.flatnonzero((least[1:] != least[:-1]) | (below[1:] != below[:-1])) + 1
    if len(changes) >= _MOST_PARTS:
        return
    starts = [0, *changes.tolist()]
    for start, positions in zip(starts, np.split(order, changes), strict=True):
        yield int(least[start]), int(below[start]), positions


@dataclass(frozen=True, slots=True)
class _Path:
    """A value of the graph that contains elements of an input, possibly in other positions and plus
    constants.
    """

    name: str
    places: Numbers | None
    """For each position of the value, the index of the input's element there, or -1 if there is
    none. None if positions are not tracked; bounds then apply to all elements of the input.
    """
    shift: Numbers
    """Sum of the constants that were added to the elements, as one number or one per position."""
    exact: bool
    """True if the value contains the elements plus `shift`, without other changes."""
    summed: bool = False
    """True if the value contains sums of elements, such as sequence lengths computed from a mask.
    """


def _input_bounds(graph: Graph, value: Value) -> tuple[_Bounds, _Bounds, int | None]:
    """Return (bounds for generated data, bounds for given data, ignored label or None) of the
    integers of an input.

    The bounds are inferred by following the elements of the input through the graph to each
    operator that uses them as an index, label, length or divisor. At most `_MOST_VISITS` values are
    searched.
    """
    places = (
        np.arange(value.elements).reshape(value.shape) if value.elements <= _MOST_ELEMENTS else None
    )
    drawn, taken = (_Bounds(1 if places is None else value.elements) for _ in range(2))
    ignored = None
    waiting = [_Path(value.name, places, np.zeros((), np.int64), exact=True)]
    visits = 0
    while waiting and visits < _MOST_VISITS:
        path = waiting.pop()
        visits = visits + 1
        readers = (graph.nodes[index] for index in graph.consumers().get(path.name, ()))
        uses = (
            (each, slot)
            for each in readers
            for slot, name in enumerate(each.inputs)
            if name == path.name
        )
        for node, slot in uses:
            signature = signature_of(graph, node)
            row = operator_of(node)
            limits = None if row is None else row.index_range(signature, slot)
            if limits is None:
                likely = None if path.summed else _likely_limits(signature, slot)
                if likely is None:
                    waiting += _following_paths(graph, node, slot, path)
                else:
                    drawn.tighten(
                        path.places, *[np.asarray(bound, np.int64) - path.shift for bound in likely]
                    )
                continue
            # Sums of elements that are used as indices are assumed to be sequence lengths minus a
            # constant. Each element is generated as 1, because a length of 0 would imply an index
            # before the first element.
            if path.summed:
                drawn.tighten(None, np.ones(1, np.int64), np.full(1, _MASK_LIMIT))
                continue
            bounds = [np.asarray(bound, np.int64) - path.shift for bound in limits]
            drawn.tighten(path.places, *bounds)
            # OneHot accepts any index: it writes no 1 for an index that is out of range.
            if path.exact and node.op != "OneHot":
                taken.tighten(path.places, *bounds)
            if is_label_loss(node) and node.has("ignore_index") and not path.shift.any():
                ignored = node.integer("ignore_index")
    without_end = (drawn.below == _UNBOUNDED) & (drawn.least > -_UNBOUNDED)
    drawn.below[without_end] = np.maximum(drawn.least[without_end] + 1, _MASK_LIMIT)
    return drawn, taken, ignored


def _likely_limits(signature: Signature, slot: int) -> tuple[int, int] | None:
    """Return the likely range (inclusive lower bound, exclusive upper bound) of the operand with
    index `slot` of a node, or None if its use implies no range. Data are generated in this range,
    but data outside of it are not rejected.

    An operand that Equal compares with consecutive integers is assumed to be a class. An operand
    that another comparison, such as Less, compares with consecutive integers is assumed to be a
    length. Lengths and divisors are at least 1.
    """
    node = signature.node
    if node.domain:
        return None
    if node.op in _COMPARISONS:
        ends = _ends_of_consecutive(signature.constant(1 - slot))
        if ends is None:
            return None
        first, last = ends
        return (first, last + 1) if node.op == "Equal" else (1, last - first + 2)
    if node.op in _RECURRENCES and slot == _SEQUENCE_LENGTHS:
        time = signature.operand(0).shape[1 if node.integer("layout", 0) else 0]
        return 1, time + 1
    if node.op == "ReverseSequence" and slot == 1:
        return 1, signature.operand(0).shape[node.integer("time_axis", 0)] + 1
    if node.op == "Div" and slot == 1:
        return 1, _UNBOUNDED
    return None


def _ends_of_consecutive(array: np.ndarray | None) -> tuple[int, int] | None:
    """Return the first and the last integer in `array` if its distinct values are at least three
    consecutive integers that start at 0 or 1. Return None for other arrays, and if `array` is None.
    """
    if array is None or not 0 < array.size <= _MOST_ELEMENTS or array.dtype == np.bool_:
        return None
    found = np.unique(array)
    first = found[0]
    if len(found) < _FEWEST_CONSECUTIVE or first not in (0, 1):
        return None
    if not np.array_equal(found, np.arange(len(found)) + first):
        return None
    return int(first), int(found[-1])


def _following_paths(graph: Graph, node: Node, slot: int, path: _Path) -> Iterator[_Path]:
    """Yield a path for each result of the node that contains the elements of the operand with index
    `slot`, whose path is `path`. A path is a value of the graph that contains elements of an input.
    Yield nothing if the node computes other values from these elements.
    """
    if node.op in ("Add", "Sub"):
        yield from _shifted_paths(graph, node, slot, path)
    if path.summed or node.op == "ReduceSum":
        if (
            slot == 0
            and node.op in {"ReduceSum", *_KEEPING}
            and graph.type_of(node.outputs[0]).dtype.is_integer
        ):
            yield _Path(node.outputs[0], None, path.shift, exact=False, summed=True)
        return
    move = _element_move(node)
    if move is None:
        return
    signature = signature_of(graph, node)
    exact = path.exact and node.op not in _CHANGING
    for result, value in enumerate(signature.results):
        if value is None or not (value.dtype.is_integer or value.dtype.is_floating):
            continue
        if path.places is None:
            if not path.shift.ndim:
                yield _Path(value.name, None, path.shift, exact and node.op in _KEEPING)
            continue
        places = move(signature, slot, result, path.places)
        shift = move(signature, slot, result, np.broadcast_to(path.shift, path.places.shape))
        if places is not None and shift is not None:
            shift = np.where(places < 0, 0, shift)
            yield _Path(value.name, places, shift if shift.any() else np.zeros((), np.int64), exact)


def _shifted_paths(graph: Graph, node: Node, slot: int, path: _Path) -> Iterator[_Path]:
    """Yield the path of the result of an Add or Sub of the operand with index `slot`, whose path is
    `path`, and an integer constant. A path is a value of the graph that contains elements of an
    input. Yield nothing if the other operand is no integer constant, or if the elements are
    subtracted from it.
    """
    constant = graph.constant(node.inputs[1 - slot])
    negated = node.op == "Sub" and slot == 1
    if (
        constant is None
        or negated
        or not constant.array.size
        or not constant.value.dtype.is_integer
    ):
        return
    result = graph.type_of(node.outputs[0])
    if path.summed:
        yield replace(path, name=result.name)
        return
    shift = path.shift + constant.array.astype(np.int64) * (1 if node.op == "Add" else -1)
    if path.places is not None:
        places = np.broadcast_to(path.places, result.shape)
        yield _Path(result.name, places, np.broadcast_to(shift, result.shape), path.exact)
    elif constant.array.size == 1:
        yield _Path(result.name, None, shift, path.exact)
