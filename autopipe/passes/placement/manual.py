"""The placement that the configuration's constraints spell out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.layout import is_block
from autopipe.ir.placement import Placement, Split, Stage, recomputed_nodes
from autopipe.ir.problem import Problem
from autopipe.ir.space import AxisKind
from autopipe.passes.cost.constraints import BATCH_AXIS, Wish, wishes_of
from autopipe.passes.cost.fit import fitted
from autopipe.passes.cost.splits import SampleAxes, sample_axes


@dataclass(frozen=True, slots=True)
class Manual:
    """Puts each node into the stage, on the devices and with the split that constraints ask for.

    A node that no constraint gives a stage follows the last of the stages it reads from; one that reads the model's
    inputs starts in stage 0, and one that reads parameters alone joins the first stage that reads it. Where no stage
    is given devices, stages share the devices equally, in order. A stage on several devices shares out its samples,
    where they divide, unless a constraint splits a node otherwise.

    Constraints may be for several pipelines, which take micro-batches in turn: each is placed as if it were alone.
    """

    name: ClassVar[str] = "manual"

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError where there is no constraint to follow."""
        if not problem.constraints:
            raise ConfigurationError(
                "strategy manual follows constraints, and the configuration has none",
                hint="give at least {match: '*', stage: 0}",
            )

    def run(self, problem: Problem) -> Placement:
        """The placement.

        Raises ConfigurationError naming constraints that contradict one another or the graph, and InfeasibleError
        where memory does not hold it.
        """
        asked = {constraint.pipeline for constraint in problem.constraints}
        missing = next((pipeline for pipeline in range(max(asked)) if pipeline not in asked), None)
        if missing is not None:
            raise ConfigurationError(
                f"constraints are for pipeline {max(asked)}, but none is for pipeline {missing}",
                hint="number pipelines from 0",
            )
        wishes = wishes_of(problem, len(asked))
        stages: list[Stage] = []
        for pipeline in sorted(asked):
            own = tuple(wish for wish in wishes if wish.constraint.pipeline == pipeline)
            stages += (replace(stage, pipeline=pipeline) for stage in _pipeline(problem, own))
        return fitted(problem, Placement(tuple(stages)))


def _pipeline(problem: Problem, wishes: tuple[Wish, ...]) -> Iterator[Stage]:
    """The stages that `wishes` ask for."""
    stage_of = _stages(problem.graph, wishes)
    count = max(stage_of) + 1
    members = [tuple(node for node, stage in enumerate(stage_of) if stage == index) for index in range(count)]
    empty = next((index for index, nodes in enumerate(members) if not nodes), None)
    if empty is not None:
        raise ConfigurationError(f"the constraints leave stage {empty} of {count} without nodes")
    devices = _devices(problem, wishes, stage_of, count)
    samples = sample_axes(problem.graph)
    splits = _wished_splits(wishes, samples, stage_of, devices)
    for nodes, group in zip(members, devices, strict=True):
        yield Stage(
            nodes=nodes,
            devices=group,
            micro_batch_size=problem.micro_batch_size,
            splits=_splits(samples, nodes, len(group), splits),
            recompute=problem.train and problem.recompute == "full",
        )


def _stages(graph: Graph, wishes: tuple[Wish, ...]) -> list[int]:
    """The stage of every node: its constraint's, else inherited."""
    given = {node: wish for wish in wishes if wish.constraint.stage is not None for node in wish.nodes}
    wanted = {node: wish.constraint.stage for node, wish in given.items() if wish.constraint.stage is not None}
    recomputed = recomputed_nodes(graph)
    latest = _latest(graph, wanted)
    inputs = {value.name for value in graph.inputs}
    stage_of: list[int] = []
    source_of: list[Wish | None] = []
    for index, node in enumerate(graph.nodes):
        producers = [producer for name in node.inputs if name and (producer := graph.producer(name)) is not None]
        placed = [producer for producer in producers if producer not in recomputed]
        before = max(placed, key=lambda producer: stage_of[producer], default=None)
        alone = latest[index] if inputs.isdisjoint(node.inputs) else 0
        stage = wanted.get(index, alone if before is None else stage_of[before])
        if before is not None and stage < stage_of[before]:
            raise ConfigurationError(
                f"{given[index]} puts this node in stage {stage}, but it reads from stage {stage_of[before]}"
                + (f", where {source_of[before]} puts it" if source_of[before] else ""),
                hint="a stage may read from earlier stages only",
                where=repr(node.name),
            )
        stage_of.append(stage)
        source_of.append(given.get(index) or (source_of[before] if before is not None else None))
    return stage_of


