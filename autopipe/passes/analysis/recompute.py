"""Where a stage that recomputes is cut into segments, each of which runs its forward again by
itself.

A stage keeps what passes between segments, and one segment's activations at a time: for n equal
operators about the square root of n times what one keeps (Chen et al., "Training Deep Nets with
Sublinear Memory Cost", 2016, section 4.1).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from autopipe.ir.graph import Graph
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.ops import operator_of
from autopipe.ir.placement import recomputed_nodes
from autopipe.ir.program import Collective, Compute, Segment, StageCode
from autopipe.passes.analysis.gradients import differentiable_values, viewed

_FINER = 2**0.5
"""Limits of a segment's bytes that are tried: each is smaller by this factor than the one before.
"""
_LIMITS = 16
_APART = 2**10
"""How many times as much as it has bytes it costs to cut a product from its bias."""


@dataclass(frozen=True, slots=True)
class Segments:
    """A stage's nodes in order, cut, and the values that pass from one segment to a later one."""

    nodes: tuple[tuple[int, ...], ...]
    passing: frozenset[str]
    """Value that a view shows, in place of the view."""


@remembered(GRAPHS)
def cutter(graph: Graph) -> Callable[[tuple[int, ...], int], Segments]:
    """A function to the segments of a stage, from its nodes in the order in which they run, and the
    number of micro-batches that are taken to be held at a time (`Placement.length`): what passes
    between segments is there for each of them, what one segment keeps is there once.
    """

    @functools.cache
    def cut(nodes: tuple[int, ...], held: int) -> Segments:
        spans = _spans(graph, nodes)
        cuts = best_cuts(
            [_kept(graph, node) for node in nodes], _crossing(graph, nodes, spans), held
        )
        passing = (
            name
            for name, (first, last) in spans.items()
            if any(first < cut <= last for cut in cuts)
        )
        ends = pairwise((0, *cuts, len(nodes)))
        return Segments(tuple(nodes[begin:end] for begin, end in ends), frozenset(passing))

    return cut


def best_cuts(kept: Sequence[int], crossing: Sequence[int], held: int) -> tuple[int, ...]:
    """Places to cut a row of nodes that keep `kept` bytes each, ascending; `crossing` is by the
    node behind a cut. The sum of the bytes that cross, times `held`, and those that the largest
    segment keeps is the least there is for the limits of a segment that are tried.
    """
    total = sum(kept)
    sums = (0, *accumulate(kept))
    best: tuple[int, ...] = ()
    least = limit = float(total)
    for _ in range(_LIMITS):
        limit /= _FINER
        cuts = _cheapest_cuts(sums, crossing, limit)
        largest = max(sums[end] - sums[begin] for begin, end in pairwise((0, *cuts, len(kept))))
        cost = held * sum(crossing[cut] for cut in cuts) + largest
        if cost < least:
            best = cuts
            least = cost
    return best


def _cheapest_cuts(sums: Sequence[int], crossing: Sequence[int], limit: float) -> tuple[int, ...]:
    """The cuts that least crosses, of those that leave no segment of several nodes with more than
    `limit` bytes.
    """
    count = len(sums) - 1
    cost = [0.0] * (count + 1)
    before = [0] * (count + 1)
    window: deque[int] = deque()
    """Where the last segment may begin, from left to right no cheaper."""
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


def _spans(graph: Graph, nodes: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """Positions of the node that writes a value and of the last that reads it, or a view of it.
    Views are left out, but for those of parameters: what passes has a gradient of its own, as large
    as a table.
    """

    def root_of(name: str) -> str:
        root = viewed(graph, name)
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


def _crossing(graph: Graph, nodes: tuple[int, ...], spans: dict[str, tuple[int, int]]) -> list[int]:
    """Bytes that pass a cut before each node; masks and tables, which most segments read, do not
    say where to cut.
    """
    shared = recomputed_nodes(graph)
    consumers = graph.consumers()
    steps = [0] * (len(nodes) + 1)
    for name, (first, last) in spans.items():
        if nodes[first] not in shared:
            written = graph.producer(name)
            readers = [graph.nodes[reader].op for reader in consumers.get(name, ())]
            # A product that nothing but an addition reads: torch computes both in one.
            is_apart = (
                readers == ["Add"] and written is not None and graph.nodes[written].op == "MatMul"
            )
            size = graph.type_of(name).bytes * (_APART if is_apart else 1)
            steps[first + 1] += size
            steps[last + 1] -= size
    return list(accumulate(steps[:-1]))


def _kept(graph: Graph, index: int) -> int:
    """About what backward keeps of a node: what it writes, where gradients flow through it."""
    node = graph.nodes[index]
    flowing = differentiable_values(graph)
    row = operator_of(node)
    if row is None or row.kind == "view":
        return 0
    return sum(graph.type_of(name).bytes for name in node.outputs if name in flowing)


def flowing_values(code: StageCode, differentiable: frozenset[str]) -> set[str]:
    """The stage's values, by their local names, that a gradient comes back to: autograd runs no
    other backward. They depend on something that wants a gradient, and something that the stage
    gives depends on them.
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
    """A stage of a program that trains, in segments if it recomputes, with `held` micro-batches in
    flight. `graph` is that of its own micro-batches, and gradients flow through the values that are
    `differentiable`.
    """
    if not code.recompute:
        return code
    flowing = flowing_values(code, differentiable)
    nodes = tuple(each.node for each in code.operations if isinstance(each, Compute))
    cut = replace(
        code, segments=tuple(Segment(own, frozenset()) for own in cutter(graph)(nodes, held).nodes)
    )
    written = (frozenset(name for each in own for name in each.writes) for own in cut.by_segment())
    segments = zip(cut.segments, written, strict=True)
    return replace(
        cut, segments=tuple(replace(each, flowing=names & flowing) for each, names in segments)
    )


def running_again(code: StageCode) -> frozenset[int]:
    """The segments that run again for their backward: gradients come back to something that they
    give.
    """
    found: set[int] = set()
    wanted = {value.name for value in code.outputs}
    for number, operations in reversed(list(enumerate(code.by_segment()))):
        if code.segments and not wanted.isdisjoint(code.segments[number].flowing):
            found.add(number)
        wanted |= {name for each in operations for name in each.reads}
    return frozenset(found)
