"""Strategies of experts, by hand: one rule a kind of network."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.ops import operator_of
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.batching import Division
from autopipe.passes.cost.memory_check import check_one_kind, check_operators, check_state, fitted
from autopipe.passes.placement.expert.one_weird_trick import by_one_weird_trick
from autopipe.passes.placement.expert.recurrent import data_and_pipeline
from autopipe.passes.placement.expert.tensor_parallel import tensor_parallel
from autopipe.passes.sharding.regions import check_samples, check_wishes


@dataclass(frozen=True, slots=True)
class Expert:
    """Splits a model as experts do by hand: by the kind of network it is.

    A network with recurrent layers becomes a pipeline of them, each layer's devices sharing samples (Wu et al., GNMT,
    2016); one that mostly convolves is split by one_weird_trick (Krizhevsky, 2014). In any other, groups of devices
    share attention heads, columns and rows of feed-forward layers and the vocabulary, and the groups share samples
    (Shoeybi et al., Megatron-LM, 2019; Shazeer et al., Mesh-TensorFlow, 2018).
    """

    tensor: int = 0
    """How many devices share a layer's heads, columns and vocabulary; 0 takes as many of a node as can share most of
    them. Recurrent and convolutional networks have no such groups."""

    name: ClassVar[str] = "expert"

    def division(self, graph: Graph) -> Division:
        """Recurrent layers become stages."""
        return Division.MANY if "recurrent" in _kinds(graph) else Division.FEW

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError for a negative degree, InfeasibleError for an empty model or devices that differ.

        Also where groups that share layers cannot hold all of them.
        """
        if self.tensor < 0:
            raise ConfigurationError(f"tensor is {self.tensor}", hint="it must be 0 or more", where="strategy")
        check_operators(problem)
        check_one_kind(problem, self.name)
        if not _kinds(problem.graph) & {"recurrent", "convolution"}:
            check_state(problem, problem.cluster.size, self.tensor or problem.cluster.devices_per_node)

    def run(self, problem: Problem) -> Placement:
        """The placement.

        Raises ConfigurationError for a constraint it does not fulfil, and InfeasibleError where devices cannot share
        the samples, `tensor` does not divide them, or memory does not hold the placement.
        """
        placement = self._placed(problem)
        check_wishes(problem, placement, self.name)
        return fitted(problem, placement)

    def _placed(self, problem: Problem) -> Placement:
        work: Counter[str] = Counter()
        for each in problem.work:
            work[each.kind] += int(each.forward_flops)
        if work["recurrent"]:
            return data_and_pipeline(problem)
        if work["convolution"] > work["matmul"]:
            check_samples(problem, problem.cluster.size, self.name)
            return by_one_weird_trick(problem)
        return tensor_parallel(problem, self.tensor)


def _kinds(graph: Graph) -> set[str]:
    """The classes of the model's operators."""
    return {row.kind for node in graph.nodes if (row := operator_of(node)) is not None}
