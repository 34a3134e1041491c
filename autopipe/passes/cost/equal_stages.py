"""Which stages cost the same: those of a model of equal layers are costed once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from autopipe.passes.cost.assignment import Assigned, StageWork
from autopipe.passes.cost.kept import Kept
from autopipe.passes.cost.reach import reach
from autopipe.passes.lower.halves import viewed, waiting_operands


@dataclass(slots=True, eq=False)
class Content:
    """One stage, written down without names: nodes and values by the order in which they come."""

    work: StageWork
    kept: Sequence[Sequence[Kept]]
    """For each node of the graph what backward needs of it."""
    widths: Mapping[str, int]
    gradient: Set[str]
    """Values that gradients flow through."""
    crossing: Set[str]
    """Values that some stage receives."""
    _numbers: dict[str, int] = field(default_factory=dict)

    def key(self) -> Hashable:
        """Equal for stages that compute, keep, exchange and send the same on devices that are as fast.

        What a stage holds of parameters for others, and which other devices hold the same, is told apart from it.
        """
        work = self.work
        given = tuple(self._value(name) for name in work.given)
        parts = tuple(self._node(each) for each in work.nodes)
        return id(work.problem), work.stage.recompute, reach(work.problem.cluster, work.stage.devices), given, parts

    def _node(self, each: Assigned) -> Hashable:
        work, node = self.work.problem.work[each.index], each.node
        return (
            id(each.sharing),
            (work.forward_flops, work.backward_flops, work.forward_bytes, work.backward_bytes, work.measured),
            tuple([self._value(name) if name else None for name in node.inputs]),
            tuple([self._value(name) if name else None for name in node.outputs]),
            tuple([self._kept(kept) for kept in self.kept[each.index]]),
            waiting_operands(self.work.problem.graph, each.index),
        )

    def _kept(self, kept: Kept) -> Hashable:
        name, width = kept.key
        return self._number(name), width, kept.bytes, kept.dimensions, kept.windows

    def _value(self, name: str) -> Hashable:
        """A value by its number, and all that is told of it where it is new."""
        if name in self._numbers:
            return self._numbers[name]
        work, graph = self.work, self.work.problem.graph
        parameter = graph.parameter(name)
        return (
            self._number(name),
            self._number(viewed(graph, name)),
            self.widths[name],
            name in self.gradient,
            graph.producer(name) is not None,
            parameter is not None and parameter.trainable,
            work.parameters.get(name),
            work.received.get(name),
            work.given.get(name),
            name in self.crossing,
            name in graph.consumers(),
        )

    def _number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))
