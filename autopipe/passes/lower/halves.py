"""Stages whose backward a schedule splits: which of their nodes leave gradients to the second half."""

from __future__ import annotations

from dataclasses import replace

from autopipe.ir.graph import Graph, Parameter
from autopipe.ir.ops import operator_of
from autopipe.ir.program import Compute, StageCode
from autopipe.ir.schedule import Phase, Schedule


def split_backwards(graph: Graph, codes: tuple[StageCode, ...], schedule: Schedule) -> tuple[StageCode, ...]:
    """The same stages; where a task computes half a backward, with the nodes whose parameters' gradients can wait."""
    split = {task.stage for order in schedule.tasks for task in order if task.phase is Phase.INPUT_GRADIENT}
    return tuple(replace(code, deferred=_deferred(graph, code)) if code.stage in split else code for code in codes)


def _deferred(graph: Graph, code: StageCode) -> tuple[int, ...]:
    """Nodes with one result that a costly gradient of a parameter follows from: see `Operator.weights`."""
    return tuple(
        each.node for each in code.operations if isinstance(each, Compute) and _leaves_gradient(graph, each.node)
    )


def _leaves_gradient(graph: Graph, index: int) -> bool:
    node = graph.nodes[index]
    row = operator_of(node)
    if row is None or len(node.outputs) != 1:
        return False
    operands = (_viewed_parameter(graph, node.inputs[place]) for place in row.weights if place < len(node.inputs))
    return any(each is not None and each.trainable and each.value.dtype.is_floating for each in operands)


def _viewed_parameter(graph: Graph, name: str) -> Parameter | None:
    """The parameter that a value is or is a view of."""
    while (producer := graph.producer(name)) is not None:
        node = graph.nodes[producer]
        row = operator_of(node)
        if row is None or row.kind != "view":
            return None
        name = node.inputs[0]
    return graph.parameter(name)
