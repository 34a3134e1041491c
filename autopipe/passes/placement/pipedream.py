"""PipeDream: the strategy and its options.

Constraints as a search over a chain sees them: which ranges of blocks may stand where.

The price of every range of blocks as one stage, by where the stage stands.

The dynamic programme: the chain of stages whose slowest one is fastest, by number of stages and of devices.

After Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019, section 3.1, with
memory as in their "Memory-efficient pipeline-parallel DNN training", ICML 2021: under 1F1B the stage that is k-th from
the end keeps k micro-batches. It runs from the end of the chain, so that k is known.
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
from autopipe.passes.analysis.chain import Chain, Matrix, make_chain
from autopipe.passes.analysis.constraints import BATCH_AXIS, ResolvedConstraint, resolved_constraints
from autopipe.passes.analysis.operators import SampleAxes
from autopipe.passes.batching import Division
from autopipe.passes.cost.communication import Cost
from autopipe.passes.cost.memory_check import check_operators, may_share, out_of_memory
from autopipe.passes.cost.range_tables import Tables, make_tables
from autopipe.passes.cost.roofline import mean_seconds
from autopipe.passes.cost.stage_work import exchange_of_gradients
from autopipe.passes.schedule.device_order import SweepResult, best_order, best_size


@dataclass(frozen=True, slots=True)
class ChainStage:
    """One stage of an answer: blocks `first` to `stop - 1` on `degree` devices from `device` on, at a price."""

    first: int
    stop: int
    device: int
    degree: int
    price: float


Price = Callable[[int, int, int], Matrix]
"""(place from the end counting from 1, first device, degree) → the price of every range of blocks there."""


def search(
    blocks: int, devices: int, stages: int, degrees: tuple[int, ...], price: Price, join: np.ufunc = np.maximum
) -> Iterator[list[ChainStage]]:
    """For every number of stages up to `stages` the best chain over all devices, if there is any.

    The best has the least largest price, or with `join=np.add` the least sum of prices.
    """
    best = {0: _ending(blocks)}
    choices: list[dict[int, tuple[np.ndarray, np.ndarray]]] = [{}]
    for place in range(1, min(stages, blocks, devices) + 1):
        reached: dict[int, np.ndarray] = {}
        chosen: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for rest, later in best.items():
            for degree in degrees:
                used = rest + degree
                if used > devices:
                    continue
                costs = join(price(place, devices - used, degree), later[None, :])
                stop = costs.argmin(axis=1)
                cost = np.take_along_axis(costs, stop[:, None], axis=1)[:, 0]
                if used not in reached:
                    reached[used], chosen[used] = cost, (stop, np.full(blocks + 1, degree))
                    continue
                better = cost < reached[used]
                reached[used] = np.where(better, cost, reached[used])
                stops, picked = chosen[used]
                chosen[used] = (np.where(better, stop, stops), np.where(better, degree, picked))
        best = {used: cost for used, cost in reached.items() if np.isfinite(cost).any()}
        choices.append(chosen)
        if devices in best and np.isfinite(best[devices][0]):
            yield _trace(choices, place, devices, price)


def _ending(blocks: int) -> np.ndarray:
    cost = np.full(blocks + 1, np.inf)
    cost[blocks] = 0.0
    return cost


def _trace(
    choices: list[dict[int, tuple[np.ndarray, np.ndarray]]], place: int, devices: int, price: Price
) -> list[ChainStage]:
    pieces = []
    first, used = 0, devices
    for left in range(place, 0, -1):
        stops, degrees = choices[left][used]
        stop, degree = int(stops[first]), int(degrees[first])
        device = devices - used
        pieces.append(ChainStage(first, stop, device, degree, float(price(left, device, degree)[first, stop])))
        first, used = stop, used - degree
    return pieces


@dataclass(frozen=True, slots=True)
class ChainConstraint:
    """The blocks `first` to `last` go, together, to the stage that has what is not None here."""

    first: int
    last: int
    stage: int | None = None
    devices: range | None = None
    degree: int | None = None

    def penalty(self, size: int, index: int, device: int, degree: int) -> Matrix | None:
        """Infinite for ranges that break the rule as stage `index` on these devices; None where none does."""
        first = np.arange(size)[:, None]
        stop = np.arange(size)[None, :]
        touches = (first <= self.last) & (stop > self.first)
        here = (
            (self.stage is None or self.stage == index)
            and (self.devices is None or self.devices == range(device, device + degree))
            and (self.degree is None or self.degree == degree)
        )
        if not here:
            return np.where(touches, np.inf, 0.0)
        if self.stage is None:
            return None
        return np.where((first <= self.first) & (stop > self.last), 0.0, np.inf)


def ruled(price: Price, rules: tuple[ChainConstraint, ...], size: int, stages: int) -> Price:
    """`price` with the rules obeyed, for chains of `stages` stages (which matters to rules about a stage alone)."""

    def obedient(place: int, device: int, degree: int) -> Matrix:
        penalties = (rule.penalty(size, stages - place, device, degree) for rule in rules)
        return sum((penalty for penalty in penalties if penalty is not None), price(place, device, degree))

    return obedient


def groups_of(resolved: tuple[ResolvedConstraint, ...]) -> tuple[tuple[int, ...], ...]:
    """Nodes that cuts must be able to part from the others: all of one stage together, else of one constraint."""
    by_stage: dict[int, list[int]] = {}
    for wish in resolved:
        if wish.constraint.stage is not None:
            by_stage.setdefault(wish.constraint.stage, []).extend(wish.nodes)
    rest = [wish.nodes for wish in resolved if wish.constraint.stage is None]
    return (*map(tuple, by_stage.values()), *rest)


def rules_of(
    resolved: tuple[ResolvedConstraint, ...], chain: Chain, samples: SampleAxes
) -> tuple[ChainConstraint, ...]:
    """The wishes as rules. Raises ConfigurationError, with the reason, for those that no chain can fulfil."""
    stages: dict[int, ChainConstraint] = {}
    found: list[ChainConstraint] = []
    for wish in resolved:
        blocks = chain.block_of[list(wish.nodes)]
        first, last = int(blocks.min()), int(blocks.max())
        if wish.constraint.stage is not None:
            other = stages.get(wish.constraint.stage)
            low, high = (first, last) if other is None else (min(first, other.first), max(last, other.last))
            stages[wish.constraint.stage] = ChainConstraint(low, high, stage=wish.constraint.stage)
        if wish.devices is not None:
            found.append(ChainConstraint(first, last, devices=_neighbours(wish)))
        found.extend(_degrees(wish, chain, samples))
    return (*stages.values(), *found)


def _neighbours(wish: ResolvedConstraint) -> range:
    assert wish.devices is not None
    devices = sorted(wish.devices)
    if devices[-1] - devices[0] + 1 != len(devices):
        raise ConfigurationError(
            f"{wish} asks for devices that are no neighbours, and pipedream's stages are on neighbouring devices",
            hint="strategy manual follows any constraint",
        )
    return range(devices[0], devices[-1] + 1)


def _degrees(wish: ResolvedConstraint, chain: Chain, samples: SampleAxes) -> Iterator[ChainConstraint]:
    nodes = [node for node in wish.nodes if samples.axes[node] is not None]
    if wish.constraint.split == ():
        for block in sorted({int(chain.block_of[node]) for node in nodes}):
            yield ChainConstraint(block, block, degree=1)
    for axis, degree in wish.constraint.split or ():
        if not nodes or any(axis not in (BATCH_AXIS, samples.axes[node]) for node in nodes):
            raise ConfigurationError(
                f"{wish} splits axis {axis!r}, and pipedream splits by samples alone",
                hint="strategy manual follows any constraint",
            )
        for block in sorted({int(chain.block_of[node]) for node in nodes}):
            yield ChainConstraint(block, block, degree=degree)


class StagePrices:
    """Prices by place from the end, first device and degree; surroundings that are alike share their figures."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.problem = tables.problem
        count = tables.chain.blocks + 1
        self._empty = np.where(np.tri(count, count, 0, dtype=bool), np.inf, 0.0)
        self._compute = cache(tables.seconds)
        self._parts = cache(tables.memory)
        self._overhead = cache(tables.overhead)
        self._times = cache(self._stage_seconds)
        self._fits = cache(self._within)

    def seconds(self, place: int, device: int, degree: int) -> Matrix:
        """Seconds of a micro-batch, plain or with recomputation; infinite where memory does not hold.

        So it is where the stage would straddle kinds of devices unasked.
        """
        if not may_share(self.problem, range(device, device + degree)):
            return np.full_like(self._empty, np.inf)
        plain, again = self._times(degree, self._devices(device, degree), *self._links(device, degree))
        fits, fits_again = self._fits(degree, self._in_flight(place), self._limit(device, degree))
        return np.where(fits, plain, np.where(fits_again, again, np.inf))

    def excess(self, place: int, device: int, degree: int) -> Matrix:
        """Bytes over the memory limit (below zero where there is room) of the way that needs least."""
        if not may_share(self.problem, range(device, device + degree)):
            return np.full_like(self._empty, np.inf)
        plain, again = self._memory(degree, self._in_flight(place))
        return np.minimum(plain, again) - self._limit(device, degree) + self._empty

    def recomputes(self, place: int, piece: ChainStage) -> bool:
        """True if a stage of an answer runs its forward again."""
        fits, _ = self._fits(piece.degree, self._in_flight(place), self._limit(piece.device, piece.degree))
        return not fits[piece.first, piece.stop]

    def _in_flight(self, place: int) -> int:
        return min(place, self.problem.micro_batches)

    def _limit(self, device: int, degree: int) -> int:
        return min(self.problem.memory_of(member) for member in range(device, device + degree))

    def _devices(self, device: int, degree: int) -> frozenset[Device]:
        return frozenset(self.problem.cluster.devices[device : device + degree])

    def _links(self, device: int, degree: int) -> tuple[Link | None, Link | None, Cost]:
        """The links from the stage before and to the one after, and the group's exchange of gradients."""
        cluster = self.problem.cluster
        before = cluster.link(device - 1, device) if device else None
        last = device + degree - 1
        after = cluster.link(last, last + 1) if last + 1 < cluster.size else None
        return before, after, exchange_of_gradients(self.problem, range(device, last + 1))

    def _stage_seconds(
        self, degree: int, devices: frozenset[Device], before: Link | None, after: Link | None, reduce: Cost
    ) -> tuple[Matrix, Matrix]:
        """Seconds of a stage without and with recomputation, on the slowest of its devices."""
        plain, again = [], []
        for device in devices:
            forward, backward = self._compute(degree, device)
            rest = self._overhead(degree, device, before, after, reduce) + self._empty
            plain.append(forward + backward + rest)
            again.append(2 * forward + backward + rest)
        return np.maximum.reduce(plain), np.maximum.reduce(again)

    def _memory(self, degree: int, in_flight: int) -> tuple[Matrix, Matrix]:
        """Bytes without and with recomputation; infinite for what the options exclude."""
        recompute = self.problem.recompute if self.problem.train else "none"
        never = np.full_like(self._empty, np.inf)
        always, each = self._parts(degree, False)
        plain = never if recompute == "full" else always + each * in_flight
        always, each = self._parts(degree, True)
        again = never if recompute == "none" else always + each * in_flight
        return plain, again

    def _within(self, degree: int, in_flight: int, limit: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        plain, again = self._memory(degree, in_flight)
        return plain <= limit, again <= limit


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
        resolved = resolved_constraints(problem)
        forward, backward = mean_seconds(problem)
        tables = make_tables(problem, make_chain(problem.graph, forward + backward, _MOST_BLOCKS, groups_of(resolved)))
        rules = rules_of(resolved, tables.chain, tables.samples)
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
            + " and ".join(str(wish) for wish in resolved),
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
