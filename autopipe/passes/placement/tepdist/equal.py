"""Which stages are equal: layers that repeat are searched once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from autopipe.ir.problem import Problem
from autopipe.passes.analysis.gradients import differentiable_values
from autopipe.passes.analysis.operators import SampleAxes, element_bytes, sample_axes
from autopipe.passes.cost.stage_work import reach
from autopipe.passes.sharding.node_costs import StageOptions


@dataclass(frozen=True, slots=True)
class NodeContents:
    """Signatures of the nodes of a problem, beside their names."""

    problem: Problem
    samples: SampleAxes
    gradient: frozenset[str]
    widths: dict[str, int]

    @staticmethod
    def of(problem: Problem) -> NodeContents:
        """The contents of a problem's graph."""
        samples = sample_axes(problem.graph)
        gradient = differentiable_values(problem.graph) if problem.train else frozenset()
        return NodeContents(problem, samples, gradient, element_bytes(problem.graph, samples.uses, problem.precision))

    def key(self, nodes: Sequence[int], devices: Sequence[int], terms: StageOptions) -> Hashable:
        """Equal for stages whose searches are equal, node by node in order; micro-batches in flight do not count."""
        known: dict[str, int] = {}
        parts: list[Hashable] = [reach(self.problem.cluster, devices), terms.recompute]
        for node in nodes:
            each = self.problem.graph.nodes[node]
            read = tuple(self._read(name, known, terms) if name else None for name in each.inputs)
            written = tuple(self._value(name, known, name in terms.given) if name else None for name in each.outputs)
            parts.append(
                (each.op, each.domain, each.attributes, self.samples.axes[node], terms.allowed.get(node), read, written)
            )
        return tuple(parts)

    def _read(self, name: str, known: dict[str, int], terms: StageOptions) -> Hashable:
        """A value by its number where it is known; what else it is where it is new."""
        if name in known:
            return known[name]
        graph = self.problem.graph
        parameter, constant = graph.parameter(name), graph.constant(name)
        if constant is not None:
            return (self._value(name, known), constant.array.tobytes())
        if parameter is not None:
            return (self._value(name, known), parameter.trainable, name in terms.whole)
        return self._value(name, known)

    def _value(self, name: str, known: dict[str, int], given: bool = False) -> Hashable:
        known[name] = len(known)
        value = self.problem.graph.type_of(name)
        return value.dtype, value.shape, self.widths.get(name), name in self.gradient, given
