"""Work of each stage, with everything the costs of a stage are read from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from autopipe.ir.graph import Graph, Node
from autopipe.ir.layout import Layout, replicated
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.cost.resized import resized
from autopipe.passes.cost.uses import OpInstance, uses_of
from autopipe.passes.lower.exchanges import NodeLayouts, laid, taken_layouts
from autopipe.passes.lower.stages import assign_nodes


@dataclass(frozen=True, slots=True)
class NodeSharing:
    """How a stage's group shares one use: how often each axis is cut, and how it holds each operand and result."""

    degrees: dict[str, int]
    share: float
    """The part of the node that one device computes."""
    operands: tuple[Layout | None, ...]
    results: tuple[Layout | None, ...]
    read: tuple[int | None, ...]
    """Elements that one device reads of each operand."""
    written: tuple[int | None, ...]
    """Elements that it writes of each result."""


@dataclass(frozen=True, slots=True)
class StageNode:
    """One node on one stage."""

    index: int
    node: Node
    use: OpInstance
    sharing: NodeSharing


@dataclass(frozen=True, slots=True)
class StageWork:
    """A stage's nodes in topological order, recomputed ones included, and what its group holds of what they read.

    `problem` is the problem on the stage's own micro-batches: nodes and layouts are of its graph. `given` are values it
    computes that others want, `received` those that other stages compute, `parameters` those it reads, each with the
    number of parts in which the group holds it; `layouts` says how it holds parameters, `given_layouts` and
    `received_layouts` the others. Nodes that want one in different layouts, or stages a parameter, make every device
    hold it whole.
    """

    stage: Stage
    problem: Problem
    nodes: tuple[StageNode, ...]
    given: dict[str, int]
    received: dict[str, int]
    parameters: dict[str, int]
    layouts: dict[str, Layout]
    given_layouts: dict[str, Layout]
    received_layouts: dict[str, Layout]


@remembered(2)
def stage_work(problem: Problem, placement: Placement) -> tuple[StageWork, ...]:
    """The work of each stage, in order: nodes that no wanted output depends on are left out."""
    graph = problem.graph
    wanted = (problem.loss,) if problem.train and problem.loss is not None else graph.outputs
    plans = assign_nodes(graph, placement, wanted)
    problems = problems_of_stages(problem, placement)
    by_size = {own.micro_batch_size: own.graph for own in problems}
    assigners = {size: _assigner(own) for size, own in by_size.items()}
    assigned = [
        tuple(assigners[own.micro_batch_size](index, splits, len(stage.devices)) for index, splits in plan.nodes)
        for stage, own, plan in zip(placement.stages, problems, plans, strict=True)
    ]
    taken = [taken_layouts(own.graph, list(map(laid_as, nodes))) for own, nodes in zip(problems, assigned, strict=True)]
    torn = _torn(graph, taken)
    return tuple(
        _stage_work(own, stage, nodes, plan.outputs, _whole(graph, read, torn))
        for own, stage, plan, nodes, read in zip(problems, placement.stages, plans, assigned, taken, strict=True)
    )


def problems_of_stages(problem: Problem, placement: Placement) -> tuple[Problem, ...]:
    """For each stage the problem on its own micro-batches; equal sizes share one."""
    sizes = [stage.micro_batch_size for stage in placement.stages]
    by_size = {size: resized(problem, size) for size in sizes}
    return tuple(by_size[size] for size in sizes)


def laid_as(each: StageNode) -> NodeLayouts:
    """The node with its layouts, as exchanges are found by."""
    return NodeLayouts(each.index, each.node, each.sharing.operands, each.sharing.results)


def _whole(graph: Graph, layouts: dict[str, Layout], names: frozenset[str]) -> dict[str, Layout]:
    """The layouts with those of `names` whole."""
    return layouts | {name: replicated(graph.type_of(name).shape) for name in names & layouts.keys()}


def _stage_work(
    problem: Problem, stage: Stage, nodes: tuple[StageNode, ...], outputs: tuple[str, ...], read: dict[str, Layout]
) -> StageWork:
    graph = problem.graph
    written = {
        name: layout
        for each in nodes
        for name, layout in zip(each.node.outputs, each.sharing.results, strict=True)
        if layout is not None
    }
    layouts = {name: layout for name, layout in read.items() if graph.parameter(name) is not None}
    given = {name: written[name] for name in outputs if name in written}
    received = {name: layout for name, layout in read.items() if graph.producer(name) is not None}
    return StageWork(
        stage=stage,
        problem=problem,
        nodes=nodes,
        given=_parts(given),
        received=_parts(received),
        parameters=_parts(layouts),
        layouts=layouts,
        given_layouts=given,
        received_layouts=received,
    )


def _parts(layouts: dict[str, Layout]) -> dict[str, int]:
    return {name: layout.parts for name, layout in layouts.items()}


def _torn(graph: Graph, read: list[dict[str, Layout]]) -> frozenset[str]:
    """Parameters that stages would cut differently: all of them hold these whole."""
    wanted: dict[str, set[tuple[int, ...]]] = {}
    for layouts in read:
        for name, layout in layouts.items():
            if graph.parameter(name) is not None:
                wanted.setdefault(name, set()).add(layout.local_shape())
    return frozenset(name for name, found in wanted.items() if len(found) > 1)


@remembered(GRAPHS)
def _assigner(graph: Graph) -> Callable[[int, tuple[Split, ...], int], StageNode]:
    """A function from a node, its splits and its group's size to the node as the group has it."""
    uses = uses_of(graph)
    known: dict[tuple[int, tuple[Split, ...], int], NodeSharing] = {}

    def assigned(index: int, splits: tuple[Split, ...], group: int) -> StageNode:
        use = uses[index]
        key = (id(use), splits, group)
        sharing = known.get(key)
        if sharing is None:
            sharing = known[key] = _sharing(graph, index, use, splits, group)
        return StageNode(index, graph.nodes[index], use, sharing)

    return assigned


def _sharing(graph: Graph, index: int, use: OpInstance, splits: tuple[Split, ...], group: int) -> NodeSharing:
    degrees = {split.axis: split.degree for split in splits}
    names = use.space.extents()
    # An axis that the node lacks only shares its work: code generation refuses it, by name.
    own = tuple(split for split in splits if split.axis in names)
    form = laid(graph, index, use.space, own, group)
    share = 1.0 / math.prod(degrees.values())
    read, written = (
        tuple(None if layout is None else layout.local_elements for layout in layouts)
        for layouts in (form.operands, form.results)
    )
    return NodeSharing(degrees, share, form.operands, form.results, read, written)
