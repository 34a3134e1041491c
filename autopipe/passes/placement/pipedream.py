"""PipeDream: the chain of stages whose slowest one is fastest, by dynamic programming, under a
user's constraints.

After Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019,
section 3.1, with memory as in their "Memory-efficient pipeline-parallel DNN training", ICML 2021:
under 1F1B the stage that is k-th from the end keeps k micro-batches. The search runs from the end
of the chain, so that k is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Device, Link
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.words import plural
from autopipe.passes.analysis.chain import Chain, Matrix, make_chain
from autopipe.passes.analysis.constraints import (
    BATCH_AXIS,
    ResolvedConstraint,
    resolved_constraints,
)
from autopipe.passes.analysis.operators import SampleAxes
from autopipe.passes.batching import Division
from autopipe.passes.cost.communication import Cost
from autopipe.passes.cost.memory_check import check_operators, may_share, out_of_memory
from autopipe.passes.cost.range_tables import Tables, make_tables
from autopipe.passes.cost.roofline import mean_seconds
from autopipe.passes.cost.stage_work import exchange_of_gradients
from autopipe.passes.partition.chain_cut import chain_step_seconds
from autopipe.passes.schedule.device_order import best_micro_batch_size, best_order


@dataclass(frozen=True, slots=True)
class ChainStage:
    """One stage of an answer: blocks `first` to `stop - 1` on `degree` devices from `device` on, at
    a price.
    """

    first: int
    stop: int
    device: int
    degree: int
    price: float


Price = Callable[[int, int, int], Matrix]
"""(place from the end counting from 1, first device, degree) → the price of every range of blocks
there.
"""

Choices = dict[int, tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]]
"""By number of last devices, for each first block: the price of all stages behind it, where the
first of these stops, and its degree.
"""


def search(
    blocks: int,
    devices: int,
    stages: int,
    degrees: tuple[int, ...],
    price: Price,
    join: np.ufunc = np.maximum,
) -> Iterator[list[ChainStage]]:
    """For every number of stages up to `stages` the best chain over all devices, if there is any:
    with the least largest price, or with `join=np.add` the least sum of prices. Where the k last
    stages begin with block i and have the last d devices, A(0, blocks, 0) = 0 and

        A(k, i, d) = min over stops j and degrees n of max(price(k, d, n)[i, j], A(k - 1, j, d - n))
    """
    zeros = np.zeros(blocks + 1, dtype=np.int64)
    nothing = np.full(blocks + 1, np.inf), zeros, zeros
    choices: list[Choices] = [{0: (np.append(nothing[0][1:], 0.0), zeros, zeros)}]
    for place in range(1, min(stages, blocks, devices) + 1):
        reached: Choices = {}
        for rest, (behind, _, _) in choices[-1].items():
            for degree in degrees:
                used = rest + degree
                if used > devices:
                    continue
                costs = join(price(place, devices - used, degree), behind[None, :])
                stop = costs.argmin(axis=1)
                cost = np.take_along_axis(costs, stop[:, None], axis=1)[:, 0]
                known, stops, picked = reached.get(used, nothing)
                better = cost < known
                reached[used] = (
                    np.where(better, cost, known),
                    np.where(better, stop, stops),
                    np.where(better, degree, picked),
                )
        choices.append(
            {used: found for used, found in reached.items() if np.isfinite(found[0]).any()}
        )
        if devices in reached and np.isfinite(reached[devices][0][0]):
            yield _trace(choices, devices, price)


def _trace(choices: list[Choices], devices: int, price: Price) -> list[ChainStage]:
    pieces = []
    first = 0
    used = devices
    for place in range(len(choices) - 1, 0, -1):
        _, stops, degrees = choices[place][used]
        stop = int(stops[first])
        degree = int(degrees[first])
        device = devices - used
        pieces.append(
            ChainStage(
                first, stop, device, degree, float(price(place, device, degree)[first, stop])
            )
        )
        first = stop
        used = used - degree
    return pieces


@dataclass(frozen=True, slots=True)
class ChainConstraint:
    """The blocks `first` to `last` go, together, to the stage that has what is not None here."""

    first: int
    last: int
    stage: int | None = None
    devices: range | None = None
    degree: int | None = None

    def penalty(self, size: int, index: int, device: int, degree: int) -> Matrix:
        """Infinite for ranges that break the rule as stage `index` on these devices, else 0."""
        first, stop = np.ogrid[:size, :size]
        allowed = (first > self.last) | (stop <= self.first)
        own = (index, range(device, device + degree), degree)
        if all(
            wanted in (None, has)
            for wanted, has in zip((self.stage, self.devices, self.degree), own, strict=True)
        ):
            holds = (first <= self.first) & (stop > self.last)
            allowed = holds if self.stage is not None else np.ones_like(holds)
        return np.where(allowed, 0.0, np.inf)


_MANUAL = "strategy manual follows any constraint"


def _rules(
    resolved: tuple[ResolvedConstraint, ...], chain: Chain, samples: SampleAxes
) -> tuple[ChainConstraint, ...]:
    """The constraints as the search sees them. Raises ConfigurationError for those that no chain
    can fulfil.
    """
    stages: dict[int, ChainConstraint] = {}
    found: list[ChainConstraint] = []
    for each in resolved:
        blocks = chain.block_of[list(each.nodes)]
        first = int(blocks.min())
        last = int(blocks.max())
        stage = each.constraint.stage
        if stage is not None:
            other = stages.get(stage, ChainConstraint(first, last))
            stages[stage] = ChainConstraint(
                min(first, other.first), max(last, other.last), stage=stage
            )
        if each.devices is not None:
            devices = range(min(each.devices), max(each.devices) + 1)
            if len(devices) != len(each.devices):
                reason = (
                    "asks for devices that are no neighbours, and pipedream's stages are on "
                    "neighbouring devices"
                )
                raise ConfigurationError(f"{each} {reason}", _MANUAL)
            found.append(ChainConstraint(first, last, devices=devices))
        nodes = [node for node in each.nodes if samples.axes[node] is not None]
        split = each.constraint.split
        for axis, _ in split or ():
            if not nodes or any(axis not in (BATCH_AXIS, samples.axes[node]) for node in nodes):
                raise ConfigurationError(
                    f"{each} splits axis {axis!r}, and pipedream splits by samples alone", _MANUAL
                )
        degrees = [1] if split == () else [degree for _, degree in split or ()]
        own = sorted({int(chain.block_of[node]) for node in nodes})
        found += (
            ChainConstraint(block, block, degree=degree) for degree in degrees for block in own
        )
    return (*stages.values(), *found)


class ChainPrices:
    """Prices by place from the end, first device and degree; surroundings that are alike share
    their figures.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.problem = tables.problem
        count = tables.chain.blocks + 1
        self._empty = np.where(np.tri(count, count, 0, dtype=bool), np.inf, 0.0)
        self._compute = cache(tables.seconds)
        self._parts = cache(tables.memory)
        self._times, self._fits = cache(self._stage_seconds), cache(self._within)

    def seconds(self, place: int, device: int, degree: int) -> Matrix:
        """Seconds of a micro-batch, plain or with recomputation; infinite where memory does not
        hold.
        """
        cluster = self.problem.cluster
        group = range(device, device + degree)
        before = cluster.link(device - 1, device) if device else None
        after = cluster.link(group[-1], group.stop) if group.stop < cluster.size else None
        kinds = frozenset(cluster.kinds_among(group))
        reduce = exchange_of_gradients(self.problem, group)
        plain, again = self._times(degree, kinds, before, after, reduce)
        fits, fits_again = self._fits(degree, self._in_flight(place), self._limit(group))
        return np.where(fits, plain, np.where(fits_again, again, np.inf))

    def excess(self, place: int, device: int, degree: int) -> Matrix:
        """Bytes over the memory limit (below zero where there is room) of the way that needs
        least.
        """
        plain, again = self._memory(degree, self._in_flight(place))
        return np.minimum(plain, again) - self._limit(range(device, device + degree)) + self._empty

    def placement(self, pieces: list[ChainStage]) -> Placement:
        """The stages of an answer; where memory does not hold one as it is, it runs its forward
        again.
        """
        stages = []
        for index, piece in enumerate(pieces):
            nodes = self.tables.chain.nodes(piece.first, piece.stop)
            devices = range(piece.device, piece.device + piece.degree)
            splits = self.tables.samples.splits(nodes, piece.degree)
            fits, _ = self._fits(
                piece.degree, self._in_flight(len(pieces) - index), self._limit(devices)
            )
            again = not fits[piece.first, piece.stop]
            stages.append(
                Stage(nodes, tuple(devices), self.problem.micro_batch_size, splits, again)
            )
        return Placement(tuple(stages))

    def _in_flight(self, place: int) -> int:
        return min(place, self.problem.micro_batches)

    def _limit(self, group: range) -> int:
        return min(map(self.problem.memory_of, group))

    def _stage_seconds(
        self,
        degree: int,
        kinds: frozenset[Device],
        before: Link | None,
        after: Link | None,
        reduce: Cost,
    ) -> tuple[Matrix, Matrix]:
        """Seconds of a stage without and with recomputation, on the slowest of its devices."""
        plain = []
        again = []
        for device in kinds:
            forward, backward = self._compute(degree, device)
            rest = self.tables.overhead(degree, device, before, after, reduce) + self._empty
            plain.append(forward + backward + rest)
            again.append(2 * forward + backward + rest)
            if device.host_launch_s:
                plain[-1] = plain[-1] + self.tables.host_wait(
                    device, forward, backward, recompute=False
                )
                again[-1] = again[-1] + self.tables.host_wait(
                    device, forward, backward, recompute=True
                )
        return np.maximum.reduce(plain), np.maximum.reduce(again)

    def _memory(self, degree: int, in_flight: int) -> tuple[Matrix, Matrix]:
        """Bytes without and with recomputation; infinite for what the options exclude."""
        excluded = {"none": True, "full": False}.get(
            self.problem.recompute if self.problem.train else "none"
        )

        def needed(recompute: bool) -> Matrix:
            always, each = self._parts(degree, recompute)
            return (
                np.full_like(self._empty, np.inf)
                if recompute == excluded
                else always + each * in_flight
            )

        return needed(False), needed(True)

    def _within(
        self, degree: int, in_flight: int, limit: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        plain, again = self._memory(degree, in_flight)
        return plain <= limit, again <= limit


_MOST_BLOCKS = 224  # Cuts that the search considers: its time grows with their square.
_EVEN_ENOUGH = 1.001
"""How much longer a step may be, as a factor, for stages that are more even: costs are not known
better than that.
"""


@dataclass(frozen=True, slots=True)
class PipeDream:
    """Cuts the operators, in one line, into stages that take equally long, each on one or several
    devices.
    """

    max_stages: int | None = None
    """The most stages; as many as there are devices where nothing is given."""
    replicate: bool = True
    """True if several devices may share a stage's samples."""
    sweep: bool = False
    """True if it tries all sizes of micro-batches, where they are left open, for the one with the
    shortest step.
    """

    objective: Literal["step", "slowest_stage"] = "step"
    """Objective: the time of a whole step, filling and draining included, or, as published, of the
    slowest stage.
    """

    name: ClassVar[str] = "pipedream"

    def division(self, graph: Graph) -> Division:
        """It may make several stages; with `sweep` it chooses one size of micro-batches for all of
        them.
        """
        return Division.OWN if self.sweep else Division.MANY

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError where there is nothing to place, ConfigurationError for options out
        of range.
        """
        if self.max_stages is not None and self.max_stages < 1:
            raise ConfigurationError(
                f"max_stages is {self.max_stages}", hint="it must be at least 1", where="strategy"
            )
        check_operators(problem)

    def run(self, problem: Problem) -> Placement:
        """The chain with the least estimated time of a step, or of its slowest stage. It uses all
        devices, or as many as it can where the operators or the samples are too few to share.
        Raises InfeasibleError where memory or the constraints allow no chain, ConfigurationError
        for constraints that it cannot follow.
        """
        found = best_order(
            problem,
            lambda ordered: best_micro_batch_size(ordered, lambda sized, _: self._answer(sized)),
        )
        return (
            found
            if self.max_stages is not None
            else replace(found, options=(("max_stages", len(found.stages)),))
        )

    def _answer(self, problem: Problem) -> tuple[Placement, float]:
        """The chain for the problem's micro-batches."""
        resolved = resolved_constraints(problem)
        # Cuts must be able to part these nodes from the others: all of one stage together, else of
        # one constraint.
        by_stage: dict[int, tuple[int, ...]] = {}
        for each in resolved:
            if each.constraint.stage is not None:
                by_stage[each.constraint.stage] = (
                    by_stage.get(each.constraint.stage, ()) + each.nodes
                )
        groups = (
            *by_stage.values(),
            *(each.nodes for each in resolved if each.constraint.stage is None),
        )
        forward, backward = mean_seconds(problem)
        tables = make_tables(
            problem, make_chain(problem.graph, forward + backward, _MOST_BLOCKS, groups)
        )
        rules = _rules(resolved, tables.chain, tables.samples)
        # Constraints speak of the devices there are; without any, fewer will do.
        least_devices = problem.cluster.size if rules else 1
        for devices in range(problem.cluster.size, least_devices - 1, -1):
            prices = ChainPrices(
                replace(tables, problem=replace(problem, cluster=problem.cluster.take(devices)))
            )
            pieces = self._best(prices, rules)
            if pieces:
                return prices.placement(pieces), _step_seconds(problem, pieces)
            nearest = min(self._answers(prices, prices.excess, rules), key=_highest, default=[])
            if nearest:
                worst = max(nearest, key=lambda piece: piece.price)
                need = prices.problem.memory_of(worst.device) + worst.price
                stages = [nearest.index(worst)]
                raise out_of_memory(
                    prices.problem, stages, len(nearest), worst.device, need, least=True
                )
        raise InfeasibleError(
            (
                f"no chain of stages over {problem.cluster.size} "
                f"{plural(problem.cluster.size, 'device')} obeys "
            )
            + " and ".join(map(str, resolved)),
            _MANUAL,
        )

    def _best(self, prices: ChainPrices, rules: tuple[ChainConstraint, ...]) -> list[ChainStage]:
        """The best chain over all numbers of stages, the fewest of equals. Of three stages or more
        it is one with as many, none slower than its slowest, the others even: with the least sum of
        squares.
        """
        step = partial(_step_seconds, prices.problem)
        aim = step if self.objective == "step" else _highest
        best = min(self._answers(prices, prices.seconds, rules), key=aim, default=[])
        if len(best) < 3:
            return best
        slowest = _highest(best) * (1 + 1e-9)

        def squared(place: int, device: int, degree: int) -> Matrix:
            seconds = prices.seconds(place, device, degree)
            return np.where(seconds <= slowest, seconds**2, np.inf)

        evened = next(self._chains(prices, squared, rules, len(best), len(best), np.add), [])
        evened = [replace(piece, price=piece.price**0.5) for piece in evened]
        return evened if evened and step(evened) <= step(best) * _EVEN_ENOUGH else best

    def _answers(
        self, prices: ChainPrices, price: Price, rules: tuple[ChainConstraint, ...]
    ) -> Iterator[list[ChainStage]]:
        """The best chain for each number of stages that has one."""
        devices = prices.problem.cluster.size
        most = min(self.max_stages or devices, devices)
        apart = any(rule.stage is not None for rule in rules)
        for stages in range(1, most + 1) if apart else (most,):
            yield from self._chains(prices, price, rules, stages, stages if apart else 1)

    def _chains(
        self,
        prices: ChainPrices,
        price: Price,
        rules: tuple[ChainConstraint, ...],
        most: int,
        least: int = 1,
        join: np.ufunc = np.maximum,
    ) -> Iterator[list[ChainStage]]:
        """Chains of `least` to `most` stages; a rule about a stage alone holds for those of `most`.
        No stage straddles kinds of devices without being asked to.
        """
        problem = prices.problem
        blocks = prices.tables.chain.blocks
        shared = self.replicate and bool(problem.graph.batch_axes)
        size = problem.micro_batch_size
        every = range(1, problem.cluster.size + 1)
        degrees = tuple(
            degree for degree in every if degree == 1 or (shared and size % degree == 0)
        )

        def ruled(place: int, device: int, degree: int) -> Matrix:
            if not may_share(problem, range(device, device + degree)):
                return np.full((blocks + 1, blocks + 1), np.inf)
            penalties = (rule.penalty(blocks + 1, most - place, device, degree) for rule in rules)
            return sum(penalties, price(place, device, degree))

        for pieces in search(blocks, problem.cluster.size, most, degrees, ruled, join):
            if len(pieces) >= least:
                yield pieces


def _highest(pieces: list[ChainStage]) -> float:
    return max(piece.price for piece in pieces)


def _step_seconds(problem: Problem, pieces: list[ChainStage]) -> float:
    return chain_step_seconds([piece.price for piece in pieces], problem.micro_batches)
