"""What the second half of a split backward computes, and what it holds until then (see `autopipe.passes.lower.halves`).

Qi et al., "Zero Bubble Pipeline Parallelism" (2024), section 2: of a product's backward, half gives the gradient of
what flows, half that of the weight.
"""

from __future__ import annotations

from autopipe.ir.graph import Graph
from autopipe.ir.problem import Problem
from autopipe.passes.cost.assignment import Assigned, StageWork
from autopipe.passes.cost.kept import Kept
from autopipe.passes.cost.memory import State, state_of
from autopipe.passes.cost.precision import PRODUCT_KINDS
from autopipe.passes.cost.work import factors
from autopipe.passes.lower.halves import viewed, waiting_operands


def weight_shares(graph: Graph, work: StageWork, gradient: frozenset[str]) -> tuple[float, ...]:
    """For each of the stage's nodes the part of its backward that is left to the second half.

    `gradient` are the values through which gradients flow.
    """
    return tuple(_weight_share(graph, each, gradient) for each in work.nodes)


def _weight_share(graph: Graph, each: Assigned, gradient: frozenset[str]) -> float:
    waiting = waiting_operands(graph, each.index)
    if not waiting:
        return 0.0
    if each.use.row.kind not in PRODUCT_KINDS:
        return 1.0
    return len(waiting) / sum(name in gradient for name in factors(each.node, each.use))


def waiting_state(problem: Problem, work: StageWork) -> State:
    """The parameters of a stage that have their gradients from the second half alone."""
    graph = problem.graph
    waiting: set[str] = set()
    flowing: set[str] = set()
    for each in work.nodes:
        places = waiting_operands(graph, each.index)
        for place, name in enumerate(each.node.inputs):
            if name and each.use.row.kind != "view":
                (waiting if place in places else flowing).add(viewed(graph, name))
    names = waiting - flowing
    return state_of(problem, ((name, count) for name, count in work.parameters.items() if name in names))


def weight_kept_bytes(graph: Graph, work: StageWork, kept: tuple[tuple[Kept, ...], ...], widths: dict[str, int]) -> int:
    """Bytes on one device that wait for the second half: what those operators keep, and the gradients of results."""
    operands: dict[tuple[str, int], int] = {}
    gradients = 0
    for each in work.nodes:
        if not waiting_operands(graph, each.index):
            continue
        for value in kept[each.index]:
            local = value.local_bytes(each.sharing.degrees)
            operands[value.key] = max(local, operands.get(value.key, 0))
        result = each.node.outputs[0]
        layout = each.sharing.results[0]
        gradients += graph.type_of(result).elements * widths[result] // (layout.parts if layout is not None else 1)
    return sum(operands.values()) + gradients
