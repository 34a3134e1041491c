"""Which numbers an input may hold, read off the places it goes: rows of tables, classes, one or nought."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopipe.ir.graph import Graph, Node, Value
from autopipe.ir.ops.movement import slices
from autopipe.ir.ops.operator import Signature, positive, signature_of
from autopipe.ir.program import InputBounds, InputRange

_MASK_LIMIT = 2
"""A whole number that indexes nothing is a mask: 0 or 1."""
_MOST_ELEMENTS = 1 << 22
"""Elements of an input beyond which its parts are not told apart."""
_MOST_VISITS = 1000
"""Values that an input is followed to."""
_MOST_PARTS = 1 << 10
"""Parts of an input with bounds of their own; a recommender has a few dozen."""
_UNBOUNDED = 1 << 62
_CHANGING = frozenset(["Abs", "Clip", "Max", "Min", "Mod", "Where"])
"""Operators behind which numbers are others than those given, but no larger for small ones: good for drawing numbers,
not for refusing any."""

Numbers = npt.NDArray[np.int64]


def input_ranges(graph: Graph) -> tuple[InputRange, ...]:
    """One entry a graph input: indices stay below the rows of the table they index, labels below the classes."""
    consumers = graph.consumers()
    batch_axes = dict(graph.batch_axes)
    found = []
    for value in graph.inputs:
        axis = batch_axes.get(value.name)
        if value.dtype.is_floating and not _becomes_whole(graph, value, consumers):
            found.append(InputRange(value, axis, None))
            continue
        uses = _Uses(graph, consumers, value)
        uses.follow()
        below = None if value.dtype.is_floating else uses.drawn.least_limit(_MASK_LIMIT)
        drawn = uses.drawn.parts(value, axis, widest=False)
        if len(drawn) == 1 and _is_plain(drawn[0], value, below):
            drawn = ()
        found.append(InputRange(value, axis, below, drawn, uses.taken.parts(value, axis, widest=True), uses.ignored))
    return tuple(found)


def _is_plain(part: InputBounds, value: Value, below: int | None) -> bool:
    """Whether bounds say no more than `below` does."""
    whole = part.starts == (0,) * len(value.shape) and part.stops == value.shape
    return whole and part.least <= 0 and part.below == below


def _becomes_whole(graph: Graph, value: Value, consumers: dict[str, tuple[int, ...]]) -> bool:
    """Whether a floating-point input is cast to whole numbers somewhere: exporters of tables write indices so."""
    waiting, seen = [value.name], {value.name}
    while waiting and len(seen) < _MOST_VISITS:
        for index in consumers.get(waiting.pop(), ()):
            node = graph.nodes[index]
            if node.op not in _MOVES:
                continue
            for name in node.outputs:
                if name and graph.type_of(name).dtype.is_integer:
                    return True
                if name and name not in seen:
                    seen.add(name)
                    waiting.append(name)
    return False


@dataclass(slots=True)
class _Bounds:
    """The tightest bounds so far, of each element of an input or of all alike."""

    least: Numbers
    below: Numbers

    @classmethod
    def of(cls, elements: int) -> _Bounds:
        """No bounds."""
        return cls(np.full(elements, -_UNBOUNDED), np.full(elements, _UNBOUNDED))

    def tighten(self, places: Numbers | None, least: Numbers, below: Numbers) -> None:
        """Bound the elements at `places`, all where None, all with bounds of their own."""
        if places is None:
            np.maximum(self.least, least.max(initial=-_UNBOUNDED), out=self.least)
            np.minimum(self.below, below.min(initial=_UNBOUNDED), out=self.below)
            return
        real = places >= 0
        np.maximum.at(self.least, places[real], np.broadcast_to(least, places.shape)[real])
        np.minimum.at(self.below, places[real], np.broadcast_to(below, places.shape)[real])

    def least_limit(self, default: int) -> int:
        """The least upper bound of any element; there is always one number left to draw."""
        least = int(self.below.min(initial=_UNBOUNDED))
        return default if least == _UNBOUNDED else max(least, 1)

    def parts(self, value: Value, batch_axis: int | None, widest: bool) -> tuple[InputBounds, ...]:
        """The bounded parts of an input, each a block and alike for all samples: by its tightest sample, or its widest.

        Elements with the same bounds that make up no block are left out.
        """
        if not self.below.size:
            return ()
        shape = value.shape if self.below.size == value.elements else (1,) * len(value.shape)
        least, below = self.least.reshape(shape), self.below.reshape(shape)
        if batch_axis is not None:
            low, high = (np.min, np.max) if widest else (np.max, np.min)
            least, below = low(least, batch_axis, keepdims=True), high(below, batch_axis, keepdims=True)
        pairs = np.unique(np.stack([least.reshape(-1), below.reshape(-1)]), axis=1).T
        found = []
        for first, stop in pairs.tolist() if len(pairs) <= _MOST_PARTS else ():
            if stop == _UNBOUNDED and first == -_UNBOUNDED:
                continue
            there = np.argwhere((least == first) & (below == stop))
            starts, stops = there.min(axis=0, initial=_UNBOUNDED), there.max(axis=0, initial=-1) + 1
            if np.prod(stops - starts) != len(there) or stop <= first:
                continue
            stops = np.where(np.asarray(least.shape) == 1, value.shape, stops)
            found.append(InputBounds(first, stop, tuple(starts.tolist()), tuple(stops.tolist())))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class _Path:
    """Where an input has come to: a value that holds its elements, moved and shifted."""

    name: str
    places: Numbers | None
    """For each element of the value the input's that it holds, -1 where it is none; None where all are in it."""
    shift: Numbers
    """What has been added to them."""
    exact: bool
    """Whether they are the input's own numbers, but for the shift."""


