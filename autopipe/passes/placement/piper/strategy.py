"""Piper: the strategy and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from autopipe.ir.errors import ConfigurationError, InfeasibleError, OutOfMemoryError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.batching import Division
from autopipe.passes.cost.memory_check import check_operators, describe_kinds, equal_device_runs, fitted
from autopipe.passes.cost.roofline import mean_seconds
from autopipe.passes.partition.downsets import all_downsets, count_downsets
from autopipe.passes.placement.piper.blocks import Blocks, join_nodes
from autopipe.passes.placement.piper.messages import messages_between
from autopipe.passes.placement.piper.prices import Chains, StagePrices
from autopipe.passes.placement.piper.search import DownsetStage, search, search_steps, step_seconds
from autopipe.passes.schedule.device_order import SweepResult, best_size
from autopipe.passes.sharding.regions import check_wishes


@dataclass(frozen=True, slots=True)
class Piper:
    """Cuts the graph into a chain of stages, each of which may hold parts of several branches.

    Tarnawski, Narayanan, Phanishayee, "Piper: Multidimensional Planner for DNN Parallelization" (NeurIPS 2021): over
    all downsets of the graph's blocks, about a layer each, it finds the stages whose slowest one is fastest, and looks
    at fewer and slower ones for the sake of a shorter step. A stage's devices share samples, layers as in Megatron-LM,
    or both, and it may run its forward again. Micro-batches are as large as gives the shortest step, where they are
    left open. The number of downsets grows exponentially with the number of parallel branches.
    """

    max_downsets: int = 10_000
    """The most downsets that it takes on."""
    objective: Literal["step", "slowest_stage"] = "step"
    """Objective: the time of a whole step, filling and draining included, or, as published, of the slowest stage."""

    name: ClassVar[str] = "piper"

    def division(self, graph: Graph) -> Division:
        """It chooses one size of micro-batches for all stages."""
        return Division.OWN

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError where there is nothing to place or devices differ, ConfigurationError for an option."""
        if self.max_downsets < 1:
            raise ConfigurationError(
                f"max_downsets is {self.max_downsets}", hint="it must be at least 1", where="strategy"
            )
        check_operators(problem)
        if len(equal_device_runs(problem.cluster)) > 1:
            everything = describe_kinds(problem.cluster, range(problem.cluster.size))
            raise InfeasibleError(
                f"piper takes a stage to be as fast wherever it stands, and devices differ: {everything}",
                hint="strategies pipedream, graphpipe and tepdist weigh kinds of devices; with cluster.straddle piper "
                "counts all as the slowest",
            )

    def run(self, problem: Problem) -> Placement:
        """The chain.

        Raises InfeasibleError, with the number of downsets, where there are too many, and where memory holds no chain;
        ConfigurationError for a constraint that the chain does not fulfil.
        """
        chains = self._chains(problem)
        placement = best_size(problem, lambda sized, step: self._answer(sized, chains, step))
        check_wishes(problem, placement, self.name)
        return placement

    def _chains(self, problem: Problem) -> Chains:
        forward, backward = mean_seconds(problem)
        blocks = join_nodes(problem.graph, forward + backward)
        self._check_count(blocks)
        downsets, samples = all_downsets(blocks.needs), sample_axes(problem.graph)
        received, sent = messages_between(problem.graph, blocks, downsets, samples)
        return Chains(blocks, downsets, received, sent, problem.micro_batch_size)

    def _check_count(self, blocks: Blocks) -> None:
        count = count_downsets(blocks.needs)
        if count is None or count > self.max_downsets:
            counted = "too many downsets to count" if count is None else f"{count} downsets"
            raise InfeasibleError(
                f"the model's {len(blocks.nodes)} blocks of operators have {counted}, and piper goes through all of "
                f"them, up to max_downsets = {self.max_downsets}",
                hint="strategies pipedream and graphpipe do not depend on their number",
            )

    def _answer(self, problem: Problem, chains: Chains, most_step_s: float) -> SweepResult:
        """The best chain for the micro-batches of a problem.

        Raises InfeasibleError where memory holds none, or none whose step could be shorter than `most_step_s`.
        """
        prices, count = StagePrices(problem, chains), problem.micro_batches
        by_step = self.objective == "step"
        pieces = search_steps(prices, most_step_s) if by_step else search(prices, most_step_s / count)
        if not pieces:
            raise OutOfMemoryError(
                f"memory holds no chain of stages of these blocks on {problem.cluster.size} devices",
                hint="use more devices, smaller micro-batches, a higher memory limit"
                + ("" if problem.recompute == "auto" else " or recompute: auto"),
            )
        stages = tuple(_stage(problem, chains, piece) for piece in pieces)
        return SweepResult(fitted(problem, Placement(stages)), step_seconds(pieces, count))


def _stage(problem: Problem, chains: Chains, piece: DownsetStage) -> Stage:
    holds = chains.downsets.holds
    blocks = (holds[piece.outer] & ~holds[piece.inner]).nonzero()[0].tolist()
    return Stage(
        nodes=tuple(sorted(node for block in blocks for node in chains.blocks.nodes[block])),
        devices=tuple(range(piece.device, piece.device + piece.sharing.devices)),
        micro_batch_size=problem.micro_batch_size,
        splits=tuple(sorted(split for block in blocks for split in piece.sharing.splits[block])),
        recompute=piece.recompute,
    )
