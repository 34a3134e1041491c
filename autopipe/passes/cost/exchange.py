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
from autopipe.ir.layout import MeshAxes, merged, mesh_of
from autopipe.ir.ops import signature_of
from autopipe.ir.ops.operator import Signature, joint_splits
from autopipe.ir.placement import Split
from autopipe.passes.cost.assignment import StageWork, laid_as
from autopipe.passes.cost.relayout import reduction_cost, relayout_seconds
from autopipe.passes.cost.uses import OpInstance
from autopipe.passes.lower.exchanges import Exchange, taken_layouts, with_exchanges


@dataclass(frozen=True, slots=True)
class ExchangeSeconds:
    """Seconds of one micro-batch's collectives inside a stage."""

    forward_s: float = 0.0
    backward_s: float = 0.0

    def __add__(self, other: ExchangeSeconds) -> ExchangeSeconds:
        return ExchangeSeconds(self.forward_s + other.forward_s, self.backward_s + other.backward_s)


def exchange_seconds(graph: Graph, cluster: Cluster, work: StageWork, gradient: Set[str]) -> ExchangeSeconds:
    """The collectives of a stage; `gradient` are the values that gradients flow through."""
    devices = work.stage.devices
    if len(devices) < 2 or not work.stage.splits:
        return ExchangeSeconds()
    total = ExchangeSeconds()
    for exchange in exchanges_of(graph, work):
        width = graph.type_of(exchange.value).dtype.itemsize
        seconds = relayout_seconds(cluster, devices, exchange.step, width)
        total += ExchangeSeconds(seconds, seconds * (exchange.value in gradient))
    for each in work.nodes:
        if joint_splits(each.use.space, each.sharing.degrees):
            total += statistics_seconds(
                cluster, devices, each.use, signature_of(graph, each.node), each.sharing.degrees
            )
    return total


def exchanges_of(graph: Graph, work: StageWork) -> Iterable[Exchange]:
    """The changes of layout that lowering makes between a stage's nodes."""
    nodes = list(map(laid_as, work.nodes))
    shares = work.given.keys() - graph.consumers().keys()
    steps = with_exchanges(nodes, taken_layouts(graph, nodes), work.given.keys(), shares, len(work.stage.devices))
    return (step for step in steps if isinstance(step, Exchange))


def statistics_seconds(
    cluster: Cluster, devices: tuple[int, ...], use: OpInstance, signature: Signature, degrees: Mapping[str, int]
) -> ExchangeSeconds:
    """Seconds of the statistics that a node split by `degrees`, along joint axes among others, exchanges."""
    forward = backward = 0.0
    mesh: MeshAxes = ()
    for told in use.row.statistics(signature, use.space, degrees):
        mesh = mesh or mesh_of([Split(*item) for item in degrees.items()], len(devices))
        over = merged([place for axis, place in zip(degrees, mesh, strict=True) if axis in told.axes])
        seconds = told.times * reduction_cost(cluster, devices, told.kind, over).seconds(told.bytes)
        forward, backward = (forward, backward + seconds) if told.backward else (forward + seconds, backward)
    return ExchangeSeconds(forward, backward)
