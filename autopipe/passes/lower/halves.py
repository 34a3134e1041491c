"""Stages whose backward a schedule splits: which of their nodes leave gradients to the second half."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autopipe.ir.graph import Graph, Node
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.ops import operator_of
from autopipe.ir.schedule import Phase, Schedule

if TYPE_CHECKING:
    from autopipe.ir.program import StageCode


def split_backwards(graph: Graph, codes: tuple[StageCode, ...], schedule: Schedule) -> tuple[StageCode, ...]:
    """The same stages; where a task computes half a backward, with the nodes whose parameters' gradients can wait."""
    split = {task.stage for order in schedule.tasks for task in order if task.phase is Phase.INPUT_GRADIENT}
    return tuple(replace(code, deferred=_deferred(graph, code)) if code.stage in split else code for code in codes)


def _deferred(graph: Graph, code: StageCode) -> tuple[int, ...]:
    from autopipe.ir.program import Compute  # Costs ask for halves too, and know no programs.

    computed = (each.node for each in code.operations if isinstance(each, Compute))
    return tuple(node for node in computed if waiting_operands(graph, node))


def waiting_operands(graph: Graph, node: int) -> tuple[int, ...]:
    """Positions of the node's operands whose gradients the second half of a split backward computes.

    They are parameters, or views of such, whose gradient costs a product or a lookup of its own (`Operator.weights`).
    A vector is none: its gradient is a sum, cheaper computed than waited for.
    """
    return all_waiting_operands(graph)[node]


@remembered(GRAPHS)
def all_waiting_operands(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """The same for all nodes."""
    return tuple(_waiting_at(graph, node) for node in graph.nodes)


def _waiting_at(graph: Graph, node: Node) -> tuple[int, ...]:
    row = operator_of(node)
    if row is None or len(node.outputs) != 1:
        return ()
    places = (place for place in row.weights if place < len(node.inputs))
    return tuple(place for place in places if _is_weight(graph, node.inputs[place]))


def _is_weight(graph: Graph, name: str) -> bool:
    parameter = graph.parameter(viewed(graph, name))
    if parameter is None or not parameter.trainable:
        return False
    return parameter.value.dtype.is_floating and len(parameter.value.shape) > 1


def viewed(graph: Graph, name: str) -> str:
    """The value that a value is, at the end, a view of."""
    return views(graph).get(name, name)


@remembered(GRAPHS)
def views(graph: Graph) -> dict[str, str]:
    """For each value that is a view the one that it is, at the end, a view of."""
    found: dict[str, str] = {}
    for node in graph.nodes:
        row = operator_of(node)
        if row is not None and row.kind == "view":
            source = node.inputs[0]
            found |= dict.fromkeys(filter(None, node.outputs), found.get(source, source))
    return found
