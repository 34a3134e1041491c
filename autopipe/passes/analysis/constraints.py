"""A user's constraints, resolved: which nodes each means, whether any two contradict, and the
splits they ask for.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.layout import are_even_splits, even_degree_hint
from autopipe.ir.placement import Split
from autopipe.ir.problem import Constraint, Problem
from autopipe.ir.space import AxisKind
from autopipe.ir.words import plural
from autopipe.passes.analysis.operators import SampleAxes

BATCH_AXIS = "b"
"""In a constraint's split: the axis that counts samples, whatever its name in an operator's
iteration space.
"""


@dataclass(frozen=True, slots=True)
class ResolvedConstraint:
    """A constraint with its nodes, ascending, and its devices spelled out (None where it leaves
    them open).
    """

    constraint: Constraint
    nodes: tuple[int, ...]
    devices: tuple[int, ...] | None

    def __str__(self) -> str:
        match = self.constraint.match
        return f"the constraint on {match!r}" if self.constraint.nodes is None else match


def resolved_constraints(
    problem: Problem, pipelines: int = 1, own_sizes: bool = False
) -> tuple[ResolvedConstraint, ...]:
    """The problem's constraints in order, for a strategy that makes `pipelines` pipelines.
    `own_sizes`: its stages may have micro-batches of different sizes. Raises ConfigurationError for
    one that matches no node, with the nearest name, for devices or pipelines that do not exist, for
    micro-batches that there cannot be, and for two that contradict each other on one node.
    """
    resolved = tuple(_resolved(problem, constraint) for constraint in problem.constraints)
    for pipeline in range(pipelines):
        _check_agreement(
            problem, [each for each in resolved if each.constraint.pipeline == pipeline]
        )
    largest = problem.micro_batch_size
    for each in resolved:
        if not 0 <= each.constraint.pipeline < pipelines:
            raise ConfigurationError(
                (
                    f"{each} is for pipeline {each.constraint.pipeline}, but this strategy makes "
                    f"{pipelines}"
                ),
                hint="strategy manual makes as many as constraints ask for",
            )
    for each in resolved:
        size = each.constraint.micro_batch_size
        if size not in (None, largest) and not own_sizes:
            raise ConfigurationError(
                f"{each} asks for micro-batches of {size} {plural(size, 'sample')}, "
                "but with this strategy all stages have those of "
                f"{largest} {plural(largest, 'sample')}",
                hint="strategy manual makes stages with micro-batches of their own",
            )
        if size is not None and largest % size:
            raise ConfigurationError(
                f"{each} asks for micro-batches of {size} {plural(size, 'sample')}, "
                f"which do not divide the step's of {largest}",
                hint="set micro_batch_size to a multiple of all that constraints ask for",
            )
    return resolved


def required_sizes(problem: Problem, resolved: Sequence[ResolvedConstraint]) -> tuple[int, ...]:
    """The sizes that micro-batches may have: all that are open, or those that constraints ask
    for.
    """
    required = {each.constraint.micro_batch_size for each in resolved} - {None}
    open_sizes = problem.micro_batch_sizes or (problem.micro_batch_size,)
    return tuple(size for size in open_sizes if size in required) or open_sizes


def _check_agreement(problem: Problem, resolved: list[ResolvedConstraint]) -> None:
    facets: dict[str, Callable[[ResolvedConstraint], object]] = {
        "stages": lambda each: each.constraint.stage,
        "devices": lambda each: each.devices,
        "splits": lambda each: each.constraint.split,
        "micro-batch sizes": lambda each: each.constraint.micro_batch_size,
    }
    for what, facet in facets.items():
        by_node: dict[int, ResolvedConstraint] = {}
        for each in resolved:
            for node in each.nodes if facet(each) is not None else ():
                other = by_node.setdefault(node, each)
                if facet(other) != facet(each):
                    raise ConfigurationError(
                        f"{other} and {each} ask for different {what}",
                        hint="let each node match only one of them",
                        where=repr(problem.graph.nodes[node].name),
                    )


def _resolved(problem: Problem, constraint: Constraint) -> ResolvedConstraint:
    graph = problem.graph
    devices = constraint.devices
    size = problem.cluster.size
    if constraint.nodes is not None:
        positions = {node.name: index for index, node in enumerate(graph.nodes)}
        nodes = tuple(sorted(positions[name] for name in constraint.nodes))
    else:
        nodes = _matching(graph, constraint.match)
    if not nodes:
        names = [node.name for node in graph.nodes]
        near = difflib.get_close_matches(
            constraint.match.removeprefix("re:"), names, n=1, cutoff=0.0
        )
        raise ConfigurationError(
            f"no node's name matches {constraint.match!r}",
            hint=f"the nearest name is {near[0]!r}" if near else "",
            where="constraints",
        )
    if constraint.stage is not None and constraint.stage < 0:
        raise ConfigurationError(
            f"stage {constraint.stage} asked for {constraint.match!r} is below 0"
        )
    if devices is None:
        return ResolvedConstraint(constraint, nodes, None)
    unknown = [device for device in devices if not 0 <= device < size]
    if unknown:
        raise ConfigurationError(
            f"there is no device {unknown[0]}, asked for {constraint.match!r}",
            hint=f"devices are 0 to {size - 1}",
        )
    return ResolvedConstraint(
        constraint, nodes, tuple(dict.fromkeys(devices)) or tuple(range(size))
    )


def _matching(graph: Graph, match: str) -> tuple[int, ...]:
    """Nodes whose name, with or without the slash that exporters put first, matches a glob or a
    `re:` in full.
    """
    pattern = match.removeprefix("re:") if match.startswith("re:") else fnmatch.translate(match)
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ConfigurationError(
            f"{match!r} is no regular expression: {error}", where="constraints"
        ) from error
    return tuple(
        index
        for index, node in enumerate(graph.nodes)
        if expression.fullmatch(node.name) or expression.fullmatch(node.name.removeprefix("/"))
    )


def required_splits(
    resolved: Sequence[ResolvedConstraint], samples: SampleAxes
) -> dict[int, tuple[Split, ...]]:
    """By node the splits, outer to inner, that `resolved` ask for; () where they ask for none on
    purpose. Of a constraint's axes a node is split along those that it has. Raises
    ConfigurationError, naming the constraint and the node, for axes that none of its nodes has,
    that cannot be split, or that the degrees do not divide.
    """
    found: dict[int, tuple[Split, ...]] = {}
    for constraint in resolved:
        splits = constraint.constraint.split
        nodes = constraint.nodes
        if splits is None:
            continue
        for axis, _ in splits:
            if not any(own_axis(samples, node, axis) for node in nodes):
                axes = ", ".join(each.name for each in samples.uses[nodes[0]].space.axes)
                raise ConfigurationError(
                    f"{constraint} splits axis {axis!r}, which none of its nodes has",
                    hint=f"{samples.graph.nodes[nodes[0]].name!r} has {axes or 'none'}",
                )
        for node in nodes:
            own = [
                (name, degree)
                for axis, degree in splits
                if (name := own_axis(samples, node, axis)) is not None
            ]
            if own or not splits:
                found[node] = checked_splits(str(constraint), samples, node, own)
    return found


def own_axis(samples: SampleAxes, node: int, axis: str, counting: str = BATCH_AXIS) -> str | None:
    """An axis as the node calls it, `counting` being that of samples; None where it has no such
    axis.
    """
    name = samples.axes[node] if axis == counting else axis
    return name if any(each.name == name for each in samples.uses[node].space.axes) else None


def checked_splits(
    who: str, samples: SampleAxes, node: int, splits: Sequence[tuple[str, int]]
) -> tuple[Split, ...]:
    """A node's splits along axes that it has, outer to inner; those into one part are none. Raises
    ConfigurationError, naming `who` asks for them and the node, for an axis that stands twice, that
    cannot be split, or that the degrees do not divide.
    """
    space = samples.uses[node].space
    where = repr(samples.graph.nodes[node].name)
    for position, (name, degree) in enumerate(splits):
        axis = space.axis(name)
        if any(name == other for other, _ in splits[:position]):
            raise ConfigurationError(
                f"{who} splits axis {name!r} twice", f"{BATCH_AXIS!r} is the samples' axis", where
            )
        if degree < 1 or (degree > 1 and axis.kind is AxisKind.UNSPLITTABLE):
            raise ConfigurationError(
                f"{who} splits axis {name!r} into {degree} {plural(degree, 'part')}, "
                "along which this node cannot be split",
                hint=f"its iteration space is {space}",
                where=where,
            )
        if axis.size % degree:
            raise ConfigurationError(
                f"{who} splits axis {name!r} into {degree} {plural(degree, 'part')}, "
                f"which do not divide its extent {axis.size}",
                hint=even_degree_hint(axis.size, degree),
                where=where,
            )
    found = tuple(Split(name, degree) for name, degree in splits if degree > 1)
    if not are_even_splits(space, found):
        raise ConfigurationError(
            (
                f"{who} splits {', '.join(map(str, found))}, which leaves a device several blocks "
                "of a tensor"
            ),
            hint=f"its iteration space is {space}",
            where=where,
        )
    return found
