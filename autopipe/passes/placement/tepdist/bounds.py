"""Lower bound and estimate of a factorisation, before any of its splits are searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Device
from autopipe.ir.placement import Placement, Stage, stage_edges
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.stage_nodes import assign_nodes
from autopipe.passes.cost.memory import state_of
from autopipe.passes.cost.memory_check import out_of_memory
from autopipe.passes.cost.roofline import accumulate_per_byte, node_seconds
from autopipe.passes.cost.stage_work import exchange_of_gradients
from autopipe.passes.placement.tepdist.meshes import Mesh

_Floats = NDArray[np.float64]

_Kind = tuple[tuple[Device, ...], int]
"""Signature of a group of devices: their kinds, and how many they are."""


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Bounds for micro-batches of any size up to the problem's.

    A part of the samples is counted as that part of the work, parameters read included, and a launch: never too much.
    """

    problem: Problem
    is_live: NDArray[np.bool_]
    """True if a step runs a node."""
    _seconds: dict[tuple[_Kind, int], _Floats] = field(default_factory=dict)

    @staticmethod
    def of(problem: Problem) -> Bounds:
        """The bounds of a problem."""
        whole = Stage(tuple(range(len(problem.graph.nodes))), (0,), problem.micro_batch_size)
        wanted = (problem.loss,) if problem.train and problem.loss is not None else problem.graph.outputs
        (plan,) = assign_nodes(problem.graph, Placement((whole,)), wanted)
        return Bounds(problem, np.isin(np.arange(len(problem.graph.nodes)), [node for node, _ in plan.nodes]))

    def step_s(self, mesh: Mesh, micro_batches: int) -> float:
        """Seconds that no step can be shorter than: the fullest stage does a fair part of the work at least.

        Whatever stages weigh, that one takes as long as their weighted mean at least, and so does, node by node, where
        the node weighs least: the weights are the stages' speeds.
        """
        kinds = self._kinds(mesh)
        if len(kinds) == 1:
            (kind,) = kinds
            return micro_batches * self._work_s(kind, micro_batches) / mesh.stages
        seconds = [self._node_s(kind, micro_batches) for kind in kinds]
        speeds = [1 / float(each.sum()) for each in seconds]
        whole = sum(speed * count for speed, count in zip(speeds, map(len, kinds.values()), strict=True))
        least = np.minimum.reduce([speed / whole * each for speed, each in zip(speeds, seconds, strict=True)])
        return micro_batches * float(least.sum())

    def divided_s(self, mesh: Mesh, micro_batches: int, stages: Sequence[Sequence[int]]) -> float:
        """The same where it is known which nodes a stage has: all of it in turn, as fast as its devices compute.

        Before its first task a micro-batch comes through the stages before it, and after its last goes back.
        """
        problem = self.problem
        groups = zip(stages, mesh.groups, strict=True)
        placement = Placement(tuple(Stage(tuple(nodes), group, problem.micro_batch_size) for nodes, group in groups))
        kinds = map(self._kind, mesh.groups)
        own = [
            float(self._node_s(kind, micro_batches)[list(nodes)].sum())
            for kind, nodes in zip(kinds, stages, strict=True)
        ]
        before = [0.0] * len(own)
        for source, target in stage_edges(problem.graph, placement):
            before[target] = max(before[target], before[source] + own[source])
        return max(micro_batches * each + way for each, way in zip(own, before, strict=True))

    def estimate_s(self, mesh: Mesh, micro_batches: int) -> float:
        """About what a step takes where stages are even: filled, drained, gradients added up and summed by samples.

        Of stages in a row that take equally long each waits for those before it: p of them take m + p - 1 times what
        each takes of one of m micro-batches.
        """
        kinds = self._kinds(mesh)
        even = 1 / sum(len(groups) / self._work_s(kind, micro_batches) for kind, groups in kinds.items())
        names = ((parameter.value.name, 1) for parameter in self.problem.graph.parameters)
        share = state_of(self.problem, names).gradient_bytes / mesh.stages
        end = max(self._end_s(groups[0], micro_batches, share) for groups in kinds.values())
        return (micro_batches + mesh.stages - 1) * even + end

    def _end_s(self, group: Sequence[int], micro_batches: int, share: float) -> float:
        """Seconds of adding up `share` bytes of gradients, split evenly, and of summing them by samples, whole."""
        slowest = max(accumulate_per_byte(device) for device in self.problem.cluster.kinds_among(group))
        gradients = exchange_of_gradients(self.problem, group).seconds(share)
        return gradients + (micro_batches - 1) * slowest * share / len(group)

    def check_memory(self) -> None:
        """Raise InfeasibleError where parameters and their state, shared by all devices, are more than memory holds."""
        problem = self.problem
        names = [parameter.value.name for parameter in problem.graph.parameters]
        least = state_of(problem, ((name, 1) for name in names)).total // problem.cluster.size
        device = max(range(problem.cluster.size), key=problem.memory_of)
        if least > problem.memory_of(device):
            raise out_of_memory(problem, [0], 1, device, least, least=True)

    def _kinds(self, mesh: Mesh) -> dict[_Kind, list[tuple[int, ...]]]:
        """The groups of each kind."""
        found: dict[_Kind, list[tuple[int, ...]]] = {}
        for group in mesh.groups:
            found.setdefault(self._kind(group), []).append(group)
        return found

    def _kind(self, group: Sequence[int]) -> _Kind:
        return self.problem.cluster.kinds_among(group), len(group)

    def _work_s(self, kind: _Kind, micro_batches: int) -> float:
        """Seconds of one micro-batch through the whole model, every node shared by such a group."""
        return float(self._node_s(kind, micro_batches).sum())

    def _node_s(self, kind: _Kind, micro_batches: int) -> _Floats:
        """The same of each node, on the fastest device of the group."""
        problem, (devices, width) = self.problem, kind
        parts = width * micro_batches // problem.micro_batches
        if (kind, parts) not in self._seconds:
            again = problem.train and problem.recompute == "full"
            each = []
            for device in devices:
                forward, backward = node_seconds(problem.work, device, problem.precision, 1.0 / parts)
                each.append(forward * (1 + again) + (backward if problem.train else 0.0))
            self._seconds[kind, parts] = np.where(self.is_live, np.minimum.reduce(each), 0.0)
        return self._seconds[kind, parts]
