"""PipeDream: the strategy and its options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.cost.constraints import wishes_of
from autopipe.passes.cost.fit import out_of_memory
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.placement.pipedream.chain import make_chain
from autopipe.passes.placement.pipedream.obey import Rule, groups_of, ruled, rules_of
from autopipe.passes.placement.pipedream.prices import Prices
from autopipe.passes.placement.pipedream.search import Piece, Price, search
from autopipe.passes.placement.pipedream.tables import make_tables

_MOST_BLOCKS = 224
"""Cuts that the search considers: its time grows with their square."""


@dataclass(frozen=True, slots=True)
class PipeDream:
    """Cuts the operators, in one line, into stages that take equally long, each on one or several devices."""

    max_stages: int | None = None
    """The most stages; as many as there are devices where nothing is given."""
    replicate: bool = True
    """Whether several devices may share a stage's samples."""

    name: ClassVar[str] = "pipedream"

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError where there is nothing to place."""
        if not problem.graph.nodes:
            raise InfeasibleError("the model has no operators to place")

    def run(self, problem: Problem) -> Placement:
        """The chain with the least estimated step time.

        It uses all devices, or as many as it can where the operators or the samples are too few to share. Raises
        InfeasibleError where memory or the constraints allow no chain, ConfigurationError for constraints that it
        cannot follow.
        """
        wishes = wishes_of(problem)
        forward, backward = node_seconds(problem.work, problem.cluster.devices[0], problem.precision)
        tables = make_tables(problem, make_chain(problem.graph, forward + backward, _MOST_BLOCKS, groups_of(wishes)))
        rules = rules_of(wishes, tables.chain, tables.samples)
        # Constraints speak of the devices there are; without any, fewer will do.
        least_devices = problem.cluster.size if rules else 1
        for devices in range(problem.cluster.size, least_devices - 1, -1):
            prices = Prices(replace(tables, problem=replace(problem, cluster=problem.cluster.take(devices))))
            pieces = self._best(prices, rules)
            if pieces:
                return _placement(prices, pieces)
            nearest = min(self._answers(prices, prices.excess, rules), key=_highest, default=[])
            if nearest:
                raise _out_of_memory(prices.problem, nearest)
        raise InfeasibleError(
            f"no chain of stages over {problem.cluster.size} devices obeys "
            + " and ".join(str(wish) for wish in wishes),
            hint="strategy manual follows any constraint",
        )

    def _answers(self, prices: Prices, price: Price, rules: tuple[Rule, ...]) -> list[list[Piece]]:
        """The best chain for each number of stages that has one."""
        samples, devices = prices.problem.micro_batch_size, prices.problem.cluster.size
        blocks = prices.tables.chain.blocks
        degrees = tuple(
            degree
            for degree in range(1, devices + 1)
            if samples % degree == 0 and (degree == 1 or (self.replicate and prices.problem.graph.batch_axes))
        )
        most = min(self.max_stages or devices, devices)
        if all(rule.stage is None for rule in rules):
            return list(search(blocks, devices, most, degrees, ruled(price, rules, blocks + 1, 0) if rules else price))
        found: list[list[Piece]] = []
        for stages in range(1, most + 1):
            answers = search(blocks, devices, stages, degrees, ruled(price, rules, blocks + 1, stages))
            found.extend(pieces for pieces in answers if len(pieces) == stages)
        return found

    def _best(self, prices: Prices, rules: tuple[Rule, ...]) -> list[Piece]:
        """Over all numbers of stages the chain whose step, filling and draining included, is shortest."""
        repeats = prices.problem.micro_batches - 1
        return min(
            self._answers(prices, prices.seconds, rules),
            key=lambda pieces: sum(piece.price for piece in pieces) + repeats * _highest(pieces),
            default=[],
        )


def _highest(pieces: list[Piece]) -> float:
    return max(piece.price for piece in pieces)


def _placement(prices: Prices, pieces: list[Piece]) -> Placement:
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


def _out_of_memory(problem: Problem, pieces: list[Piece]) -> InfeasibleError:
    """The error for a problem whose nearest answer is `pieces`, priced by bytes over the limit."""
    worst = max(pieces, key=lambda piece: piece.price)
    need = problem.memory_of(worst.device) + worst.price
    return out_of_memory(problem, [pieces.index(worst)], len(pieces), worst.device, need, least=True)
