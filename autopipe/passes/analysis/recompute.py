"""Division of a stage that recomputes activations into segments. A segment is a range of
consecutive nodes; its backward first runs its forward again.

A stage saves only the values that pass from one segment to another, for each micro-batch in flight
(its forward has run, its backward has not). It recomputes the activations of one segment at a time.
Objective: choose the boundaries that minimise

    held * (bytes that cross boundaries) + (maximum over segments of the bytes saved in a segment)

with `held` micro-batches in flight. For n equal operators and held = 1 this gives about sqrt(n)
segments (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, section 4.1).

Method: for each of 16 decreasing limits L on the bytes of a segment, a dynamic program finds the
boundaries with the fewest crossing bytes:

    cost[e] = min over b < e with S(b, e) <= L or b = e - 1 of cost[b] + crossing[e]

where S(b, e) are the bytes that nodes b to e - 1 save, crossing[e] are the bytes that cross a
boundary before node e, and cost[0] = 0. A monotone queue makes this O(n) per limit. The result is
the best over all limits, or no boundaries if none of the results is better.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from autopipe.ir.graph import Graph
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
from autopipe.ir.ops import operator_of
from autopipe.ir.placement import recomputed_nodes
from autopipe.ir.program import Collective, Compute, Segment, StageCode
from autopipe.passes.analysis.gradients import differentiable_values, view_base

_LIMIT_RATIO = 2**0.5
"""Ratio of each limit on the bytes of a segment to the next, smaller limit. A segment is a range of
nodes whose activations are recomputed together.
"""
_LIMITS = 16
"""Number of limits on the bytes of a segment that are tried. A segment is a range of nodes whose
activations are recomputed together.
"""
_BIAS_PENALTY = 2**10
"""Factor on the bytes that cross a boundary between segments, if it lies between a matmul and the
addition of its bias. The factor keeps the two nodes in one segment, because torch computes them in
one call.
"""


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of a stage that recomputes activations. A segment is a range of consecutive
    nodes whose activations are recomputed together. `nodes` contains the indices of the nodes of
    each segment.
    """

    nodes: tuple[tuple[int, ...], ...]
    passing: frozenset[str]
    """Names of the values that a segment computes and a later segment reads. A view is represented
    by the value whose memory it shares.
    """


@memoize(MAX_CACHED_GRAPHS)
def make_segmenter(graph: Graph) -> Callable[[tuple[int, ...], int], Segments]:
    """Return a function that divides a stage that recomputes activations into segments (ranges of
    consecutive nodes). Its arguments are the indices of the stage's nodes in execution order and
    the number of micro-batches in flight, for which callers pass `Placement.length`, the number of
    stages of a pipeline. The function caches its results.
    """

    @functools.cache
    def cut(nodes: tuple[int, ...], held: int) -> Segments:
        """Return the segments of the stage with the nodes `nodes`. `held` is the number of
        micro-batches in flight.
        """
        spans = _value_spans(graph, nodes)
        cuts = segment_boundaries(
            [_saved_bytes(graph, node) for node in nodes],
            _crossing_bytes(graph, nodes, spans),
            held,
        )
        passing = (
            name
            for name, (first, last) in spans.items()
            if any(first < cut <= last for cut in cuts)
        )
        ends = pairwise((0, *cuts, len(nodes)))
        return Segments(tuple(nodes[begin:end] for begin, end in ends), frozenset(passing))

    return cut


def segment_boundaries(kept: Sequence[int], crossing: Sequence[int], held: int) -> tuple[int, ...]:
    """Return the boundaries between the segments (ranges whose activations are recomputed together)
    of a sequence of nodes, as ascending positions of the first node of each segment except the
    first.

    kept: bytes that each node saves.
    crossing: for each node, the bytes that cross a boundary before it.
    held: number of micro-batches in flight.

    Several limits on the bytes of a segment are tried. Of the resulting boundaries, these minimise
    held * (bytes that cross boundaries) + (maximum over segments of the bytes saved in a segment).
    """
    total = sum(kept)
    sums = (0, *accumulate(kept))
    best: tuple[int, ...] = ()
    least = limit = float(total)
    for _ in range(_LIMITS):
        limit /= _LIMIT_RATIO
        cuts = _cheapest_boundaries(sums, crossing, limit)
        largest = max(sums[end] - sums[begin] for begin, end in pairwise((0, *cuts, len(kept))))
        cost = held * sum(crossing[cut] for cut in cuts) + largest
        if cost < least:
            best = cuts
            least = cost
    return best


def _cheapest_boundaries(
    sums: Sequence[int], crossing: Sequence[int], limit: float
) -> tuple[int, ...]:
    """Return the positions of the segment boundaries with the fewest crossing bytes, such that each
    segment (range of nodes) saves at most `limit` bytes or has only one node. `sums` are the prefix
    sums of the saved bytes, starting with 0.
    """
    count = len(sums) - 1
    cost = [0.0] * (count + 1)
    before = [0] * (count + 1)
    window: deque[int] = deque()
    """Positions at which the last segment may start, in ascending order and with ascending cost."""
    for end in range(1, count + 1):
        while window and cost[window[-1]] > cost[end - 1]:
            window.pop()
        window.append(end - 1)
        while window[0] < end - 1 and sums[end] - sums[window[0]] > limit:
            window.popleft()
        before[end] = window[0]
        cost[end] = cost[window[0]] + (crossing[end] if end < count else 0)
    cuts: list[int] = []
    place = count
    while place := before[place]:
        cuts.append(place)
    return tuple(reversed(cuts))


