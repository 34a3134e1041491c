"""PipeDream: the strategy and its options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import numpy as np

from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.chain import Matrix, make_chain
from autopipe.passes.analysis.constraints import wishes_of
from autopipe.passes.batching import Division
from autopipe.passes.cost.memory_check import check_operators, out_of_memory
from autopipe.passes.cost.range_tables import make_tables
from autopipe.passes.cost.roofline import mean_seconds
from autopipe.passes.placement.pipedream.obey import ChainConstraint, groups_of, ruled, rules_of
from autopipe.passes.placement.pipedream.prices import StagePrices
from autopipe.passes.placement.pipedream.search import ChainStage, Price, search
from autopipe.passes.schedule.device_order import SweepResult, best_order, best_size

_MOST_BLOCKS = 224
"""Cuts that the search considers: its time grows with their square."""

_EVEN_ENOUGH = 1.001
"""How much longer a step may be, as a factor, for stages that are more even: costs are not known better than that."""


@dataclass(frozen=True, slots=True)
class PipeDream:
    """Cuts the operators, in one line, into stages that take equally long, each on one or several devices."""

    max_stages: int | None = None
    """The most stages; as many as there are devices where nothing is given."""
    replicate: bool = True
    """True if several devices may share a stage's samples."""
    sweep: bool = False
    """True if it tries all sizes of micro-batches, where they are left open, for the one with the shortest step."""

    objective: Literal["step", "slowest_stage"] = "step"
    """Objective: the time of a whole step, filling and draining included, or, as published, of the slowest stage."""

    name: ClassVar[str] = "pipedream"

    def division(self, graph: Graph) -> Division:
        """It may make several stages; with `sweep` it chooses one size of micro-batches for all of them."""
        return Division.OWN if self.sweep else Division.MANY

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError where there is nothing to place, ConfigurationError for options out of range."""
        if self.max_stages is not None and self.max_stages < 1:
            raise ConfigurationError(f"max_stages is {self.max_stages}", hint="it must be at least 1", where="strategy")
        check_operators(problem)

    def run(self, problem: Problem) -> Placement:
        """The chain with the least estimated time of a step, or of its slowest stage.

        It uses all devices, or as many as it can where the operators or the samples are too few to share. Raises
        InfeasibleError where memory or the constraints allow no chain, ConfigurationError for constraints that it
        cannot follow.
        """
        return best_order(problem, lambda ordered: best_size(ordered, lambda sized, _: self._answer(sized)))

    def _answer(self, problem: Problem) -> SweepResult:
        """The chain for the problem's micro-batches."""
        wishes = wishes_of(problem)
        forward, backward = mean_seconds(problem)
        tables = make_tables(problem, make_chain(problem.graph, forward + backward, _MOST_BLOCKS, groups_of(wishes)))
        rules = rules_of(wishes, tables.chain, tables.samples)
        # Constraints speak of the devices there are; without any, fewer will do.
        least_devices = problem.cluster.size if rules else 1
        for devices in range(problem.cluster.size, least_devices - 1, -1):
            prices = StagePrices(replace(tables, problem=replace(problem, cluster=problem.cluster.take(devices))))
            pieces = self._best(prices, rules)
            if pieces:
                return SweepResult(_placement(prices, pieces), _step_seconds(prices, pieces))
            nearest = min(self._answers(prices, prices.excess, rules), key=_highest, default=[])
            if nearest:
                raise _out_of_memory(prices.problem, nearest)
        raise InfeasibleError(
            f"no chain of stages over {problem.cluster.size} devices obeys "
            + " and ".join(str(wish) for wish in wishes),
            hint="strategy manual follows any constraint",
        )

    def _answers(self, prices: StagePrices, price: Price, rules: tuple[ChainConstraint, ...]) -> list[list[ChainStage]]:
        """The best chain for each number of stages that has one."""
        devices, blocks = prices.problem.cluster.size, prices.tables.chain.blocks
        most = min(self.max_stages or devices, devices)
        degrees = self._degrees(prices.problem)
        if all(rule.stage is None for rule in rules):
            return list(search(blocks, devices, most, degrees, ruled(price, rules, blocks + 1, 0) if rules else price))
        found: list[list[ChainStage]] = []
        for stages in range(1, most + 1):
            answers = search(blocks, devices, stages, degrees, ruled(price, rules, blocks + 1, stages))
            found.extend(pieces for pieces in answers if len(pieces) == stages)
        return found

    def _degrees(self, problem: Problem) -> tuple[int, ...]:
        """Numbers of devices that may share a stage's samples."""
        if not self.replicate or not problem.graph.batch_axes:
            return (1,)
        samples = problem.micro_batch_size
        return tuple(degree for degree in range(1, problem.cluster.size + 1) if samples % degree == 0)

    def _best(self, prices: StagePrices, rules: tuple[ChainConstraint, ...]) -> list[ChainStage]:
        """The best chain over all numbers of stages, the fewest of equals."""
        step = partial(_step_seconds, prices)
        aim = step if self.objective == "step" else _highest
        best = min(self._answers(prices, prices.seconds, rules), key=aim, default=[])
        if len(best) < 3:
            return best
        evened = self._evened(prices, rules, best)
        return evened if evened and step(evened) <= step(best) * _EVEN_ENOUGH else best

    def _evened(
        self, prices: StagePrices, rules: tuple[ChainConstraint, ...], best: list[ChainStage]
    ) -> list[ChainStage]:
        """As many stages, none slower than the slowest of `best`, the others even: with the least sum of squares."""
        slowest = _highest(best) * (1 + 1e-9)

        def squared(place: int, device: int, degree: int) -> Matrix:
            seconds = prices.seconds(place, device, degree)
            return np.where(seconds <= slowest, seconds**2, np.inf)

        blocks = prices.tables.chain.blocks
        price = ruled(squared, rules, blocks + 1, len(best))
        answers = search(blocks, prices.problem.cluster.size, len(best), self._degrees(prices.problem), price, np.add)
        evened = next((pieces for pieces in answers if len(pieces) == len(best)), [])
        return [replace(piece, price=piece.price**0.5) for piece in evened]


def _highest(pieces: list[ChainStage]) -> float:
    return max(piece.price for piece in pieces)


def _step_seconds(prices: StagePrices, pieces: list[ChainStage]) -> float:
    """Seconds of a step, filling and draining included."""
    return sum(piece.price for piece in pieces) + (prices.problem.micro_batches - 1) * _highest(pieces)


def _placement(prices: StagePrices, pieces: list[ChainStage]) -> Placement:
    problem, chain = prices.problem, prices.tables.chain
    stages = []
    for index, piece in enumerate(pieces):
        nodes = chain.nodes(piece.first, piece.stop)
        stages.append(
            Stage(
                nodes=nodes,
                devices=tuple(range(piece.device, piece.device + piece.degree)),
                micro_batch_size=problem.micro_batch_size,
                splits=prices.tables.samples.splits(nodes, piece.degree),
                recompute=prices.recomputes(len(pieces) - index, piece),
            )
        )
    return Placement(tuple(stages))


def _out_of_memory(problem: Problem, pieces: list[ChainStage]) -> InfeasibleError:
    """The error for a problem whose nearest answer is `pieces`, priced by bytes over the limit."""
    worst = max(pieces, key=lambda piece: piece.price)
    need = problem.memory_of(worst.device) + worst.price
    return out_of_memory(problem, [pieces.index(worst)], len(pieces), worst.device, need, least=True)
