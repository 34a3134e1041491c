"""True if a stage graph is valid: conditions C1 to C4 of Jeon et al., "GraphPipe" (2024), section 3.

Shares no code with the search, and asks the model's graph alone.
"""

from __future__ import annotations

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, recomputed_nodes
from autopipe.ir.schedule import Phase, Schedule


def check_stages(graph: Graph, placement: Placement) -> None:
    """Raise InfeasibleError unless C1 to C3 hold.

    C1: the stages part the nodes, and each is convex: no way leads out of it and back. C2: where a node reads what
    another stage computes there is an edge between the two, from the earlier to the later. C3: no device has two
    stages.
    """
    owner: dict[int, int] = {}
    for index, stage in enumerate(placement.stages):
        for node in stage.nodes:
            if owner.setdefault(node, index) != index:
                raise InfeasibleError(f"C1: {graph.nodes[node].name!r} is in stages {owner[node]} and {index}")
    if len(owner) != len(graph.nodes):
        raise InfeasibleError(f"C1: {len(graph.nodes) - len(owner)} nodes are in no stage")
    devices = [device for stage in placement.stages for device in stage.devices]
    if len(set(devices)) != len(devices):
        raise InfeasibleError("C3: a device has two stages")
    recomputed = recomputed_nodes(graph)
    behind = [0] * len(graph.nodes)
    for index, reader in enumerate(graph.nodes):
        for name in reader.inputs:
            producer = graph.producer(name) if name else None
            if producer is None or producer in recomputed:
                continue
            if owner[producer] > owner[index] and index not in recomputed:
                raise InfeasibleError(f"C2: stage {owner[index]} reads {name!r} of the later stage {owner[producer]}")
            behind[index] |= behind[producer]
            if owner[producer] != owner[index]:
                behind[index] |= 1 << owner[producer]
        if behind[index] >> owner[index] & 1 and index not in recomputed:
            raise InfeasibleError(f"C1: a way leads out of stage {owner[index]} and back to {reader.name!r}")


def check_schedule(schedule: Schedule) -> None:
    """Raise InfeasibleError unless C4 holds on every device: micro-batches in order, forward before backward."""
    for device, order in enumerate(schedule.tasks):
        done: dict[tuple[int, Phase], int] = {}
        for task in order:
            last = done.get((task.stage, task.phase), -1)
            if task.micro_batch <= last:
                raise InfeasibleError(f"C4: {task} comes after micro-batch {last}", where=f"device {device}")
            if task.phase is not Phase.FORWARD and task.micro_batch > done.get((task.stage, Phase.FORWARD), -1):
                raise InfeasibleError(f"C4: {task} comes before its forward", where=f"device {device}")
            done[task.stage, task.phase] = task.micro_batch
