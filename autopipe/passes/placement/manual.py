"""Strategy `manual`: the placement that the configuration's constraints describe."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from autopipe.ir.batch import resize_batch
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.words import plural
from autopipe.passes.analysis.constraints import (
    ResolvedConstraint,
    required_splits,
    resolve_constraints,
)
from autopipe.passes.analysis.inherited_stages import inherited_stages
from autopipe.passes.analysis.operators import SampleAxes, sample_axes
from autopipe.passes.batching import Division
from autopipe.passes.cost.memory_check import with_required_recomputation


@dataclass(frozen=True, slots=True)
class Manual:
    """Put each node into the stage, on the devices and with the split that the constraints require.

    - Stage: a node without a constraint joins the last of the stages from which it reads values. A
      node that reads only inputs of the model is in stage 0. A node that reads only parameters
      joins the first stage that reads its result.
    - Devices: if no constraint names devices, the stages divide the devices evenly, in order.
    - Split: the devices of a stage split the samples of a node if the samples can be divided
      evenly. A constraint replaces this by splits along one or several axes, from the outermost to
      the innermost. If the product of the degrees is smaller than the number of devices, the
      remaining devices compute copies.
    - Micro-batch size: the size that a constraint on any node of the stage requires, otherwise the
      micro-batch size of the step.

    Constraints can describe several pipelines that process micro-batches in turn. Each pipeline is
    placed independently.
    """

    name: ClassVar[str] = "manual"

    def division(self, graph: Graph) -> Division:
        """Return `Division.MANY`: a pipeline is kept busy by many micro-batches."""
        return Division.MANY

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError if the problem has no constraints."""
        if not problem.constraints:
            raise ConfigurationError(
                (
                    "strategy manual requires constraints, but neither the configuration nor "
                    "the model defines any"
                ),
                hint="add a constraint, such as {match: '*', stage: 0}, to constraints",
            )

    def run(self, problem: Problem) -> Placement:
        """Return the placement that the constraints describe.

        Raise ConfigurationError for constraints that contradict each other or the graph, and
        InfeasibleError if memory does not suffice.
        """
        pipelines = {constraint.pipeline for constraint in problem.constraints}
        missing = next(
            (pipeline for pipeline in range(max(pipelines)) if pipeline not in pipelines), None
        )
        if missing is not None:
            raise ConfigurationError(
                (
                    f"a constraint is for pipeline {max(pipelines)}, but no constraint is for "
                    f"pipeline {missing}"
                ),
                hint="number the pipelines from 0",
            )
        resolved = resolve_constraints(problem, len(pipelines), own_sizes=True)
        stages: list[Stage] = []
        for pipeline in sorted(pipelines):
            own = tuple(each for each in resolved if each.constraint.pipeline == pipeline)
            stages += (
                replace(stage, pipeline=pipeline) for stage in _pipeline_stages(problem, own)
            )
        return with_required_recomputation(problem, Placement(tuple(stages)))


def _pipeline_stages(problem: Problem, resolved: tuple[ResolvedConstraint, ...]) -> Iterator[Stage]:
    """Yield the stages of one pipeline that its constraints `resolved` describe. Raise
    ConfigurationError for a stage without nodes or a split that is not possible.
    """
    graph = problem.graph
    whole = problem.micro_batch_size
    stage_of = _node_stages(graph, resolved)
    count = max(stage_of) + 1
    members = [
        tuple(node for node, stage in enumerate(stage_of) if stage == index)
        for index in range(count)
    ]
    if () in members:
        raise ConfigurationError(
            f"the constraints assign no nodes to stage {members.index(())} of {count}"
        )
    devices = _stage_devices(problem, resolved, stage_of, count)
    sizes = _required_by_stage(
        resolved, stage_of, lambda each: each.constraint.micro_batch_size, "micro-batches of"
    )
    splits = required_splits(resolved, sample_axes(graph))
    for node, each in splits.items():
        group = len(devices[stage_of[node]])
        parts = math.prod(split.degree for split in each)
        if group % parts:
            raise ConfigurationError(
                f"constraints split the node into {parts} {plural(parts, 'part')} "
                f"({', '.join(map(str, each))}), which do not divide the {group} "
                f"{plural(group, 'device')} of stage {stage_of[node]}",
                hint="choose degrees whose product divides the number of devices",
                where=repr(graph.nodes[node].name),
            )
    for index, (nodes, group_of) in enumerate(zip(members, devices, strict=True)):
        size = sizes[index][0] if index in sizes else whole
        samples = sample_axes(graph if size == whole else resize_batch(graph, size))
        own = {node: splits[node] for node in nodes if splits.get(node)}
        _check_axis_sizes(samples, own, size)
        others = [
            node for node in nodes if node not in splits and samples.can_divide(node, len(group_of))
        ]
        own |= dict(samples.splits(others, len(group_of)))
        yield Stage(nodes, group_of, size, tuple(sorted(own.items())), problem.recomputes_all)


