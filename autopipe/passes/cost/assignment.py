"""What each stage computes, with everything the costs of a stage are read from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopipe.ir.graph import Graph, Node
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.space import Dimension
from autopipe.passes.cost.uses import Use, uses_of
from autopipe.passes.lower.stages import assign_nodes


@dataclass(frozen=True, slots=True)
class Assigned:
    """One node on one stage. `degrees` says how often each of its axes is cut."""

    index: int
    node: Node
    use: Use
    degrees: dict[str, int]

    @property
    def share(self) -> float:
        """The part of the node that one device computes."""
        return 1.0 / math.prod(self.degrees.values())

    def cuts(self, dimensions: tuple[Dimension, ...] | None) -> tuple[int, ...]:
        """How often each dimension of one of its tensors is cut."""
        if not self.degrees or dimensions is None:
            return ()
        found = tuple(math.prod(self.degrees.get(axis, 1) for axis in dimension) for dimension in dimensions)
        return found if any(count > 1 for count in found) else ()


@dataclass(frozen=True, slots=True)
class StageWork:
    """A stage's nodes in topological order, recomputed ones included, and the values that others need of it."""

    stage: Stage
    nodes: tuple[Assigned, ...]
    outputs: tuple[str, ...]

    def received(self, graph: Graph) -> dict[str, int]:
        """Values that other stages compute, and in how many parts the group holds each."""
        own = {name for each in self.nodes for name in each.node.outputs}
        return {
            name: parts
            for name, parts in self._reads().items()
            if name not in own and graph.producer(name) is not None
        }

    def parameters(self, graph: Graph) -> dict[str, int]:
        """Names of the parameters the stage reads, and in how many parts the group holds each.

        Nodes that want one in different layouts make every device hold it whole.
        """
        return {name: parts for name, parts in self._reads().items() if graph.parameter(name) is not None}

    def _reads(self) -> dict[str, int]:
        cuts: dict[str, set[tuple[int, ...]]] = {}
        for each in self.nodes:
            for name, dimensions in zip(each.node.inputs, each.use.space.operands, strict=True):
                if name:
                    cuts.setdefault(name, set()).add(each.cuts(dimensions))
        return {name: math.prod(next(iter(found))) if len(found) == 1 else 1 for name, found in cuts.items()}


def stage_work(problem: Problem, placement: Placement) -> tuple[StageWork, ...]:
    """The work of each stage, in order: nodes that no wanted output depends on are left out."""
    graph = problem.graph
    uses = uses_of(graph)
    wanted = (problem.loss,) if problem.train and problem.loss is not None else graph.outputs
    return tuple(
        StageWork(
            stage,
            tuple(
                Assigned(index, graph.nodes[index], uses[index], {split.axis: split.degree for split in splits})
                for index, splits in plan.nodes
            ),
            plan.outputs,
        )
        for stage, plan in zip(placement.stages, assign_nodes(graph, placement, wanted), strict=True)
    )
