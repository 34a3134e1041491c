"""The collectives inside a stage: what they take where neighbours want a value in different layouts.

They are those that lowering inserts: partial results are all-reduced, differently cut ones gathered, whole ones cut
for free. Backward runs each one's transpose, which costs the same: all-reduce for all-reduce, reduce-scatter for
all-gather, nothing for a cut.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopipe.ir.cluster import Cluster
from autopipe.ir.graph import Graph
from autopipe.passes.cost.assignment import Assigned, Cuts, StageWork
from autopipe.passes.cost.communication import all_gather, all_reduce


def exchange_seconds(graph: Graph, cluster: Cluster, work: StageWork) -> float:
    """Seconds of one forward's collectives inside a stage."""
    devices = work.stage.devices
    if len(devices) < 2 or not work.stage.splits:
        return 0.0
    reduce, gather = all_reduce(cluster, devices), all_gather(cluster, devices)
    held: dict[str, Cuts] = {}
    gathered: set[str] = set()
    total = 0.0
    for each in work.nodes:
        for name, need in zip(each.node.inputs, each.sharing.operands, strict=True):
            have = held.get(name, ())
            if have and have != need and name not in gathered:
                gathered.add(name)
                total += gather.seconds(graph.type_of(name).bytes)
        held.update(zip(each.node.outputs, each.sharing.results, strict=True))
        if each.sharing.degrees:
            partial = (name for name in _partial_results(each) if graph.type_of(name).shape)
            total += sum(reduce.seconds(graph.type_of(name).bytes) for name in partial)
    return total


def _partial_results(each: Assigned) -> Iterator[str]:
    """Results of which each device holds but its share of a sum: those without one of the axes that are cut."""
    for name, dimensions in zip(each.node.outputs, each.use.space.results, strict=True):
        present = {axis for dimension in dimensions or () for axis in dimension}
        if name and not present.issuperset(each.sharing.degrees):
            yield name
