"""The collectives inside a stage: what they take where neighbours want a value in different layouts.

They are those that lowering inserts (`passes/lower/exchanges.py`), and those by which a node split along a joint axis
tells the group its statistics. Backward runs each exchange's transpose, which costs the same: all-reduce for
all-reduce, reduce-scatter for all-gather and the reverse, nothing for a cut; and none where no gradient flows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from autopipe.ir.cluster import Cluster
from autopipe.ir.graph import Graph
from autopipe.ir.ops import signature_of
from autopipe.ir.placement import Split
from autopipe.passes.cost.assignment import Assigned, StageWork
from autopipe.passes.cost.communication import Cost, all_gather, all_reduce, reduce_scatter
from autopipe.passes.lower.exchanges import Exchange, laid, taken_layouts, with_exchanges


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Seconds of one micro-batch's collectives inside a stage."""

    forward_s: float = 0.0
    backward_s: float = 0.0

    def __add__(self, other: Exchanged) -> Exchanged:
        return Exchanged(self.forward_s + other.forward_s, self.backward_s + other.backward_s)


def exchange_seconds(graph: Graph, cluster: Cluster, work: StageWork, gradient: Set[str]) -> Exchanged:
    """The collectives of a stage; `gradient` are the values that gradients flow through."""
    devices = work.stage.devices
    if len(devices) < 2 or not work.stage.splits:
        return Exchanged()
    prices = {
        "all_reduce": all_reduce(cluster, devices),
        "reduce_scatter": reduce_scatter(cluster, devices),
        "all_gather": all_gather(cluster, devices),
    }
    total = Exchanged()
    for step in _exchanges(graph, work):
        if step.kind in prices:
            seconds = prices[step.kind].seconds(graph.type_of(step.value).bytes)
            total += Exchanged(seconds, seconds * (step.value in gradient))
    for each in work.nodes:
        total += _statistics(graph, each, prices)
    return total


def _exchanges(graph: Graph, work: StageWork) -> Iterable[Exchange]:
    nodes = tuple(
        laid(graph, each.index, each.use.space, tuple(Split(*item) for item in each.sharing.degrees.items()))
        for each in work.nodes
    )
    shares = work.given.keys() - graph.consumers().keys()
    steps = with_exchanges(nodes, taken_layouts(graph, nodes), work.given.keys(), shares)
    return (step for step in steps if isinstance(step, Exchange))


def _statistics(graph: Graph, each: Assigned, prices: Mapping[str, Cost]) -> Exchanged:
    """What a node split along a joint axis tells the group."""
    total = Exchanged()
    space, degrees = each.use.space, each.sharing.degrees
    if not any(space.axis(axis).kind.is_joint for axis in degrees):
        return total
    for told in each.use.row.statistics(signature_of(graph, each.node), space, degrees):
        seconds = told.times * prices[told.kind].seconds(told.bytes)
        total += Exchanged(0.0, seconds) if told.backward else Exchanged(seconds, 0.0)
    return total
