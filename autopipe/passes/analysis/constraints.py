"""Resolution of the user's constraints: finds the nodes of each constraint, checks that no two
constraints contradict each other, and derives the splits of nodes that constraints require.
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
from autopipe.ir.model_parts import LayerSelection
from autopipe.ir.placement import Split
from autopipe.ir.problem import Constraint, Problem
from autopipe.ir.space import AxisKind
from autopipe.ir.words import plural
from autopipe.passes.analysis.layer_ranges import (
    nodes_of_layers,
    selected_layers,
    selection_text,
)
from autopipe.passes.analysis.operators import SampleAxes

BATCH_AXIS = "b"
"""Name of the batch axis in the split of a constraint, independent of its name in the iteration
space of an operator.
"""


@dataclass(frozen=True, slots=True)
class ResolvedConstraint:
    """A constraint with the indices of the nodes that it applies to, in ascending order, and its
    devices. `devices` is None if the constraint does not restrict devices.
    """

    constraint: Constraint
    nodes: tuple[int, ...]
    devices: tuple[int, ...] | None

    def __str__(self) -> str:
        match = self.constraint.match
        if self.constraint.layers is not None:
            return f"the constraint on layers {selection_text(self.constraint.layers)}"
        return f"the constraint on {match!r}" if self.constraint.nodes is None else match


def resolve_constraints(
    problem: Problem, pipelines: int = 1, own_sizes: bool = False
) -> tuple[ResolvedConstraint, ...]:
    """Return the problem's constraints in order, each with its nodes and devices.

    `pipelines` is the number of pipelines that the strategy creates. `own_sizes` is True if the
    strategy permits stages with different micro-batch sizes.

    Raises ConfigurationError for an invalid regular expression; for a constraint that matches no
    node (the hint names the most similar node); for a negative stage; for a device or pipeline that
    does not exist; for a micro-batch size that the strategy does not permit or that does not divide
    the micro-batch of the step; and for two constraints of one pipeline that require different
    stages, devices, splits or micro-batch sizes of a common node.
    """
    resolved = tuple(_resolve_constraint(problem, constraint) for constraint in problem.constraints)
    for pipeline in range(pipelines):
        _check_agreement(
            problem, [each for each in resolved if each.constraint.pipeline == pipeline]
        )
    largest = problem.micro_batch_size
    for each in resolved:
        if not 0 <= each.constraint.pipeline < pipelines:
            raise ConfigurationError(
                (
                    f"{each} is for pipeline {each.constraint.pipeline}, but the strategy uses "
                    f"{pipelines} {plural(pipelines, 'pipeline')}"
                ),
                hint="use strategy manual, which creates a pipeline for each number in the "
                "constraints",
            )
    for each in resolved:
        size = each.constraint.micro_batch_size
        if size not in (None, largest) and not own_sizes:
            raise ConfigurationError(
                f"{each} requires micro-batches of {size} {plural(size, 'sample')}, but all "
                f"stages of the strategy use micro-batches of {largest} "
                f"{plural(largest, 'sample')}",
                hint="use strategy manual, which permits a micro-batch size per stage",
            )
        if size is not None and largest % size:
            raise ConfigurationError(
                f"{each} requires micro-batches of {size} {plural(size, 'sample')}, which do not "
                f"divide the {largest} {plural(largest, 'sample')} of a micro-batch of the step",
                hint="set micro_batch_size to a multiple of all sizes that constraints require",
            )
    return resolved


def required_micro_batch_sizes(
    problem: Problem, resolved: Sequence[ResolvedConstraint]
) -> tuple[int, ...]:
    """Return the micro-batch sizes that remain possible: those sizes permitted by the problem that
    a constraint requires, or all sizes permitted by the problem if constraints require none of
    them.
    """
    required = {each.constraint.micro_batch_size for each in resolved} - {None}
    open_sizes = problem.micro_batch_sizes or (problem.micro_batch_size,)
    return tuple(size for size in open_sizes if size in required) or open_sizes


def _check_agreement(problem: Problem, resolved: list[ResolvedConstraint]) -> None:
    """Raise ConfigurationError if two constraints require different stages, devices, splits or
    micro-batch sizes of one node. `resolved` are the constraints of one pipeline.
    """
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
                        f"{other} and {each} require different {what}",
                        hint="let each node match one constraint only",
                        where=repr(problem.graph.nodes[node].name),
                    )


def _resolve_constraint(problem: Problem, constraint: Constraint) -> ResolvedConstraint:
    """Return the constraint with its nodes and devices. An empty list of devices stands for all
    devices of the cluster. Raises ConfigurationError as `resolve_constraints` describes.
    """
    graph = problem.graph
    devices = constraint.devices
    size = problem.cluster.size
    if constraint.nodes is not None:
        positions = {node.name: index for index, node in enumerate(graph.nodes)}
        nodes = tuple(sorted(positions[name] for name in constraint.nodes))
    elif constraint.layers is not None:
        nodes = nodes_of_layers(graph, _selected_layers(graph, constraint.layers))
    else:
        nodes = _matching_nodes(graph, constraint.match)
    if not nodes:
        names = [node.name for node in graph.nodes]
        near = difflib.get_close_matches(
            constraint.match.removeprefix("re:"), names, n=1, cutoff=0.0
        )
        raise ConfigurationError(
            f"{constraint.match!r} matches the name of no node",
            hint=f"use a node's name, such as {near[0]!r}, which is the most similar name"
            if near
            else "",
            where="constraints",
        )
    resolved = ResolvedConstraint(constraint, nodes, None)
    if constraint.stage is not None and constraint.stage < 0:
        raise ConfigurationError(
            f"{resolved} requires stage {constraint.stage}, expected at least 0",
            where="constraints",
        )
    if devices is None:
        return resolved
    unknown = [device for device in devices if not 0 <= device < size]
    if unknown:
        raise ConfigurationError(
            f"{resolved} requires device {unknown[0]}, but the cluster has "
            f"{size} {plural(size, 'device')}",
            hint=f"use devices 0 to {size - 1}",
        )
    return ResolvedConstraint(
        constraint, nodes, tuple(dict.fromkeys(devices)) or tuple(range(size))
    )


def _selected_layers(graph: Graph, layers: LayerSelection) -> tuple[tuple[str, int], ...]:
    """Return the layers that a constraint selects (`selected_layers`). Errors name the key."""
    try:
        return selected_layers(graph, layers)
    except ConfigurationError as error:
        raise ConfigurationError(error.message, error.hint, "constraints") from error


def _matching_nodes(graph: Graph, match: str) -> tuple[int, ...]:
    """Return the indices of the nodes whose full name matches `match`, a glob or, after the prefix
    `re:`, a regular expression. Raises ConfigurationError if the regular expression is invalid.

    A leading slash of a node's name, which torch exports, may be missing in `match`.
    """
    pattern = match.removeprefix("re:") if match.startswith("re:") else fnmatch.translate(match)
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ConfigurationError(
            f"{match!r} is not a valid regular expression: {error}", where="constraints"
        ) from error
    return tuple(
        index
        for index, node in enumerate(graph.nodes)
        if expression.fullmatch(node.name) or expression.fullmatch(node.name.removeprefix("/"))
    )


def required_splits(
    resolved: Sequence[ResolvedConstraint], samples: SampleAxes
) -> dict[int, tuple[Split, ...]]:
    """Return, for each node of a constraint with a split, the required splits from outer to inner.

    A node is split along those axes of the constraint that its iteration space has. A node that has
    none of them is omitted. The value () means that the constraint requires an unsplit node.

    Raises ConfigurationError, with the constraint and the node, for an axis that none of the
    constraint's nodes has, and for splits that `checked_splits` rejects.
    """
    found: dict[int, tuple[Split, ...]] = {}
    for constraint in resolved:
        splits = constraint.constraint.split
        nodes = constraint.nodes
        if splits is None:
            continue
        for axis, _ in splits:
            if not any(axis_of_node(samples, node, axis) for node in nodes):
                axes = ", ".join(each.name for each in samples.uses[nodes[0]].space.axes)
                raise ConfigurationError(
                    f"{constraint} splits axis {axis!r}, but none of the matching nodes has this "
                    "axis",
                    hint=f"use an axis of {samples.graph.nodes[nodes[0]].name!r}: {axes or 'none'}",
                )
        for node in nodes:
            own = [
                (name, degree)
                for axis, degree in splits
                if (name := axis_of_node(samples, node, axis)) is not None
            ]
            if own or not splits:
                found[node] = checked_splits(str(constraint), samples, node, own)
    return found


def axis_of_node(
    samples: SampleAxes, node: int, axis: str, counting: str = BATCH_AXIS
) -> str | None:
    """Return the name of `axis` in the iteration space of the node, or None if the space does not
    have this axis. An `axis` equal to `counting` stands for the batch axis, whose name in iteration
    spaces differs between operators.
    """
    name = samples.axes[node] if axis == counting else axis
    return name if any(each.name == name for each in samples.uses[node].space.axes) else None


def checked_splits(
    who: str, samples: SampleAxes, node: int, splits: Sequence[tuple[str, int]]
) -> tuple[Split, ...]:
    """Return the splits of a node from pairs (axis, degree), from outer to inner, without the pairs
    of degree 1.

    `who` names the origin of the splits in messages. Raises ConfigurationError for a repeated axis,
    for an axis that cannot be split, for a degree that does not divide the size of its axis, and
    for splits that would give a device several separate parts of a tensor.
    """
    space = samples.uses[node].space
    where = repr(samples.graph.nodes[node].name)
    for position, (name, degree) in enumerate(splits):
        axis = space.axis(name)
        if any(name == other for other, _ in splits[:position]):
            raise ConfigurationError(
                f"{who} splits axis {name!r} twice",
                f"split each axis once; {BATCH_AXIS!r} is the name of the batch axis",
                where,
            )
        if degree < 1 or (degree > 1 and axis.kind is AxisKind.UNSPLITTABLE):
            raise ConfigurationError(
                f"{who} splits axis {name!r} into {degree} {plural(degree, 'part')}, but this "
                "axis cannot be split",
                hint=f"use an axis of the node's iteration space: {space}",
                where=where,
            )
        if axis.size % degree:
            raise ConfigurationError(
                f"{who} splits axis {name!r} into {degree} {plural(degree, 'part')}, "
                f"which do not divide its size {axis.size}",
                hint=even_degree_hint(axis.size, degree),
                where=where,
            )
    found = tuple(Split(name, degree) for name, degree in splits if degree > 1)
    if not are_even_splits(space, found):
        raise ConfigurationError(
            (
                f"{who} splits {', '.join(map(str, found))}, so that a device would have several "
                "separate parts of a tensor"
            ),
            hint=f"choose other splits of the node's iteration space: {space}",
            where=where,
        )
    return found
