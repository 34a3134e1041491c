"""Work of the second half of a split backward, and the memory held until then (see `autopipe.passes.lower.halves`).

Qi et al., "Zero Bubble Pipeline Parallelism" (2024), section 2: of a product's backward, half gives the gradient of
what flows, half that of the weight.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.graph import Graph
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.problem import Problem
from autopipe.passes.cost.assignment import StageWork
from autopipe.passes.cost.kept import SavedTensor
from autopipe.passes.cost.memory import State, state_of
from autopipe.passes.cost.precision import PRODUCT_KINDS
from autopipe.passes.cost.uses import uses_of
from autopipe.passes.cost.work import factors
from autopipe.passes.lower.gradients import differentiable_values
from autopipe.passes.lower.halves import all_waiting_operands, views


@remembered(GRAPHS)
def weight_shares(graph: Graph) -> NDArray[np.float64]:
    """For each node the part of its backward that is left to the second half."""
    uses, gradient = uses_of(graph), differentiable_values(graph)
    shares = np.zeros(len(graph.nodes))
    for index, waiting in enumerate(all_waiting_operands(graph)):
        if waiting and uses[index].row.kind not in PRODUCT_KINDS:
            shares[index] = 1.0
        elif waiting:
            shares[index] = len(waiting) / sum(name in gradient for name in factors(graph.nodes[index], uses[index]))
    return shares


def waiting_state(problem: Problem, work: StageWork) -> State:
    """The parameters of a stage that have their gradients from the second half alone."""
    graph = problem.graph
    every, roots = all_waiting_operands(graph), views(graph)
    waiting: set[str] = set()
    flowing: set[str] = set()
    for each in work.nodes:
        if each.use.row.kind == "view":
            continue
        places = every[each.index]
        for place, name in enumerate(each.node.inputs):
            (waiting if place in places else flowing).add(roots.get(name, name))
    names = waiting - flowing
    return state_of(problem, ((name, count) for name, count in work.parameters.items() if name in names))


def weight_kept_bytes(
    graph: Graph, work: StageWork, kept: tuple[tuple[SavedTensor, ...], ...], widths: dict[str, int]
) -> int:
    """Bytes on one device that wait for the second half: what those operators keep, and the gradients of results."""
    operands: dict[tuple[str, int], int] = {}
    gradients = 0
    waiting = all_waiting_operands(graph)
    for each in work.nodes:
        if not waiting[each.index]:
            continue
        for value in kept[each.index]:
            local = value.local_bytes(each.sharing.degrees)
            operands[value.key] = max(local, operands.get(value.key, 0))
        result = each.node.outputs[0]
        layout = each.sharing.results[0]
        gradients += graph.type_of(result).elements * widths[result] // (layout.parts if layout is not None else 1)
    return sum(operands.values()) + gradients
