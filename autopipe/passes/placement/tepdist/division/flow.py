"""A model as stage division sees it: operators with their work, and values with their bytes and their readers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.placement import recomputed_nodes
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.chain import linear_order
from autopipe.passes.analysis.gradients import differentiable_values
from autopipe.passes.analysis.operators import element_bytes, uses_of
from autopipe.passes.cost.roofline import mean_seconds

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
"""One entry an operator, or a list of operators, which are counted in a topological order."""

Bits = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """Operators 0, 1, … in a topological order, and the values that go from one to others.

    `work[v]` is what operator v takes, in any unit. Value a is made by operator `source[a]`, has `size[a]` bytes and is
    read by `readers[starts[a] : starts[a + 1]]`: later operators, each once, ascending.
    """

    work: Floats
    source: Places
    size: Floats
    starts: Places
    readers: Places

    @property
    def operators(self) -> int:
        """Number of operators."""
        return len(self.work)

    def edges(self) -> tuple[Places, Places, Places]:
        """Of each reader of each value: the value, its producer, the reader."""
        value = np.repeat(np.arange(len(self.source)), np.diff(self.starts))
        return value, self.source[value], self.readers

    def crossing(self, stage: Places) -> float:
        """Bytes that travel between stages: each value once to every other stage that reads it."""
        value, source, reader = self.edges()
        away = stage[source] != stage[reader]
        pairs = np.unique(np.stack((value[away], stage[reader[away]])), axis=1)
        return float(self.size[pairs[0]].sum())

    def loads(self, stage: Places, stages: int) -> Floats:
        """The work of each stage."""
        return np.bincount(stage, self.work, minlength=stages).astype(float)

    def reordered(self, order: Places) -> Flow:
        """The same, with the operators in another topological order."""
        place = np.empty(self.operators, dtype=np.int64)
        place[order] = np.arange(self.operators)
        value, _, readers = self.edges()
        read = np.lexsort((place[readers], value))
        return Flow(self.work[order], place[self.source], self.size, self.starts, place[readers][read])


def make_flow(work: Floats, values: list[tuple[int, float, list[int]]]) -> Flow:
    """The flow of values given as producer, bytes and readers; those that nobody else reads are left out.

    Values of one producer for the same readers are one.
    """
    sizes: dict[tuple[int, tuple[int, ...]], float] = {}
    for source, size, readers in values:
        others = tuple(sorted({reader for reader in readers if reader != source}))
        if others and size > 0:
            sizes[source, others] = sizes.get((source, others), 0.0) + size
    kept = sorted(sizes)
    return Flow(
        work,
        np.array([source for source, _ in kept], dtype=np.int64),
        np.array([sizes[each] for each in kept], dtype=float),
        np.concatenate(([0], np.cumsum([len(readers) for _, readers in kept]))).astype(np.int64),
        np.array([reader for _, readers in kept for reader in readers], dtype=np.int64),
    )


def ancestors(flow: Flow) -> Bits:
    """At [v, u // 8], as bit u % 8 from the left, whether operator v depends on operator u, or is it."""
    found = np.zeros((flow.operators, -(-flow.operators // 8)), dtype=np.uint8)
    each = np.arange(flow.operators)
    found[each, each >> 3] = 0x80 >> (each & 7)
    _, sources, readers = flow.edges()
    order = np.argsort(readers, kind="stable")
    for source, reader in zip(sources[order].tolist(), readers[order].tolist(), strict=True):
        found[reader] |= found[source]
    return found


def flow_of(problem: Problem) -> tuple[Flow, Places]:
    """The flow of a problem's operators, and the node that each of them is.

    Work is in seconds of a micro-batch's forward and backward, on average over kinds of devices: FLOPs alone would
    count a stage of lookups and normalisations as idle. A value's bytes are those of its message, at the problem's
    precision, and of the gradient that comes back where it has one. Nodes that every stage computes for itself are left
    out.
    """
    graph, shared = problem.graph, recomputed_nodes(problem.graph)
    order = np.array([node for node in linear_order(graph) if node not in shared], dtype=np.int64)
    place = {int(node): index for index, node in enumerate(order)}
    forward, backward = mean_seconds(problem)
    turns = 2.0 if problem.recompute == "full" and problem.train else 1.0
    seconds = turns * forward + (backward if problem.train else 0.0)
    widths = element_bytes(graph, uses_of(graph), problem.precision)
    returned = differentiable_values(graph) if problem.train else frozenset()
    values = []
    for name, readers in graph.consumers().items():
        producer = graph.producer(name)
        if producer is None or producer in shared:
            continue
        size = widths[name] * graph.type_of(name).elements * (2.0 if name in returned else 1.0)
        values.append((place[producer], size, [place[reader] for reader in readers if reader not in shared]))
    return make_flow(seconds[order], values), order