@dataclass(slots=True)
class _Uses:
    """What the uses of one input ask of its numbers."""

    graph: Graph
    consumers: dict[str, tuple[int, ...]]
    value: Value
    drawn: _Bounds = field(init=False)
    """What numbers that are drawn keep to."""
    taken: _Bounds = field(init=False)
    """What numbers that are given have to keep to."""
    ignored: int | None = None
    """The label that counts for nothing."""

    def __post_init__(self) -> None:
        told_apart = self.value.elements <= _MOST_ELEMENTS
        size = self.value.elements if told_apart else 1
        self.drawn, self.taken = _Bounds.of(size), _Bounds.of(size)

    def follow(self) -> None:
        """Take down every use that the input's numbers come to."""
        told_apart = self.value.elements <= _MOST_ELEMENTS
        places = np.arange(self.value.elements).reshape(self.value.shape) if told_apart else None
        waiting = [_Path(self.value.name, places, np.zeros((), np.int64), exact=True)]
        visits = itertools.count()
        while waiting and next(visits) < _MOST_VISITS:
            path = waiting.pop()
            for index in self.consumers.get(path.name, ()):
                node = self.graph.nodes[index]
                for slot in (slot for slot, name in enumerate(node.inputs) if name == path.name):
                    if not self._bound(node, slot, path):
                        waiting += _further(self.graph, node, slot, path)

    def _bound(self, node: Node, slot: int, path: _Path) -> bool:
        """Take down what a node's operand asks, if it is an index or a label."""
        signature = signature_of(self.graph, node)
        limits = _LIMITS.get(node.op)
        found = None if limits is None else limits(signature, slot)
        if found is None:
            return False
        least, below = (np.asarray(bound, np.int64) - path.shift for bound in found)
        self.drawn.tighten(path.places, least, below)
        if path.exact and node.op != "OneHot":  # whose rows of other numbers are empty
            self.taken.tighten(path.places, least, below)
        if node.op in _LOSSES and node.has("ignore_index") and not path.shift.any():
            self.ignored = node.integer("ignore_index")
        return True


def _further(graph: Graph, node: Node, slot: int, path: _Path) -> list[_Path]:
    """The values that hold the same numbers behind a node, unless they become something else there."""
    if node.op in ("Add", "Sub"):
        return _shifted(graph, node, slot, path)
    move = _MOVES.get(node.op)
    if move is None or node.domain:
        return []
    signature = signature_of(graph, node)
    exact = path.exact and node.op not in _CHANGING
    found = []
    for result, value in enumerate(signature.results):
        if value is None or not (value.dtype.is_integer or value.dtype.is_floating):
            continue
        if path.places is None:
            if not path.shift.ndim:
                found.append(_Path(value.name, None, path.shift, exact and node.op in _KEEPING))
            continue
        places = move(signature, slot, result, path.places)
        shift = move(signature, slot, result, np.broadcast_to(path.shift, path.places.shape))
        if places is not None and shift is not None:
            found.append(_Path(value.name, places, shift if shift.any() else np.zeros((), np.int64), exact))
    return found


def _shifted(graph: Graph, node: Node, slot: int, path: _Path) -> list[_Path]:
    """The sum of a path and known numbers, or their difference."""
    constant = graph.constant(node.inputs[1 - slot])
    negated = node.op == "Sub" and slot == 1
    if constant is None or negated or not constant.array.size or not constant.value.dtype.is_integer:
        return []
    result = graph.type_of(node.outputs[0])
    more = constant.array.astype(np.int64) * (1 if node.op == "Add" else -1)
    if path.places is None:
        return [_Path(result.name, None, path.shift + more, path.exact)] if more.size == 1 else []
    places = np.broadcast_to(path.places, result.shape)
    return [_Path(result.name, places, np.broadcast_to(path.shift + more, result.shape), path.exact)]


def _reshaped(signature: Signature, slot: int, result: int, moved: Numbers) -> Numbers | None:
    return moved.reshape(signature.result(result).shape) if slot == 0 else None


