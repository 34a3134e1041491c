"""What each stage computes, with everything the costs of a stage are read from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from autopipe.ir.graph import Graph, Node
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.space import Dimension
from autopipe.passes.cost.uses import Use, uses_of
from autopipe.passes.lower.stages import assign_nodes

Cuts = tuple[int, ...]
"""How often each dimension of a tensor is cut; () where none is."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a stage's group shares one use: how often each axis is cut, and with it each operand and result."""

    degrees: dict[str, int]
    share: float
    """The part of the node that one device computes."""
    operands: tuple[Cuts, ...]
    results: tuple[Cuts, ...]


@dataclass(frozen=True, slots=True)
class Assigned:
    """One node on one stage."""

    index: int
    node: Node
    use: Use
    sharing: Sharing


@dataclass(frozen=True, slots=True)
class StageWork:
    """A stage's nodes in topological order, recomputed ones included, and what its group holds of what they read.

    `given` are values it computes that others want, `received` those that other stages compute, `parameters` those it
    reads, each with the number of parts in which the group holds it. Nodes that want one in different layouts, or
    stages a parameter, make every device hold it whole.
    """

    stage: Stage
    nodes: tuple[Assigned, ...]
    given: dict[str, int]
    received: dict[str, int]
    parameters: dict[str, int]


def stage_work(problem: Problem, placement: Placement) -> tuple[StageWork, ...]:
    """The work of each stage, in order: nodes that no wanted output depends on are left out."""
    graph = problem.graph
    uses = uses_of(graph)
    sharing = _sharings()
    wanted = (problem.loss,) if problem.train and problem.loss is not None else graph.outputs
    plans = assign_nodes(graph, placement, wanted)
    assigned = [
        tuple(
            Assigned(index, graph.nodes[index], uses[index], sharing(uses[index], splits))
            for index, splits in plan.nodes
        )
        for plan in plans
    ]
    read = [_cuts_read(nodes) for nodes in assigned]
    torn = _torn(graph, read)
    return tuple(
        _stage_work(graph, stage, nodes, plan.outputs, cuts | dict.fromkeys(torn & cuts.keys(), ()))
        for stage, plan, nodes, cuts in zip(placement.stages, plans, assigned, read, strict=True)
    )


def _stage_work(
    graph: Graph, stage: Stage, nodes: tuple[Assigned, ...], outputs: tuple[str, ...], read: dict[str, Cuts]
) -> StageWork:
    written = {
        name: math.prod(cut)
        for each in nodes
        for name, cut in zip(each.node.outputs, each.sharing.results, strict=True)
    }
    parts = {name: math.prod(cut) for name, cut in read.items()}
    return StageWork(
        stage=stage,
        nodes=nodes,
        given={name: written[name] for name in outputs if name in written},
        received={
            name: count for name, count in parts.items() if graph.producer(name) is not None and name not in written
        },
        parameters={name: count for name, count in parts.items() if graph.parameter(name) is not None},
    )


def _cuts_read(nodes: tuple[Assigned, ...]) -> dict[str, Cuts]:
    """How a group holds each value it reads: as all readers want it, else whole."""
    cuts: dict[str, Cuts] = {}
    for each in nodes:
        for name, cut in zip(each.node.inputs, each.sharing.operands, strict=True):
            if name and cuts.setdefault(name, cut) != cut:
                cuts[name] = ()
    return cuts


def _torn(graph: Graph, read: list[dict[str, Cuts]]) -> frozenset[str]:
    """Parameters that stages would cut differently: all of them hold these whole."""
    wanted: dict[str, set[Cuts]] = {}
    for cuts in read:
        for name, cut in cuts.items():
            if graph.parameter(name) is not None:
                wanted.setdefault(name, set()).add(cut)
    return frozenset(name for name, found in wanted.items() if len(found) > 1)


def _sharings() -> Callable[[Use, tuple[Split, ...]], Sharing]:
    """A function from a use and its splits to their sharing; equal ones are worked out once."""
    known: dict[tuple[int, tuple[Split, ...]], Sharing] = {}

    def sharing(use: Use, splits: tuple[Split, ...]) -> Sharing:
        key = (id(use), splits)
        found = known.get(key)
        if found is None:
            degrees = {split.axis: split.degree for split in splits}
            found = known[key] = Sharing(
                degrees,
                1.0 / math.prod(degrees.values()),
                tuple(_cuts(dimensions, degrees) for dimensions in use.space.operands),
                tuple(_cuts(dimensions, degrees) for dimensions in use.space.results),
            )
        return found

    return sharing


def _cuts(dimensions: tuple[Dimension, ...] | None, degrees: dict[str, int]) -> Cuts:
    if not degrees or dimensions is None:
        return ()
    found = tuple(math.prod(degrees.get(axis, 1) for axis in dimension) for dimension in dimensions)
    return found if any(count > 1 for count in found) else ()
