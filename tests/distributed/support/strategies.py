"""Random executable strategies: any legal splits of every node, on any order of devices, in one
stage or in several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from autopipe.ir.graph import Graph
from autopipe.ir.layout import are_even_splits
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.schedule import Schedule
from autopipe.ir.space import AxisKind, Space
from autopipe.passes.analysis.operators import op_instances
from tests.distributed.support.halves import halved
from tests.distributed.support.running import schedule_of

MOST = 0.9
"""The share of nodes that are split if they can be, where most are."""
SHARES = (0.2, 0.5, MOST)
"""Such shares of a strategy: where few are split, what is split meets copies, and less is
exchanged.
"""


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
    share = random.choice(SHARES)
    pairs = zip(parts, groups, strict=True)
    return Placement(
        tuple(random_stage(random, graph, nodes, group, samples, share) for nodes, group in pairs)
    )


def random_schedule(
    random: Random, graph: Graph, placement: Placement, micro_batches: int
) -> Schedule:
    """1F1B or GPipe, backwards whole or in halves."""
    schedule = schedule_of(graph, placement, micro_batches, random.choice(("1f1b", "gpipe")))
    return halved(schedule, random.randrange(3)) if random.random() < 0.5 else schedule


def random_stage(
    random: Random,
    graph: Graph,
    nodes: Sequence[int],
    group: Sequence[int],
    samples: int,
    share: float = MOST,
) -> Stage:
    """A stage of `nodes` on the devices of `group`, about `share` of them split at random; some are
    recomputed.
    """
    uses = op_instances(graph)
    chosen = [node for node in nodes if random.random() < share]
    splits = ((node, random_splits(random, uses[node].space, len(group))) for node in chosen)
    found = tuple((node, own) for node, own in splits if own)
    return Stage(tuple(nodes), tuple(group), samples, found, random.random() < 0.2)


def random_splits(random: Random, space: Space, group: int) -> tuple[Split, ...]:
    """Some of a node's axes in any order and of any degrees, their product a divisor of `group`."""
    splits: tuple[Split, ...] = ()
    axes = [axis.name for axis in space.axes if axis.kind is not AxisKind.UNSPLITTABLE]
    for axis in random.sample(axes, len(axes)):
        left = group // math.prod(split.degree for split in splits)
        degrees = [degree for degree in range(2, left + 1) if left % degree == 0]
        legal = [
            degree for degree in degrees if are_even_splits(space, (*splits, Split(axis, degree)))
        ]
        if legal and random.random() < 0.8:
            splits = (*splits, Split(axis, random.choice(legal)))
    return splits