def _transposed(signature: Signature, slot: int, result: int, moved: Numbers) -> Numbers | None:
    return moved.transpose(signature.node.integers("perm", tuple(reversed(range(moved.ndim)))))


def _broadcast(signature: Signature, slot: int, result: int, moved: Numbers) -> Numbers | None:
    if signature.node.op in ("Expand", "Clip", "Mod") and slot:
        return None
    if signature.node.op == "Where" and not slot:
        return None
    return np.broadcast_to(moved, signature.result(result).shape)


def _tiled(signature: Signature, slot: int, result: int, moved: Numbers) -> Numbers | None:
    shape = signature.result(result).shape
    return None if slot else np.tile(moved, [whole // part for whole, part in zip(shape, moved.shape, strict=True)])


def _sliced(signature: Signature, slot: int, result: int, moved: Numbers) -> Numbers | None:
    if slot:
        return None
    for axis, (first, count, step) in enumerate(slices(signature)):
        moved = np.take(moved, first + step * np.arange(count), axis)
    return moved


def _part(signature: Signature, slot: int, result: int, moved: Numbers) -> Numbers | None:
    """A result of Split, which follow one another."""
    axis = positive(signature.node.integer("axis"), moved.ndim)
    start = sum(each.shape[axis] for each in signature.results[:result] if each is not None)
    return np.take(moved, np.arange(start, start + signature.result(result).shape[axis]), axis) if not slot else None


def _put_together(signature: Signature, slot: int, result: int, moved: Numbers) -> Numbers | None:
    axis = positive(signature.node.integer("axis"), moved.ndim)
    whole = np.full(signature.result(result).shape, -1)
    start = sum(signature.operand(before).shape[axis] for before in range(slot))
    whole[(slice(None),) * axis + (slice(start, start + moved.shape[axis]),)] = moved
    return whole


def _picked(signature: Signature, slot: int, result: int, moved: Numbers) -> Numbers | None:
    """What known places of a Gather pick from the numbers: exporters write `x[:, 3]` so."""
    indices = signature.constant(1)
    axis = positive(signature.node.integer("axis"), max(moved.ndim, 1))
    return None if slot or indices is None else np.take(moved, indices, axis)


_Move = Callable[[Signature, int, int, Numbers], "Numbers | None"]
"""What a result holds of what an operand holds, element for element; None where it holds something else."""

_KEEPING = frozenset(["Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze"])
"""Operators whose result holds all elements of its operand."""

_MOVES: dict[str, _Move] = {
    **dict.fromkeys(("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Abs"), _reshaped),
    **dict.fromkeys(("Expand", "Clip", "Max", "Min", "Mod", "Where"), _broadcast),
    "Concat": _put_together,
    "Gather": _picked,
    "Slice": _sliced,
    "Split": _part,
    "Tile": _tiled,
    "Transpose": _transposed,
}

_Range = tuple[int | Numbers, int | Numbers]


def _rows(signature: Signature, slot: int) -> _Range | None:
    """Places along the axis of a table; they may count from its end, but not those of an embedding."""
    if slot != 1 or not signature.operand(0).shape:
        return None
    table = signature.operand(0)
    axis = positive(signature.node.integer("axis"), len(table.shape))
    embeds = signature.node.op == "Gather" and axis == 0 and len(table.shape) == 2 and table.dtype.is_floating
    return (0 if embeds else -table.shape[axis]), table.shape[axis]


def _tuples(signature: Signature, slot: int) -> _Range | None:
    if slot != 1:
        return None
    first = signature.node.integer("batch_dims")
    shape = signature.operand(1).shape
    extents = np.asarray(signature.operand(0).shape[first : first + shape[-1]], np.int64)
    return np.broadcast_to(-extents, shape), np.broadcast_to(extents, shape)


def _classes(signature: Signature, slot: int) -> _Range | None:
    return (0, signature.operand(0).shape[1]) if slot == 1 else None


def _depth(signature: Signature, slot: int) -> _Range | None:
    depth = signature.constant(1)
    return None if slot or depth is None else (0, int(depth.reshape(-1)[0]))


def _positions(signature: Signature, slot: int) -> _Range | None:
    """Places in the tables of sines and cosines, where those are tables."""
    contrib = bool(signature.node.domain)
    place, table = (1, 2) if contrib else (3, 1)
    if slot != place:
        return None
    starts = contrib and signature.operand(1).elements == 1  # From the one position the others count on.
    shape = signature.operand(0).shape
    return 0, signature.operand(table).shape[0] - (shape[len(shape) - 2] - 1 if starts else 0)


_LIMITS: dict[str, Callable[[Signature, int], _Range | None]] = {
    **dict.fromkeys(("Gather", "GatherElements", "Scatter", "ScatterElements"), _rows),
    **dict.fromkeys(("GatherND", "ScatterND"), _tuples),
    **dict.fromkeys(("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"), _classes),
    "OneHot": _depth,
    "RotaryEmbedding": _positions,
}
_LOSSES = frozenset(["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
