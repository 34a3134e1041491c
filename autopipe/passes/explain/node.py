"""Why a node is where and split as it is: what it takes, what its values move, and what else could be done with it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split, Stage, recomputed_nodes
from autopipe.ir.problem import Problem
from autopipe.ir.rebatch import rebatched
from autopipe.ir.space import AxisKind
from autopipe.passes.cost.assignment import StageWork, stage_work
from autopipe.passes.cost.exchange import exchanges_of
from autopipe.passes.cost.relayout import relayout_seconds
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.splits import SampleAxes, sample_axes
from autopipe.passes.cost.wished import checked_splits
from autopipe.passes.explain.prices import Change
from autopipe.passes.lower.gradients import differentiable_values


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that a node reads or writes, and how it gets from one to the other."""

    value: str
    reads: bool
    """Whether the node reads it; else it writes it."""
    node: str
    """The node at the other end; "" for the model's own inputs and outputs, and parameters."""
    stage: int | None
    """That node's stage."""
    bytes: int
    """Of the whole value, of one of the node's micro-batches."""
    exchanges: tuple[str, ...]
    """What the stage's devices do so that it is laid out as it is read: collectives by kind."""
    exchange_s: float
    """What that takes for a micro-batch, forward and backward."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What is known of a node."""

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
    """Whether each stage that reads its values computes it for itself, as it costs less than sending."""
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


def split_changes(problem: Problem, placement: Placement, node: int) -> Iterator[Change]:
    """The other splits of a node, alone, over the devices of its stage in the first pipeline: a kind for any axes."""
    index = placement.stage_of()[node]
    stage = placement.stages[index]
    for splits in _legal(_samples(problem, stage), node, len(stage.devices)):
        if splits != stage.splits_of(node):
            edited = replace(stage, splits=_with(stage, node, splits))
            kind = " ".join(split.axis for split in splits)
            yield Change(kind, ", ".join(map(str, splits)) or "not split", with_stages(placement, {index: edited}))


def move_changes(problem: Problem, placement: Placement, node: int) -> Iterator[Change]:
    """The node in the stage before or after its own in the first pipeline, samples shared there where they can be.

    With it go the nodes of its stage that it reads from, or that read from it: stages are run one after the other.
    """
    index = placement.stage_of()[node]
    nodes = placement.stages[index].nodes
    for other in neighbours(placement, index):
        along = _along(problem.graph, nodes, node, later=other > index)
        moved = moved_nodes(problem, placement, along, index, other) if len(along) < len(nodes) else None
        if moved is not None:
            why = "read from it" if other > index else "it reads from"
            others = f", with {len(along) - 1} that {why}" if len(along) > 1 else ""
            yield Change(f"stage {other}", f"moved to stage {other}{others}", moved)


def neighbours(placement: Placement, index: int) -> Iterator[int]:
    """The stages before and after a stage in its pipeline."""
    pipeline = placement.stages[index].pipeline
    own = [place for place, stage in enumerate(placement.stages) if stage.pipeline == pipeline]
    at = own.index(index)
    yield from own[max(0, at - 1) : at]
    yield from own[at + 1 : at + 2]


def _along(graph: Graph, nodes: tuple[int, ...], node: int, later: bool) -> tuple[int, ...]:
    """The node with all of a stage's, ascending, that read from it, directly or not; else with all it reads from."""
    found = {node}
    if later:
        for each in nodes:
            producers = {graph.producer(name) for name in graph.nodes[each].inputs if name}
            if not found.isdisjoint(producers):
                found.add(each)
        return tuple(sorted(found))
    for each in reversed(nodes):
        if each in found:
            producers = {graph.producer(name) for name in graph.nodes[each].inputs if name}
            found.update(producer for producer in producers if producer in nodes)
    return tuple(sorted(found))


def moved_nodes(
    problem: Problem, placement: Placement, nodes: tuple[int, ...], source: int, target: int
) -> Placement | None:
    """The placement with nodes of one stage in another, split as before on as many devices, else by samples.

    None where samples cannot be shared there.
    """
    old, new = placement.stages[source], placement.stages[target]
    samples, group = _samples(problem, new), len(new.devices)
    splits = dict(new.splits)
    for node in nodes:
        if len(old.devices) == group and old.micro_batch_size == new.micro_batch_size:
            own = old.splits_of(node)
        elif samples.divides(node, group):
            own = tuple(split for _, each in samples.splits((node,), group) for split in each)
        else:
            return None
        if own:
            splits[node] = own
    gone = set(nodes)
    left = replace(
        old,
        nodes=tuple(node for node in old.nodes if node not in gone),
        splits=tuple(each for each in old.splits if each[0] not in gone),
    )
    joined = replace(new, nodes=tuple(sorted((*new.nodes, *nodes))), splits=tuple(sorted(splits.items())))
    return with_stages(placement, {source: left, target: joined})


def with_stages(placement: Placement, stages: dict[int, Stage]) -> Placement:
    """The placement with other stages in place of some."""
    return Placement(tuple(stages.get(index, stage) for index, stage in enumerate(placement.stages)))


def _with(stage: Stage, node: int, splits: tuple[Split, ...]) -> tuple[tuple[int, tuple[Split, ...]], ...]:
    found = {**dict(stage.splits), node: splits}
    return tuple(sorted((each, own) for each, own in found.items() if own))


def _samples(problem: Problem, stage: Stage) -> SampleAxes:
    """The sample axes on the stage's own micro-batches."""
    graph, size = problem.graph, stage.micro_batch_size
    return sample_axes(graph if size == problem.micro_batch_size else rebatched(graph, size))


def _legal(samples: SampleAxes, node: int, group: int) -> Iterator[tuple[Split, ...]]:
    """Splits of a node over so many devices: along one axis in any degree, or two that take all of them."""
    yield ()
    axes = [axis.name for axis in samples.uses[node].space.axes if axis.kind is not AxisKind.WHOLE]
    degrees = [degree for degree in range(2, group + 1) if group % degree == 0]
    ones = [((axis, degree),) for axis in axes for degree in degrees]
    twos = [
        ((outer, degree), (inner, group // degree))
        for outer, inner in itertools.permutations(axes, 2)
        for degree in degrees
        if degree < group
    ]
    for asked in (*ones, *twos):
        try:
            yield checked_splits("this", samples, node, asked)
        except ConfigurationError:
            continue


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
