"""Random placements of stages with micro-batches of their own, and orders that suit them, for hypothesis."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st

from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage, crossing_values
from autopipe.ir.rebatch import rebatched
from autopipe.ir.schedule import Schedule
from tests.distributed.drawing import BATCH, Case, assignment, graphs, random_splits
from tests.distributed.halves import halved
from tests.distributed.portions import random_order
from tests.distributed.running import stage_graph


@st.composite
def unequal_placements(draw: st.DrawFn, graph: Graph) -> Placement:
    """Stages on groups of 1, 2 or 4 of at most four devices, several on one or on all, with 1, 2 or 4 samples each.

    Stages that exchange a value without samples, such as a mean, have as many.
    """
    devices = draw(st.sampled_from([1, 2, 2, 4, 4]))
    parts = assignment(draw, graph)
    sizes = [draw(st.sampled_from([1, 2, BATCH])) for _ in parts]
    plain = Placement(tuple(Stage(tuple(nodes), (0,), BATCH) for nodes in parts))
    bare = [(source, target) for name, source, target in crossing_values(graph, plain) if not graph.type_of(name).shape]
    for _ in bare:
        for source, target in bare:
            sizes[source] = sizes[target] = min(sizes[source], sizes[target])
    stages = []
    for nodes, size in zip(parts, sizes, strict=True):
        degree = draw(st.sampled_from([each for each in (1, 1, 2, 4) if each <= devices]))
        group = tuple(draw(st.permutations(range(devices)))[:degree])
        splits = random_splits(draw, rebatched(graph, size), nodes, degree)
        stages.append(Stage(tuple(nodes), group, size, splits, draw(st.integers(0, 3)) == 0))
    return Placement(tuple(stages))


@st.composite
def unequal_schedules(draw: st.DrawFn, graph: Graph, placement: Placement, train: bool) -> Schedule:
    """Any order that can run in which stages take their micro-batches in order, backwards whole or halved."""
    random = Random(draw(st.integers(0, 2**16)))
    schedule = random_order(random, stage_graph(graph, placement), draw(st.integers(1, 3)), train)
    return halved(schedule, draw(st.integers(0, 2))) if train and draw(st.booleans()) else schedule


@st.composite
def unequal_cases(draw: st.DrawFn, train: bool) -> Case:
    """A whole case."""
    graph, loss = draw(graphs(train))
    placement = draw(unequal_placements(graph))
    placement.verify(graph)
    return Case(graph, placement, draw(unequal_schedules(graph, placement, train)), loss)
