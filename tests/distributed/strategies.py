"""Random executable strategies: any legal splits of every node, on any order of devices, in one stage or in several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from autopipe.ir.graph import Graph
from autopipe.ir.layout import are_blocks
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.schedule import Schedule
from autopipe.ir.space import AxisKind, Space
from autopipe.passes.cost.uses import uses_of
from tests.distributed.halves import halved
from tests.distributed.running import schedule_of

SPLIT_NODES = 0.9
"""The share of nodes that are split if they can be."""


def random_placement(random: Random, graph: Graph, devices: int, samples: int) -> Placement:
    """One stage on all devices, two on all, or two on a part each, in any order of devices."""
    order = random.sample(range(devices), devices)
    kind = random.choice(("one", "one", "both", "parts"))
    if kind == "one":
        groups = [order]
    elif kind == "both":
        groups = [order, random.sample(order, devices)]
    else:
        size = random.randrange(1, devices)
        groups = [order[:size], order[size:]]
    cut = random.randrange(1, len(graph.nodes)) if len(groups) == 2 else len(graph.nodes)
    parts = [range(cut), range(cut, len(graph.nodes))][: len(groups)]
    return Placement(
        tuple(random_stage(random, graph, nodes, group, samples) for nodes, group in zip(parts, groups, strict=True))
    )


def random_schedule(random: Random, graph: Graph, placement: Placement, micro_batches: int) -> Schedule:
    """1F1B or GPipe, backwards whole or in halves."""
    schedule = schedule_of(graph, placement, micro_batches, random.choice(("1f1b", "gpipe")))
    return halved(schedule, random.randrange(3)) if random.random() < 0.5 else schedule


def random_stage(random: Random, graph: Graph, nodes: Sequence[int], group: Sequence[int], samples: int) -> Stage:
    """A stage of `nodes` on the devices of `group`, each node split at random, and now and then recomputed."""
    uses = uses_of(graph)
    splits = ((node, random_splits(random, uses[node].space, len(group))) for node in nodes)
    found = tuple((node, own) for node, own in splits if own)
    return Stage(tuple(nodes), tuple(group), samples, found, random.random() < 0.2)


def random_splits(random: Random, space: Space, group: int) -> tuple[Split, ...]:
    """Some of a node's axes in any order and of any degrees, their product a divisor of `group`."""
    if random.random() > SPLIT_NODES:
        return ()
    splits: tuple[Split, ...] = ()
    axes = [axis.name for axis in space.axes if axis.kind is not AxisKind.WHOLE]
    for axis in random.sample(axes, len(axes)):
        left = group // math.prod(split.degree for split in splits)
        degrees = [degree for degree in range(2, left + 1) if left % degree == 0]
        legal = [degree for degree in degrees if are_blocks(space, (*splits, Split(axis, degree)))]
        if legal and random.random() < 0.8:
            splits = (*splits, Split(axis, random.choice(legal)))
    return splits
