"""Alternatives for a node: other splits, another stage."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from autopipe.ir.batch import rebatched
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.space import AxisKind
from autopipe.passes.analysis.constraints import checked_splits
from autopipe.passes.analysis.operators import SampleAxes, sample_axes
from autopipe.passes.explain.prices import Change


def split_changes(problem: Problem, placement: Placement, node: int) -> Iterator[Change]:
    """The other splits of a node, alone, over the devices of its stage in the first pipeline: a kind for any axes."""
    index = placement.stage_of()[node]
    stage = placement.stages[index]
    for splits in _legal(samples_of(problem, stage), node, len(stage.devices)):
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
    samples, group = samples_of(problem, new), len(new.devices)
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


def samples_of(problem: Problem, stage: Stage) -> SampleAxes:
    """The sample axes of the graph on the stage's own micro-batches."""
    graph, size = problem.graph, stage.micro_batch_size
    return sample_axes(graph if size == problem.micro_batch_size else rebatched(graph, size))


def _legal(samples: SampleAxes, node: int, group: int) -> Iterator[tuple[Split, ...]]:
    """Splits of a node over `group` devices: along one axis in any degree, or two that take all of them."""
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