def _latest(graph: Graph, wanted: dict[int, int]) -> list[int]:
    """For each node the first of the stages that read it, directly or through nodes without a stage of their own."""
    latest = [max(wanted.values(), default=0)] * len(graph.nodes)
    for index in range(len(graph.nodes) - 1, -1, -1):
        latest[index] = wanted.get(index, latest[index])
        for name in graph.nodes[index].inputs:
            producer = graph.producer(name) if name else None
            if producer is not None:
                latest[producer] = min(latest[producer], latest[index])
    return latest


def _devices(problem: Problem, wishes: tuple[Wish, ...], stage_of: list[int], count: int) -> list[tuple[int, ...]]:
    """The devices of each stage: those of its nodes' constraints, else an equal share of all."""
    asked: dict[int, Wish] = {}
    for wish in wishes:
        for stage in dict.fromkeys(stage_of[node] for node in wish.nodes) if wish.devices is not None else ():
            other = asked.setdefault(stage, wish)
            if other.devices != wish.devices:
                raise ConfigurationError(f"{other} and {wish} ask for different devices for stage {stage}")
    size = problem.cluster.size
    if not asked:
        if size % count:
            raise ConfigurationError(
                f"{size} devices cannot be shared equally by {count} stages", hint="give each stage its devices"
            )
        each = size // count
        return [tuple(range(stage * each, (stage + 1) * each)) for stage in range(count)]
    missing = next((stage for stage in range(count) if stage not in asked), None)
    if missing is not None:
        raise ConfigurationError(
            f"no constraint gives devices to stage {missing}, though {next(iter(asked.values()))} does to its stage",
            hint="give devices to every stage or to none",
        )
    return [asked[stage].devices or () for stage in range(count)]


def _wished_splits(
    wishes: tuple[Wish, ...], samples: SampleAxes, stage_of: list[int], devices: list[tuple[int, ...]]
) -> dict[int, tuple[Split, ...]]:
    """The splits that constraints ask for, by node."""
    found: dict[int, tuple[Split, ...]] = {}
    for wish in wishes:
        if not wish.constraint.split:
            found.update(dict.fromkeys(wish.nodes, ()) if wish.constraint.split is not None else {})
            continue
        if len(wish.constraint.split) > 1:
            raise ConfigurationError(f"{wish} splits two axes at once", hint="one axis of a node can be split")
        ((axis, degree),) = wish.constraint.split
        split = {node: _split(wish, samples, node, axis, degree) for node in wish.nodes}
        named = {node: each for node, each in split.items() if each is not None}
        if not named:
            axes = ", ".join(axis.name for axis in samples.uses[wish.nodes[0]].space.axes)
            raise ConfigurationError(
                f"{wish} splits axis {axis!r}, which none of its nodes has",
                hint=f"{samples.graph.nodes[wish.nodes[0]].name!r} has {axes or 'none'}",
            )
        for node, each in named.items():
            group = len(devices[stage_of[node]])
            if each.degree not in (1, group):
                raise ConfigurationError(
                    f"{wish} splits into {degree} parts, but stage {stage_of[node]} has {group} devices",
                    hint="a node is split over all devices of its stage",
                )
            found[node] = (each,) if each.degree > 1 else ()
    return found


def _split(wish: Wish, samples: SampleAxes, node: int, axis: str, degree: int) -> Split | None:
    """The split of one node; None where it does not have the axis."""
    space = samples.uses[node].space
    name = samples.axes[node] if axis == BATCH_AXIS else axis
    if name is None or all(each.name != name for each in space.axes):
        return None
    if degree < 1 or space.axis(name).kind is AxisKind.WHOLE or not is_block(space, name, degree):
        raise ConfigurationError(
            f"{wish} splits axis {axis!r} into {degree} parts, which this node cannot do",
            hint=f"its iteration space is {space}, extent {space.axis(name).extent}",
            where=repr(samples.graph.nodes[node].name),
        )
    return Split(name, degree)


def _splits(
    samples: SampleAxes, nodes: tuple[int, ...], degree: int, wished: dict[int, tuple[Split, ...]]
) -> tuple[tuple[int, tuple[Split, ...]], ...]:
    """Splits of a stage's nodes: wished ones, and of the others by samples where these divide."""
    others = [node for node in nodes if node not in wished]
    own = dict(samples.splits([node for node in others if samples.divides(node, degree)], degree))
    own |= {node: wished[node] for node in nodes if wished.get(node)}
    return tuple(sorted(own.items()))
