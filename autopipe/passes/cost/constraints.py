"""A user's constraints, resolved: which nodes each one means, and whether any two contradict."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.problem import Constraint, Problem

BATCH_AXIS = "b"
"""In a constraint's split: the axis that counts samples, whatever its name in an operator's iteration space."""


@dataclass(frozen=True, slots=True)
class ResolvedConstraint:
    """A constraint with its nodes, ascending, and its devices spelled out (None where it leaves them open)."""

    constraint: Constraint
    nodes: tuple[int, ...]
    devices: tuple[int, ...] | None

    def __str__(self) -> str:
        if self.constraint.nodes is not None:
            return self.constraint.match
        return f"the constraint on {self.constraint.match!r}"


def wishes_of(problem: Problem, pipelines: int = 1, own_sizes: bool = False) -> tuple[ResolvedConstraint, ...]:
    """The problem's constraints in order, for a strategy that makes `pipelines` pipelines.

    `own_sizes`: its stages may have micro-batches of different sizes. Raises ConfigurationError for one that matches no
    node, with the nearest name, for devices or pipelines that do not exist, for micro-batches that there cannot be, and
    for two that contradict each other on one node.
    """
    positions = {node.name: index for index, node in enumerate(problem.graph.nodes)}
    wishes = tuple(_wish(problem, constraint, positions) for constraint in problem.constraints)
    for pipeline in range(pipelines):
        _check_agreement(problem, [wish for wish in wishes if wish.constraint.pipeline == pipeline])
    foreign = next((wish for wish in wishes if not 0 <= wish.constraint.pipeline < pipelines), None)
    if foreign is not None:
        raise ConfigurationError(
            f"{foreign} is for pipeline {foreign.constraint.pipeline}, but this strategy makes {pipelines}",
            hint="strategy manual makes as many as constraints ask for",
        )
    for wish in wishes:
        _check_size(problem, wish, own_sizes)
    return wishes


def required_sizes(problem: Problem, wishes: Sequence[ResolvedConstraint]) -> tuple[int, ...]:
    """The sizes that micro-batches may have: all that are open, or those that constraints ask for."""
    asked = {wish.constraint.micro_batch_size for wish in wishes} - {None}
    open_sizes = problem.micro_batch_sizes or (problem.micro_batch_size,)
    return tuple(size for size in open_sizes if size in asked) or open_sizes


def _check_size(problem: Problem, wish: ResolvedConstraint, own_sizes: bool) -> None:
    size, largest = wish.constraint.micro_batch_size, problem.micro_batch_size
    if size is None or size == largest:
        return
    if not own_sizes:
        raise ConfigurationError(
            f"{wish} asks for micro-batches of {size} samples, but with this strategy all stages have those of "
            f"{largest} samples",
            hint="strategy manual makes stages with micro-batches of their own",
        )
    if largest % size:
        raise ConfigurationError(
            f"{wish} asks for micro-batches of {size} samples, which do not divide the step's of {largest}",
            hint="set micro_batch_size to a multiple of all that constraints ask for",
        )


def _check_agreement(problem: Problem, wishes: list[ResolvedConstraint]) -> None:
    for what, asked in _ASKED.items():
        by_node: dict[int, ResolvedConstraint] = {}
        for wish in wishes:
            if asked(wish) is None:
                continue
            for node in wish.nodes:
                other = by_node.setdefault(node, wish)
                if asked(other) != asked(wish):
                    raise ConfigurationError(
                        f"{other} and {wish} ask for different {what}",
                        hint="let each node match only one of them",
                        where=repr(problem.graph.nodes[node].name),
                    )


_ASKED: dict[str, Callable[[ResolvedConstraint], object]] = {
    "stages": lambda wish: wish.constraint.stage,
    "devices": lambda wish: wish.devices,
    "splits": lambda wish: wish.constraint.split,
    "micro-batch sizes": lambda wish: wish.constraint.micro_batch_size,
}


def _wish(problem: Problem, constraint: Constraint, positions: dict[str, int]) -> ResolvedConstraint:
    if constraint.nodes is not None:
        nodes = tuple(sorted(positions[name] for name in constraint.nodes))
    else:
        nodes = _matching(problem.graph, constraint.match)
    if not nodes:
        names = [node.name for node in problem.graph.nodes]
        near = difflib.get_close_matches(constraint.match.removeprefix("re:"), names, n=1, cutoff=0.0)
        raise ConfigurationError(
            f"no node's name matches {constraint.match!r}",
            hint=f"the nearest name is {near[0]!r}" if near else "",
            where="constraints",
        )
    if constraint.stage is not None and constraint.stage < 0:
        raise ConfigurationError(f"stage {constraint.stage} asked for {constraint.match!r} is below 0")
    devices = constraint.devices
    if devices is None:
        return ResolvedConstraint(constraint, nodes, None)
    size = problem.cluster.size
    unknown = [device for device in devices if not 0 <= device < size]
    if unknown:
        raise ConfigurationError(
            f"there is no device {unknown[0]}, asked for {constraint.match!r}", hint=f"devices are 0 to {size - 1}"
        )
    return ResolvedConstraint(constraint, nodes, tuple(dict.fromkeys(devices)) or tuple(range(size)))


def _matching(graph: Graph, match: str) -> tuple[int, ...]:
    """Nodes whose name, with or without the slash that exporters put first, matches a glob or a `re:` in full."""
    pattern = match.removeprefix("re:") if match.startswith("re:") else fnmatch.translate(match)
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ConfigurationError(f"{match!r} is no regular expression: {error}", where="constraints") from error
    return tuple(
        index
        for index, node in enumerate(graph.nodes)
        if expression.fullmatch(node.name) or expression.fullmatch(node.name.removeprefix("/"))
    )
