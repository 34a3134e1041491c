"""Stages with micro-batches of their own sizes: their graphs, the blocks of values that neighbours share, and whether a
stage may take fewer samples without changing what is computed. Which numbers an input may hold, by where it is used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from autopipe.ir.batch import BatchAxes, Samples, batch_axes_of, rebatched
from autopipe.ir.errors import CodegenError, InfeasibleError
from autopipe.ir.graph import Constant, Graph, Node, Value
from autopipe.ir.layout import Box, whole
from autopipe.ir.ops.movement import slices
from autopipe.ir.ops.operator import Signature, positive, signature_of
from autopipe.ir.placement import Placement, crossing_values
from autopipe.ir.program import InputBounds, InputRange
from autopipe.ir.schedule import EVERY, MicroBatchSlice, micro_batch_ratios
from autopipe.ir.space import AxisKind
from autopipe.passes.frontend.read import mixing_nodes

if TYPE_CHECKING:
    from autopipe.ir.program import StageCode


@dataclass(frozen=True, slots=True)
class Shared:
    """The block of a value that micro-batches of a sender's turn and of a receiver's turn share.

    `sent` and `received` are the same numbers, in coordinates of either's whole value.
    """

    source_turn: MicroBatchSlice
    target_turn: MicroBatchSlice
    sent: Box
    received: Box


def shared_blocks(
    graph: Graph, batch: BatchAxes, name: str, source: tuple[int, tuple[int, ...]], target: tuple[int, tuple[int, ...]]
) -> tuple[Shared, ...]:
    """All that is sent of a value; `source` and `target` are the stages' samples a micro-batch, and the value's shape.

    A value that depends on no sample is sent whole, to each of the receiver's micro-batches once. Raises
    InfeasibleError where `check_shareable` does.
    """
    sent, received = whole(source[1]), whole(target[1])
    if source[0] == target[0]:
        return (Shared(EVERY, EVERY, sent, received),)
    pairs = tuple(_overlaps(source[0], target[0]))
    check_shareable(graph, batch, name, source[0], target[0])
    for place in batch.values.get(name, ()):
        return tuple(block for pair in pairs for block in _blocks(pair, place, source, target))
    first = {pair.target_turn: pair for pair in reversed(pairs)}
    return tuple(Shared(pair.source_turn, turn, sent, received) for turn, pair in reversed(first.items()))


def check_shareable(graph: Graph, batch: BatchAxes, name: str, source: int, target: int) -> None:
    """Raise InfeasibleError for a value between micro-batches of `source` and `target` samples that depends on samples
    but does not keep them apart along one dimension: a mean of some is no mean of others."""
    places = batch.values.get(name, ())
    if source != target and len(places) != 1 and (places or _depends_on_samples(graph, batch, name)):
        raise InfeasibleError(
            f"{name!r} goes from micro-batches of {source} samples to ones of {target}, but its samples cannot be told "
            "apart",
            hint="give the stages that compute and read it equal micro-batches, or make them one stage",
        )


@dataclass(frozen=True, slots=True)
class _Overlap:
    """Samples [start, stop), counted from where a micro-batch of either side begins, that a pair of turns share."""

    source_turn: MicroBatchSlice
    target_turn: MicroBatchSlice
    start: int
    stop: int


def _overlaps(source: int, target: int) -> Iterator[_Overlap]:
    """All pairs of turns that share samples, where micro-batches have `source` and `target` of them."""
    period = math.lcm(source, target)
    sends, receives = period // source, period // target
    for j in range(receives):
        for i in range(sends):
            start, stop = max(i * source, j * target), min((i + 1) * source, (j + 1) * target)
            if start < stop:
                yield _Overlap(MicroBatchSlice(i, sends), MicroBatchSlice(j, receives), start, stop)


def _blocks(
    pair: _Overlap, place: Samples, source: tuple[int, tuple[int, ...]], target: tuple[int, tuple[int, ...]]
) -> Iterator[Shared]:
    """The blocks that hold the shared samples: several where something else is counted outside of them."""
    for outer in range(place.outer):
        boxes = []
        for (size, shape), turn in ((source, pair.source_turn), (target, pair.target_turn)):
            first = (outer - turn.index) * size
            starts, stops = [0] * len(shape), list(shape)
            starts[place.dimension] = (first + pair.start) * place.inner
            stops[place.dimension] = (first + pair.stop) * place.inner
            boxes.append(Box(tuple(starts), tuple(stops)))
        yield Shared(pair.source_turn, pair.target_turn, *boxes)


def _depends_on_samples(graph: Graph, batch: BatchAxes, name: str) -> bool:
    """True if it is computed from anything that carries samples."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        each = waiting.pop()
        if batch.values.get(each):
            return True
        producer = graph.producer(each)
        if producer is not None and each not in seen:
            seen.add(each)
            waiting.extend(name for name in graph.nodes[producer].inputs if name)
    return False


