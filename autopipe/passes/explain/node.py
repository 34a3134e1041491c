"""Report of a node in a plan: its place, its time, and the bytes its values move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split, recomputed_nodes
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.gradients import differentiable_values
from autopipe.passes.cost.communication import relayout_seconds
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.stage_work import StageWork, exchanges_of, stage_work


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that a node reads or writes, and how it gets from one to the other."""

    value: str
    reads: bool
    """True if the node reads it; else it writes it."""
    node: str
    """The node at the other end; "" for the model's own inputs and outputs, and parameters."""
    stage: int | None
    """That node's stage."""
    bytes: int
    """Of the whole value, of one of the node's micro-batches."""
    exchanges: tuple[str, ...]
    """Exchanges of the stage's devices for the layouts in which it is read: collectives by kind."""
    exchange_s: float
    """Seconds of these for a micro-batch, forward and backward."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Facts on a node."""

    node: int
    name: str
    op: str
    stage: int
    devices: tuple[int, ...]
    splits: tuple[Split, ...]
    share: float
    """The part of it that each device computes."""
    forward_s: float
    """Seconds of a micro-batch on a device."""
    backward_s: float
    recomputed: bool
    """True if each stage that reads its values computes it for itself, as it costs less than sending."""
    edges: tuple[Edge, ...]


def node_report(problem: Problem, placement: Placement, node: int) -> NodeReport:
    """The report on a node, in the placement's first pipeline."""
    stage_of = placement.stage_of()
    index = stage_of[node]
    stage = placement.stages[index]
    work = stage_work(problem, placement)[index]
    own = work.problem
    assigned = next((each for each in work.nodes if each.index == node), None)
    share = 1.0 if assigned is None else assigned.sharing.share
    kinds = {own.cluster.devices[device] for device in stage.devices}
    seconds = [node_seconds([own.work[node]], device, own.precision, share) for device in kinds]
    forward, backward = (max(float(each[phase][0]) for each in seconds) for phase in (0, 1))
    found = own.graph.nodes[node]
    return NodeReport(
        node=node,
        name=found.name,
        op=found.op,
        stage=index,
        devices=stage.devices,
        splits=stage.splits_of(node),
        share=share,
        forward_s=forward,
        backward_s=backward if problem.train else 0.0,
        recomputed=node in recomputed_nodes(problem.graph),
        edges=tuple(_edges(own.graph, work, stage_of, node)),
    )


def _edges(graph: Graph, work: StageWork, stage_of: dict[int, int], node: int) -> Iterator[Edge]:
    found = graph.nodes[node]
    for value in dict.fromkeys(name for name in found.inputs if name):
        producer = graph.producer(value)
        other = "" if producer is None else graph.nodes[producer].name
        yield _edge(graph, work, value, True, other, None if producer is None else stage_of[producer])
    for value in found.outputs:
        readers = graph.consumers().get(value, ())
        if value and not readers:
            yield _edge(graph, work, value, False, "", None)
        for reader in readers:
            yield _edge(graph, work, value, False, graph.nodes[reader].name, stage_of[reader])


def _edge(graph: Graph, work: StageWork, value: str, reads: bool, other: str, stage: int | None) -> Edge:
    group = work.stage.devices
    steps = [step.step for step in exchanges_of(graph, work) if step.value == value] if len(group) > 1 else []
    width = graph.type_of(value).dtype.itemsize
    directions = 2 if value in differentiable_values(graph) and work.problem.train else 1
    seconds = directions * sum(relayout_seconds(work.problem.cluster, group, step, width) for step in steps)
    kinds = tuple(dict.fromkeys(step.kind for step in steps))
    return Edge(value, reads, other, stage, graph.type_of(value).bytes, kinds, seconds)
