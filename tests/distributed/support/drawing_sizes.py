"""Random placements of stages with micro-batches of their own, and orders that suit them."""

from __future__ import annotations

from random import Random

from hypothesis import assume
from hypothesis import strategies as st

from autopipe.ir.batch import rebatched
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage, crossing_values
from autopipe.ir.schedule import Schedule
from tests.distributed.support.drawing import Case, graphs
from tests.distributed.support.halves import halved
from tests.distributed.support.portions import random_order
from tests.distributed.support.running import stage_graph
from tests.distributed.support.strategies import random_stage


def unequal_placement(
    random: Random, graph: Graph, devices: int, sizes: tuple[int, ...]
) -> Placement:
    """Stages on groups of 1, 2 or 4 devices, several on one or on all, each with one of `sizes` as
    its micro-batch.

    Each node is at or after the stages of what it reads, so that stages may be branches. Stages
    that exchange a value without dimensions, such as a mean, have equal micro-batches.
    """
    parts = _parts(random, graph, random.randint(2, 4))
    own = [random.choice(sizes) for _ in parts]
    plain = Placement(tuple(Stage(nodes, (0,), max(sizes)) for nodes in parts))
    means = [edge for name, *edge in crossing_values(graph, plain) if not graph.type_of(name).shape]
    for _ in means:
        for source, target in means:
            own[source] = own[target] = min(own[source], own[target])
    stages = []
    for nodes, size in zip(parts, own, strict=True):
        degree = random.choice([each for each in (1, 1, 2, 4) if each <= devices])
        stages.append(
            random_stage(
                random, rebatched(graph, size), nodes, random.sample(range(devices), degree), size
            )
        )
    return Placement(tuple(stages))


def _parts(random: Random, graph: Graph, stages: int) -> list[tuple[int, ...]]:
    """Nodes by stage."""
    stage_of: dict[int, int] = {}
    for index, node in enumerate(graph.nodes):
        producers = (graph.producer(name) for name in node.inputs if name)
        least = max((stage_of[each] for each in producers if each is not None), default=0)
        stage_of[index] = random.randint(least, stages - 1) if random.random() < 0.4 else least
    found = (
        tuple(node for node, own in stage_of.items() if own == stage) for stage in range(stages)
    )
    return [nodes for nodes in found if nodes]


def unequal_schedule(
    random: Random, graph: Graph, placement: Placement, micro_batches: int, train: bool
) -> Schedule:
    """Any order that can run in which stages take their micro-batches in order, backwards whole or
    halved.
    """
    schedule = random_order(random, stage_graph(graph, placement), micro_batches, train)
    return halved(schedule, random.randrange(3)) if train and random.random() < 0.3 else schedule


@st.composite
def unequal_cases(draw: st.DrawFn, train: bool) -> Case:
    """A whole case in which stages of different micro-batches meet."""
    graph, loss = draw(graphs(train))
    random = Random(draw(st.integers(0, 2**16)))
    placement = unequal_placement(random, graph, random.choice((2, 4)), (1, 2, 4))
    placement.verify(graph)
    turns = stage_graph(graph, placement)
    assume(
        any(
            turns.micro_batch_ratio_at(source) != turns.micro_batch_ratio_at(target)
            for source, target in turns.edges
        )
    )
    return Case(
        graph,
        placement,
        unequal_schedule(random, graph, placement, random.randint(1, 3), train),
        loss,
    )
