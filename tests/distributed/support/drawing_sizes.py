"""Random placements of stages with micro-batches of their own, and orders that suit them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hypothesis import strategies as st

from autopipe.ir.batch import resize_batch
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage, crossing_values
from autopipe.ir.schedule import Schedule
from tests.distributed.support.drawing import Case, graphs
from tests.distributed.support.halves import halved
from tests.distributed.support.portions import random_order
from tests.distributed.support.running import stage_graph
from tests.distributed.support.strategies import random_stage

ATTEMPTS = 10
"""Number of random placements of which the first with unequal neighbours is taken."""


def unequal_placement(
    random: Random, graph: Graph, devices: int, sizes: tuple[int, ...]
) -> Placement:
    """Return stages on groups of 1, 2 or 4 devices, several on one or on all, each with one of
    `sizes` as its micro-batch.

    Each node is at or after the stages of the values that it reads, so that stages may be branches.
    Stages that exchange a value without dimensions, such as a mean, have equal micro-batches.
    """
    parts = _parts(random, graph, random.randint(2, 4))
    return _placed(random, graph, devices, parts, _sizes(random, graph, parts, sizes))


def placement_with_unequal_neighbours(
    random: Random, graph: Graph, devices: int, sizes: tuple[int, ...]
) -> Placement:
    """Return a placement as `unequal_placement` does, in which two stages of different micro-batch
    sizes exchange a value.

    `ATTEMPTS` random placements are tried. If neighbours are equal in all of them, the graph is cut
    into two stages between which every value has dimensions.
    """
    for _ in range(ATTEMPTS):
        parts = _parts(random, graph, random.randint(2, 4))
        own = _sizes(random, graph, parts, sizes)
        edges = crossing_values(graph, _plain(parts))
        if any(own[source] != own[target] for _, source, target in edges):
            return _placed(random, graph, devices, parts, own)
    parts = random.choice(_cuts(graph))
    return _placed(random, graph, devices, parts, random.sample(sizes, 2))


def _cuts(graph: Graph) -> list[list[tuple[int, ...]]]:
    """Return the cuts of the node list into two stages that exchange only values with dimensions."""
    nodes = tuple(range(len(graph.nodes)))
    cuts = [[nodes[:cut], nodes[cut:]] for cut in nodes[1:]]
    return [parts for parts in cuts if _have_dimensions(graph, parts)]


def _have_dimensions(graph: Graph, parts: Sequence[tuple[int, ...]]) -> bool:
    names = [name for name, *_ in crossing_values(graph, _plain(parts))]
    return bool(names) and all(graph.type_of(name).shape for name in names)


def _plain(parts: Sequence[tuple[int, ...]]) -> Placement:
    """Return the stages on one device with equal micro-batches."""
    return Placement(tuple(Stage(nodes, (0,), 1) for nodes in parts))


def _sizes(
    random: Random, graph: Graph, parts: Sequence[tuple[int, ...]], sizes: tuple[int, ...]
) -> list[int]:
    """Return the micro-batch size of each stage."""
    own = [random.choice(sizes) for _ in parts]
    edges = crossing_values(graph, _plain(parts))
    means = [edge for name, *edge in edges if not graph.type_of(name).shape]
    for _ in means:
        for source, target in means:
            own[source] = own[target] = min(own[source], own[target])
    return own


def _placed(
    random: Random,
    graph: Graph,
    devices: int,
    parts: Sequence[tuple[int, ...]],
    sizes: Sequence[int],
) -> Placement:
    """Return the stages on random groups of devices."""
    stages = []
    for nodes, size in zip(parts, sizes, strict=True):
        degree = random.choice([each for each in (1, 1, 2, 4) if each <= devices])
        group = random.sample(range(devices), degree)
        stages.append(random_stage(random, resize_batch(graph, size), nodes, group, size))
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
    """A whole case in which stages of different micro-batch sizes exchange a value."""
    graph, loss = draw(graphs(train, chained=True))
    random = Random(draw(st.integers(0, 2**16)))
    devices = random.choice((2, 4))
    placement = placement_with_unequal_neighbours(random, graph, devices, (1, 2, 4))
    placement.verify(graph)
    schedule = unequal_schedule(random, graph, placement, random.randint(1, 3), train)
    return Case(graph, placement, schedule, loss)
