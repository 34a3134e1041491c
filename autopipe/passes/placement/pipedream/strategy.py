"""PipeDream: the strategy and its options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.placement.pipedream.chain import make_chain
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
        """The chain with the least estimated step time. Raises InfeasibleError where memory does not allow any."""
        device = problem.cluster.devices[0]
        forward, backward = node_seconds(problem.work, device, problem.precision)
        tables = make_tables(problem, make_chain(problem.graph, forward + backward, _MOST_BLOCKS))
        for devices in range(problem.cluster.size, 0, -1):
            prices = Prices(replace(tables, problem=replace(problem, cluster=problem.cluster.take(devices))))
            pieces = self._best(prices)
            if pieces:
                return _placement(prices, pieces)
            least = min(self._answers(prices, prices.excess), key=_highest, default=[])
            if least:
                raise _out_of_memory(prices.problem, least)
        raise InfeasibleError("pipedream found no chain of stages")

    def _answers(self, prices: Prices, price: Price) -> list[list[Piece]]:
        samples, devices = prices.problem.micro_batch_size, prices.problem.cluster.size
        degrees = tuple(
            degree for degree in range(1, devices + 1) if samples % degree == 0 and (self.replicate or degree == 1)
        )
        return list(search(prices.tables.chain.blocks, devices, self.max_stages or devices, degrees, price))

    def _best(self, prices: Prices) -> list[Piece]:
        """Over all numbers of stages the chain whose step, filling and draining included, is shortest."""
        repeats = prices.problem.micro_batches - 1
        return min(
            self._answers(prices, prices.seconds),
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
    limit = problem.memory_of(worst.device)
    need = limit + worst.price
    hint = "use more devices, smaller micro-batches or a higher memory limit"
    if problem.train and problem.recompute == "none":
        hint = f"recompute: auto, or {hint}"
    return InfeasibleError(
        f"stage {pieces.index(worst)} of {len(pieces)} needs {_size(need)} on device {worst.device},"
        f" {_size(worst.price)} over the limit of {_size(limit)}, in the placement that needs least",
        hint=hint,
    )


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
