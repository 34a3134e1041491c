"""The collectives inside a stage: what they take where neighbours want a value in different layouts.

They are those that lowering inserts: partial results are all-reduced, differently cut ones gathered, whole ones cut
for free. Backward runs each one's transpose, which costs the same: all-reduce for all-reduce, reduce-scatter for
all-gather, nothing for a cut.
"""

from __future__ import annotations

from autopipe.ir.cluster import Cluster
from autopipe.ir.graph import Graph
from autopipe.passes.cost.assignment import Assigned, StageWork
from autopipe.passes.cost.communication import all_gather, all_reduce


def exchange_seconds(graph: Graph, cluster: Cluster, work: StageWork) -> float:
    """Seconds of one forward's collectives inside a stage."""
    devices = work.stage.devices
    if len(devices) < 2 or not work.stage.splits:
        return 0.0
    reduce, gather = all_reduce(cluster, devices), all_gather(cluster, devices)
    held: dict[str, tuple[int, ...]] = {}
    gathered: set[str] = set()
    total = 0.0
    for each in work.nodes:
        for name, dimensions in zip(each.node.inputs, each.use.space.operands, strict=True):
            have = held.get(name, ())
            if have and have != each.cuts(dimensions) and name not in gathered:
                gathered.add(name)
                total += gather.seconds(graph.type_of(name).bytes)
        for name, dimensions in zip(each.node.outputs, each.use.space.results, strict=True):
            if not name or dimensions is None:
                continue
            held[name] = each.cuts(dimensions)
            if _is_partial(each, dimensions) and graph.type_of(name).shape:
                total += reduce.seconds(graph.type_of(name).bytes)
    return total


def _is_partial(each: Assigned, dimensions: tuple[tuple[str, ...], ...]) -> bool:
    present = {axis for dimension in dimensions for axis in dimension}
    return any(axis not in present for axis in each.degrees)