def _value_spans(graph: Graph, nodes: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """Return, for each value that one of the nodes writes, (position of the node that writes it,
    position of the last node that reads it or a view of it).

    A view of a parameter has an entry: if it crosses a boundary between segments, its gradient is a
    separate tensor as large as the parameter. Other views have no entry, because they share the
    memory of another value.
    """

    def root_of(name: str) -> str:
        """Return the value whose memory `name` shares, or `name` itself for a view of a
        parameter.
        """
        root = view_base(graph, name)
        return name if graph.parameter(root) is not None else root

    found: dict[str, tuple[int, int]] = {}
    for position, index in enumerate(nodes):
        node = graph.nodes[index]
        for root in {root_of(name) for name in node.inputs if name} & found.keys():
            found[root] = found[root][0], position
        found |= {
            name: (position, position) for name in node.outputs if name and root_of(name) == name
        }
    return found


def _crossing_bytes(
    graph: Graph, nodes: tuple[int, ...], spans: dict[str, tuple[int, int]]
) -> list[int]:
    """Return, for each node, the bytes of the values that would cross a segment boundary directly
    before it. `spans` is the result of `_value_spans`.

    Values of `recomputed_nodes`, such as masks, do not count, because most segments read them.
    """
    shared = recomputed_nodes(graph)
    consumers = graph.consumers()
    steps = [0] * (len(nodes) + 1)
    for name, (first, last) in spans.items():
        if nodes[first] not in shared:
            written = graph.producer(name)
            readers = [graph.nodes[reader].op for reader in consumers.get(name, ())]
            # Torch computes a matmul and the addition of its bias in one call. An addition that is
            # the only reader of the matmul's result is assumed to add a bias.
            has_bias = (
                readers == ["Add"] and written is not None and graph.nodes[written].op == "MatMul"
            )
            size = graph.type_of(name).bytes * (_BIAS_PENALTY if has_bias else 1)
            steps[first + 1] += size
            steps[last + 1] -= size
    return list(accumulate(steps[:-1]))


def _saved_bytes(graph: Graph, index: int) -> int:
    """Return an estimate of the bytes that a node saves for backward: the bytes of its results with
    a gradient, 0 for a view.
    """
    node = graph.nodes[index]
    flowing = differentiable_values(graph)
    row = operator_of(node)
    if row is None or row.kind == "view":
        return 0
    return sum(graph.type_of(name).bytes for name in node.outputs if name in flowing)


def values_with_gradient(code: StageCode, differentiable: frozenset[str]) -> set[str]:
    """Return the local names of the stage's values that receive a gradient in backward.

    Such a value depends on an input or parameter with a gradient, and a floating-point output of
    the stage depends on the value, both through differentiable operators. Autograd runs the
    backward of these values only.
    """
    read = (*code.inputs, *(value for _, value in code.parameters))
    wanting = {value.name for value in read if value.name in differentiable}
    rows = (
        (each, isinstance(each, Compute) and operator_of(each.signature.node))
        for each in code.operations
    )
    passing = [
        each for each, row in rows if row is False or (row is not None and row.differentiable)
    ]
    for operation in passing:
        if not wanting.isdisjoint(operation.reads):
            results = (
                (operation.result,)
                if isinstance(operation, Collective)
                else operation.signature.results
            )
            wanting.update(
                value.name for value in results if value is not None and value.dtype.is_floating
            )
    flowing = wanting & {value.name for value in code.outputs}
    for operation in reversed(passing):
        if not flowing.isdisjoint(operation.writes):
            flowing.update(wanting.intersection(operation.reads))
    return flowing


def with_segments(
    graph: Graph, code: StageCode, differentiable: frozenset[str], held: int
) -> StageCode:
    """Return the code of a training stage. If the stage recomputes activations, the code is divided
    into segments: ranges of consecutive nodes, one of which is recomputed at a time.

    graph: the graph for the micro-batch size of the stage.
    differentiable: names of the values that have a gradient.
    held: number of micro-batches in flight.
    """
    if not code.recompute:
        return code
    flowing = values_with_gradient(code, differentiable)
    nodes = tuple(each.node for each in code.operations if isinstance(each, Compute))
    cut = replace(
        code,
        segments=tuple(
            Segment(own, frozenset()) for own in make_segmenter(graph)(nodes, held).nodes
        ),
    )
    written = (frozenset(name for each in own for name in each.writes) for own in cut.by_segment())
    segments = zip(cut.segments, written, strict=True)
    return replace(
        cut, segments=tuple(replace(each, flowing=names & flowing) for each, names in segments)
    )


def recomputed_segments(code: StageCode) -> frozenset[int]:
    """Return the indices of the segments whose forward runs again in backward. These are the
    segments that write a value that receives a gradient, if this value is an output of the stage or
    a later segment reads it.
    """
    found: set[int] = set()
    wanted = {value.name for value in code.outputs}
    for number, operations in reversed(list(enumerate(code.by_segment()))):
        if code.segments and not wanted.isdisjoint(code.segments[number].flowing):
            found.add(number)
        wanted |= {name for each in operations for name in each.reads}
    return frozenset(found)
