"""Which stages cost the same: those of a model of equal layers are costed once."""

from __future__ import annotations

from collections.abc import Hashable, Set
from dataclasses import dataclass

from autopipe.ir.graph import Graph
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.problem import Work
from autopipe.passes.cost.assignment import StageWork
from autopipe.passes.cost.kept import kept_values
from autopipe.passes.cost.precision import element_bytes
from autopipe.passes.cost.reach import reach
from autopipe.passes.cost.uses import uses_of
from autopipe.passes.lower.gradients import differentiable_values
from autopipe.passes.lower.halves import all_waiting_operands, viewed


@dataclass(frozen=True, slots=True, eq=False)
class StageSignatures:
    """Signatures of a costed graph's nodes and values: numbers equal for those of equal effect on any stage's cost."""

    nodes: tuple[int, ...]
    """A number for each node: its work, what it keeps but for names, how many values it reads and writes."""
    named: tuple[tuple[str, ...], ...]
    """For each node what it reads ("" where absent), writes, and keeps."""
    values: dict[str, tuple[int, str]]
    """For each value a number, and what it is a view of."""


@remembered(GRAPHS)
def signatures_in(graph: Graph, work: tuple[Work, ...], precision: str) -> StageSignatures:
    """The nodes and values of a graph with such work."""
    uses, waiting = uses_of(graph), all_waiting_operands(graph)
    kept, widths = kept_values(graph, uses, precision), element_bytes(graph, uses, precision)
    gradient, consumers = differentiable_values(graph), graph.consumers()
    numbers: dict[Hashable, int] = {}

    def number(content: Hashable) -> int:
        return numbers.setdefault(content, len(numbers))

    nodes, named, values = [], [], {}
    for node, own, keeps, waits in zip(graph.nodes, work, kept, waiting, strict=True):
        figures = own.forward_flops, own.backward_flops, own.forward_bytes, own.backward_bytes, own.measured
        held = tuple((each.key[1], each.bytes, each.dimensions, each.windows) for each in keeps)
        nodes.append(number((figures, held, waits, len(node.inputs), len(node.outputs))))
        named.append((*node.inputs, *node.outputs, *(each.key[0] for each in keeps)))
    for name in dict.fromkeys(name for names in named for name in names if name):
        parameter, root = graph.parameter(name), viewed(graph, name)
        told = widths.get(name), name in gradient, graph.producer(name) is not None
        content = *told, parameter is not None and parameter.trainable, name in consumers
        values[name] = number(content), root
    return StageSignatures(tuple(nodes), tuple(named), values)


def content_of(work: StageWork, crossing: Set[str]) -> Hashable:
    """A stage written down without names: values by the order in which they come.

    Equal for stages that compute, keep, exchange and send the same on devices that are as fast. What a stage holds of
    parameters for others, and which other devices hold the same, is told apart from it. `crossing` are the values that
    some stage receives.
    """
    problem = work.problem
    alike = signatures_in(problem.graph, problem.work, problem.precision)
    numbers = {"": 0}
    told = {""}
    found: list[Hashable] = []

    def add(name: str) -> None:
        if name in told:
            found.append(numbers[name])
            return
        told.add(name)
        own, root = alike.values[name]
        parts = work.parameters.get(name), work.received.get(name), work.given.get(name)
        places = (numbers.setdefault(each, len(numbers)) for each in (name, root))
        found.append((*places, own, parts, name in crossing))

    for name in work.given:
        add(name)
    found.append(len(work.given))
    for each in work.nodes:
        found += id(each.sharing), alike.nodes[each.index]
        for name in alike.named[each.index]:
            add(name)
    return id(problem), work.stage.recompute, reach(problem.cluster, work.stage.devices), tuple(found)