def micro_batch_size(graph: Graph, placement: Placement) -> int:
    """Samples of one evaluation of the graph; the stages' own where no input carries samples."""
    for name, axis in graph.batch_axes:
        return graph.type_of(name).shape[axis]
    return max(stage.micro_batch_size for stage in placement.stages)


def stage_micro_batches(graph: Graph, placement: Placement) -> tuple[int, ...]:
    """Micro-batches of its own that each stage makes of one of the graph's.

    Raises CodegenError where the samples cannot be shared out like that.
    """
    try:
        turns = micro_batch_ratios(placement, micro_batch_size(graph, placement))
    except InfeasibleError as error:
        raise CodegenError(error.message, hint=error.hint) from error
    return turns or (1,) * len(placement.stages)


def stage_graphs(graph: Graph, placement: Placement) -> tuple[Graph, ...]:
    """For each stage the graph of one of its own micro-batches; nodes, values and parameters keep names and places.

    Raises ModelError where the graph's batch cannot shrink.
    """
    sizes = [stage.micro_batch_size for stage in placement.stages]
    whole = micro_batch_size(graph, placement)
    by_size = {size: graph if size == whole else rebatched(graph, size) for size in sizes}
    return tuple(by_size[size] for size in sizes)


def with_numbered_constants(codes: Sequence[StageCode], graphs: Sequence[Graph], graph: Graph) -> tuple[StageCode, ...]:
    """The stages with constants numbered over all graphs: those that `graph` has too keep their places in it."""
    numbers = {id(constant): index for index, constant in enumerate(graph.constants)}

    def number(constant: Constant) -> int:
        return numbers.setdefault(id(constant), len(numbers))

    def numbered(code: StageCode, own: Graph) -> StageCode:
        if own is graph:
            return code
        constants = ((number(own.constants[index]), constant) for index, constant in code.constants)
        return replace(code, constants=tuple(sorted(constants, key=lambda each: each[0])))

    return tuple(numbered(code, own) for code, own in zip(codes, graphs, strict=True))


_APART = (AxisKind.PARALLEL, AxisKind.MEAN, AxisKind.WHOLE)
"""Samples that are kept apart, and equal shares whose means average to the mean of all."""


def check_portions(graph: Graph, placement: Placement) -> None:
    """Raise InfeasibleError where micro-batches of a stage's own would change what is computed.

    Batch statistics and sums over samples depend on how many samples are together, a mean of equal shares does not; and
    what passes between stages of different micro-batches must keep its samples apart.
    """
    turns = stage_micro_batches(graph, placement)
    if set(turns) == {1}:
        return
    batch = batch_axes_of(graph)
    together = {node.name for node in (*mixing_nodes(graph), *_adding_nodes(graph, batch))}
    for index, (stage, times) in enumerate(zip(placement.stages, turns, strict=True)):
        mixed = next((graph.nodes[node] for node in stage.nodes if graph.nodes[node].name in together), None)
        if times > 1 and mixed is not None:
            raise InfeasibleError(
                f"stage {index} would compute something else on micro-batches of {stage.micro_batch_size} samples "
                f"than on the step's of {stage.micro_batch_size * times}: {mixed.op} {mixed.name!r} mixes samples",
                hint="give this stage the largest micro-batches of all, or all stages equal ones",
            )
    sizes = [stage.micro_batch_size for stage in placement.stages]
    for name, source, target in crossing_values(graph, placement):
        check_shareable(graph, batch, name, sizes[source], sizes[target])


def _adding_nodes(graph: Graph, batch: BatchAxes) -> tuple[Node, ...]:
    """The nodes that compute something of all samples together that is no mean."""
    return tuple(
        node
        for node, axes in zip(graph.nodes, batch.nodes, strict=True)
        if any(each.kind not in _APART for each in axes)
    )


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
    """True if bounds say no more than `below` does."""
    whole = part.starts == (0,) * len(value.shape) and part.stops == value.shape
    return whole and part.least <= 0 and part.below == below


def _becomes_whole(graph: Graph, value: Value, consumers: dict[str, tuple[int, ...]]) -> bool:
    """True if a floating-point input is cast to whole numbers somewhere: exporters of tables write indices so."""
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
    """Sum of what was added to them."""
    exact: bool
    """True if they are the input's own numbers, but for the shift."""


@dataclass(slots=True)
class _Uses:
    """Bounds on the numbers of one input, from its uses."""

    graph: Graph
    consumers: dict[str, tuple[int, ...]]
    value: Value
    drawn: _Bounds = field(init=False)
    """Bounds of drawn numbers."""
    taken: _Bounds = field(init=False)
    """Bounds of given numbers."""
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
    """Elements that known indices of a Gather pick: exporters write `x[:, 3]` so."""
    indices = signature.constant(1)
    axis = positive(signature.node.integer("axis"), max(moved.ndim, 1))
    return None if slot or indices is None else np.take(moved, indices, axis)


_Move = Callable[[Signature, int, int, Numbers], "Numbers | None"]
"""Function from an operand's elements to a result's; None where the result holds something else."""

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