def _node_stages(graph: Graph, resolved: tuple[ResolvedConstraint, ...]) -> list[int]:
    """Return the stage of each node: the stage that a constraint requires, or the stage that
    follows from other nodes (`inherited_stages`). Raise ConfigurationError if a node would read a
    value of a later stage.
    """
    given = {
        node: each for each in resolved if each.constraint.stage is not None for node in each.nodes
    }
    wanted = {
        node: each.constraint.stage
        for node, each in given.items()
        if each.constraint.stage is not None
    }
    found = inherited_stages(graph, wanted)
    deciding: list[ResolvedConstraint | None] = []
    for index, each in enumerate(found):
        of_source = None if each.source is None else deciding[each.source]
        before = each.stage if each.source is None else found[each.source].stage
        if each.stage < before:
            producer = f", to which {of_source} assigns the producer" if of_source else ""
            raise ConfigurationError(
                f"{given[index]} assigns the node to stage {each.stage}, but the node reads a "
                f"value of stage {before}{producer}",
                hint="move one of the two nodes, so that stages read from earlier stages only",
                where=repr(graph.nodes[index].name),
            )
        deciding.append(given.get(index) or of_source)
    return [each.stage for each in found]


Value = TypeVar("Value")


def _required_by_stage(
    resolved: tuple[ResolvedConstraint, ...],
    stage_of: list[int],
    value_of: Callable[[ResolvedConstraint], Value | None],
    words: str,
) -> dict[int, tuple[Value, ResolvedConstraint]]:
    """Return, by stage, (value, constraint): the value that constraints on the stage's nodes
    require, and the first of these constraints.

    `value_of` returns the value that a constraint requires, or None. Raise ConfigurationError, with
    the text `words`, if constraints require different values for one stage.
    """
    required: dict[int, tuple[Value, ResolvedConstraint]] = {}
    for each in resolved:
        if (value := value_of(each)) is not None:
            for stage in dict.fromkeys(stage_of[node] for node in each.nodes):
                known, other = required.setdefault(stage, (value, each))
                if known != value:
                    raise ConfigurationError(
                        f"{other} and {each} require different {words} stage {stage}"
                    )
    return required


def _stage_devices(
    problem: Problem, resolved: tuple[ResolvedConstraint, ...], stage_of: list[int], count: int
) -> list[tuple[int, ...]]:
    """Return the devices of each of `count` stages: the devices that constraints require, or an
    even division of all devices if no constraint requires devices. Raise ConfigurationError if the
    devices cannot be divided evenly, or if constraints name devices for some stages only.
    """
    required = _required_by_stage(resolved, stage_of, lambda each: each.devices, "devices for")
    size = problem.cluster.size
    if not required:
        if size % count:
            raise ConfigurationError(
                (
                    f"{size} {plural(size, 'device')} cannot be divided evenly into {count} "
                    f"{plural(count, 'stage')}"
                ),
                hint="add devices to a constraint of each stage",
            )
        each = size // count
        return [tuple(range(stage * each, (stage + 1) * each)) for stage in range(count)]
    missing = next((stage for stage in range(count) if stage not in required), None)
    if missing is not None:
        _, first = next(iter(required.values()))
        raise ConfigurationError(
            f"no constraint assigns devices to stage {missing}, but {first} assigns devices to "
            "its stage",
            hint="add devices to a constraint of each stage, or remove devices from all "
            "constraints",
        )
    return [required[stage][0] for stage in range(count)]


def _check_axis_sizes(samples: SampleAxes, splits: dict[int, tuple[Split, ...]], size: int) -> None:
    """Raise ConfigurationError if a required split does not divide the size of its axis evenly, for
    micro-batches of `size` samples.
    """
    for node, own in splits.items():
        for split in own:
            axis_size = samples.uses[node].space.axis(split.axis).size
            if axis_size % split.degree:
                raise ConfigurationError(
                    f"constraints split axis {split.axis!r} of the node into {split.degree} "
                    f"{plural(split.degree, 'part')}, which do not divide its size {axis_size} "
                    f"for micro-batches of {size} {plural(size, 'sample')}",
                    hint="require larger micro-batches, or fewer parts",
                    where=repr(samples.graph.nodes[node].name),
                )
