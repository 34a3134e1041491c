"""Strategy `pipedream`: dynamic programming finds the chain of stages whose slowest stage takes the
least time and that satisfies the constraints.

Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019, section
3.1. Memory is computed as in "Memory-efficient pipeline-parallel DNN training", ICML 2021: under
1F1B, the k-th stage from the end stores the saved tensors of k micro-batches. The search starts at
the end of the chain, so that k is known.
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
    resolve_constraints,
)
from autopipe.passes.analysis.operators import SampleAxes
from autopipe.passes.batching import Division
from autopipe.passes.cost.communication import CollectiveCost
from autopipe.passes.cost.memory_check import check_operators, may_share_stage, out_of_memory_error
from autopipe.passes.cost.range_tables import RangeTables, make_range_tables
from autopipe.passes.cost.roofline import mean_node_seconds
from autopipe.passes.cost.stage_work import gradient_reduction_cost
from autopipe.passes.partition.chain_cut import chain_step_seconds
from autopipe.passes.schedule.device_order import best_group_order, best_micro_batch_size


@dataclass(frozen=True, slots=True)
class ChainStage:
    """A stage of a chain: blocks `first` to `stop - 1` on `degree` consecutive devices from
    `device` on. `cost` is the cost that the search minimises.
    """

    first: int
    stop: int
    device: int
    degree: int
    cost: float


StageCost = Callable[[int, int, int], Matrix]
"""A function of (position from the end, counted from 1; first device; number of devices). It
returns a matrix [first, stop]: the cost of a stage at this position with blocks `first` to `stop -
1`.
"""

Choices = dict[int, tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]]
"""By number of devices d: three arrays indexed by block i. They describe the best division of the
blocks from i on into stages on the last d devices: its cost, the end of its first stage (block
after the last), and the number of devices of its first stage.
"""


def search_chains(
    blocks: int,
    devices: int,
    stages: int,
    degrees: tuple[int, ...],
    stage_cost: StageCost,
    join: np.ufunc = np.maximum,
) -> Iterator[list[ChainStage]]:
    """Yield the best chain on all `devices` for each number of stages up to `stages` for which
    there is a chain.

    The largest stage cost is minimised, or the sum of all stage costs if `join` is `np.add`. A
    stage has one of the numbers of devices in `degrees`. Let A(k, i, d) be the cost of the last k
    stages if they start with block i and use the last d devices, with A(0, blocks, 0) = 0:

        A(k, i, d) = min over ends j and degrees n of
            max(stage_cost(k, d, n)[i, j], A(k - 1, j, d - n))

    Time O(stages · devices · degrees · blocks²).
    """
    zeros = np.zeros(blocks + 1, dtype=np.int64)
    none = np.full(blocks + 1, np.inf), zeros, zeros
    choices: list[Choices] = [{0: (np.append(none[0][1:], 0.0), zeros, zeros)}]
    for from_end in range(1, min(stages, blocks, devices) + 1):
        reached: Choices = {}
        for remaining, (rest_cost, _, _) in choices[-1].items():
            for degree in degrees:
                used = remaining + degree
                if used > devices:
                    continue
                costs = join(stage_cost(from_end, devices - used, degree), rest_cost[None, :])
                stop = costs.argmin(axis=1)
                cost = np.take_along_axis(costs, stop[:, None], axis=1)[:, 0]
                known, stops, picked = reached.get(used, none)
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
            yield _trace_chain(choices, devices, stage_cost)


def _trace_chain(choices: list[Choices], devices: int, cost: StageCost) -> list[ChainStage]:
    """Return the chain on all `devices` that the `choices` of the dynamic program, one per number
    of stages, determine.
    """
    pieces = []
    first = 0
    used = devices
    for from_end in range(len(choices) - 1, 0, -1):
        _, stops, degrees = choices[from_end][used]
        stop = int(stops[first])
        degree = int(degrees[first])
        device = devices - used
        pieces.append(
            ChainStage(
                first, stop, device, degree, float(cost(from_end, device, degree)[first, stop])
            )
        )
        first = stop
        used = used - degree
    return pieces


@dataclass(frozen=True, slots=True)
class ChainConstraint:
    """A constraint on blocks `first` to `last`. Each stage that contains some of these blocks must
    have the stage number `stage`, the devices `devices` and the number of devices `degree`. None
    permits any value. If `stage` is given, this stage must contain all of the blocks.
    """

    first: int
    last: int
    stage: int | None = None
    devices: range | None = None
    degree: int | None = None

    def penalty(self, size: int, index: int, device: int, degree: int) -> Matrix:
        """Return a matrix [first, stop] of shape [`size`, `size`]: infinite if blocks `first` to
        `stop - 1` violate the constraint as stage `index` on `degree` devices from `device` on,
        otherwise 0.
        """
        first, stop = np.ogrid[:size, :size]
        allowed = (first > self.last) | (stop <= self.first)
        actual = (index, range(device, device + degree), degree)
        if all(
            wanted in (None, value)
            for wanted, value in zip((self.stage, self.devices, self.degree), actual, strict=True)
        ):
            contains = (first <= self.first) & (stop > self.last)
            allowed = contains if self.stage is not None else np.ones_like(contains)
        return np.where(allowed, 0.0, np.inf)


_MANUAL = "use strategy manual, which follows all constraints"


def _chain_constraints(
    resolved: tuple[ResolvedConstraint, ...], chain: Chain, samples: SampleAxes
) -> tuple[ChainConstraint, ...]:
    """Return the constraints in terms of blocks of the chain. Raise ConfigurationError for a
    constraint that no stage of consecutive devices with split samples can satisfy.
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
                    "requires devices that are not adjacent, but a stage of pipedream uses "
                    "adjacent devices"
                )
                raise ConfigurationError(f"{each} {reason}", _MANUAL)
            found.append(ChainConstraint(first, last, devices=devices))
        nodes = [node for node in each.nodes if samples.axes[node] is not None]
        split = each.constraint.split
        for axis, _ in split or ():
            if not nodes or any(axis not in (BATCH_AXIS, samples.axes[node]) for node in nodes):
                raise ConfigurationError(
                    f"{each} splits axis {axis!r}, but pipedream splits samples only", _MANUAL
                )
        degrees = [1] if split == () else [degree for _, degree in split or ()]
        own = sorted({int(chain.block_of[node]) for node in nodes})
        found += (
            ChainConstraint(block, block, degree=degree) for degree in degrees for block in own
        )
    return (*stages.values(), *found)


class ChainCosts:
    """Costs of stages, as matrices [first block, block after the last].

    There is one matrix for each position from the end of the chain, first device and number of
    devices. Stages with equal links and device types share their matrices.
    """

    def __init__(self, tables: RangeTables) -> None:
        self.tables = tables
        self.problem = tables.problem
        count = tables.chain.blocks + 1
        self._empty = np.where(np.tri(count, count, 0, dtype=bool), np.inf, 0.0)
        self._compute = cache(tables.seconds)
        self._parts = cache(tables.memory)
        self._times = cache(self._stage_seconds)
        self._fits = cache(self._fit_memory)

    def seconds(self, from_end: int, device: int, degree: int) -> Matrix:
        """Return the seconds per micro-batch of stages at position `from_end` from the end of the
        chain, counted from 1, on `degree` devices from `device` on.

        A stage recomputes its forward only if it does not fit into memory otherwise. The result is
        infinite for stages that do not fit.
        """
        cluster = self.problem.cluster
        group = range(device, device + degree)
        before = cluster.link(device - 1, device) if device else None
        after = cluster.link(group[-1], group.stop) if group.stop < cluster.size else None
        kinds = frozenset(cluster.device_types_among(group))
        reduce = gradient_reduction_cost(self.problem, group)
        plain, again = self._times(degree, kinds, before, after, reduce)
        fits, fits_again = self._fits(degree, self._in_flight(from_end), self._memory_limit(group))
        return np.where(fits, plain, np.where(fits_again, again, np.inf))

    def excess(self, from_end: int, device: int, degree: int) -> Matrix:
        """Return the bytes by which stages at position `from_end` from the end of the chain,
        counted from 1, exceed the memory limit of `degree` devices from `device` on.

        The variant that needs less memory counts: with or without recomputation. The result is
        negative for stages that fit.
        """
        plain, again = self._stage_memory(degree, self._in_flight(from_end))
        return (
            np.minimum(plain, again)
            - self._memory_limit(range(device, device + degree))
            + self._empty
        )

    def placement(self, pieces: list[ChainStage]) -> Placement:
        """Return the placement with the stages `pieces`. A stage recomputes its forward only if it
        does not fit into memory otherwise.
        """
        stages = []
        for index, piece in enumerate(pieces):
            nodes = self.tables.chain.nodes(piece.first, piece.stop)
            devices = range(piece.device, piece.device + piece.degree)
            splits = self.tables.samples.splits(nodes, piece.degree)
            fits, _ = self._fits(
                piece.degree, self._in_flight(len(pieces) - index), self._memory_limit(devices)
            )
            again = not fits[piece.first, piece.stop]
            stages.append(
                Stage(nodes, tuple(devices), self.problem.micro_batch_size, splits, again)
            )
        return Placement(tuple(stages))

    def _in_flight(self, from_end: int) -> int:
        """Return the number of micro-batches in flight under 1F1B in the stage at position
        `from_end` from the end of the chain, counted from 1.
        """
        return min(from_end, self.problem.micro_batches)

    def _memory_limit(self, group: range) -> int:
        """Return the smallest memory limit in bytes of the devices in `group`."""
        return min(map(self.problem.memory_of, group))

    def _stage_seconds(
        self,
        degree: int,
        kinds: frozenset[Device],
        before: Link | None,
        after: Link | None,
        reduce: CollectiveCost,
    ) -> tuple[Matrix, Matrix]:
        """Return the seconds per micro-batch of stages on `degree` devices (without recomputation,
        with recomputation), each on the slowest of the device types `kinds`.

        `before` and `after` are the links to the neighbouring stages, and None if there is no
        neighbour. `reduce` is the cost of the gradient all-reduce.
        """
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

    def _stage_memory(self, degree: int, in_flight: int) -> tuple[Matrix, Matrix]:
        """Return the bytes per device of stages on `degree` devices with `in_flight` micro-batches
        in flight (without recomputation, with recomputation). A variant that the problem excludes
        is infinite.
        """
        excluded = {"none": True, "full": False}.get(
            self.problem.recompute if self.problem.train else "none"
        )

        def needed(recompute: bool) -> Matrix:
            """Return the bytes of stages with or without recomputation."""
            always, each = self._parts(degree, recompute)
            return (
                np.full_like(self._empty, np.inf)
                if recompute == excluded
                else always + each * in_flight
            )

        return needed(False), needed(True)

    def _fit_memory(
        self, degree: int, in_flight: int, limit: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return whether stages fit into `limit` bytes, as boolean matrices (without recomputation,
        with recomputation).
        """
        plain, again = self._stage_memory(degree, in_flight)
        return plain <= limit, again <= limit


_MAXIMUM_BLOCKS = 224
"""Maximum number of blocks of a chain. The time of the search grows with the square of this number.
"""
_EVEN_ENOUGH = 1.001
"""Factor by which the step may become longer if the stages become more even. Costs are not known
more precisely.
"""


@dataclass(frozen=True, slots=True)
class PipeDream:
    """Partition a chain of operators into stages that take equally long, each on one or several
    devices.
    """

    max_stages: int | None = None
    """Maximum number of stages. Default: the number of devices."""
    replicate: bool = True
    """Allow stages on several devices, which split the samples."""
    sweep: bool = False
    """If no micro-batch size is given, try all sizes and choose the size with the shortest step."""

    objective: Literal["step", "slowest_stage"] = "step"
    """`step`: minimise the time of a step, including warm-up and cool-down. `slowest_stage`:
    minimise the time of the slowest stage, as in the paper.
    """

    name: ClassVar[str] = "pipedream"

    def division(self, graph: Graph) -> Division:
        """Return `Division.OWN` with option `sweep`, which chooses the micro-batch size, and
        otherwise `Division.MANY`.
        """
        return Division.OWN if self.sweep else Division.MANY

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError for a number of stages out of range, and InfeasibleError for a
        model without operators.
        """
        if self.max_stages is not None and self.max_stages < 1:
            raise ConfigurationError(
                f"max_stages is {self.max_stages}, expected at least 1",
                hint="set strategy.max_stages to at least 1",
                where="strategy",
            )
        check_operators(problem)

    def run(self, problem: Problem) -> Placement:
        """Return the placement of the chain with the minimum objective.

        The chain uses all devices, or the largest possible number if there are too few operators or
        samples for all of them. Raise InfeasibleError if memory or the constraints permit no chain,
        and ConfigurationError for constraints that cannot be satisfied.
        """
        found = best_group_order(
            problem,
            lambda ordered: best_micro_batch_size(
                ordered, lambda sized, _: self._best_placement(sized)
            ),
        )
        return (
            found
            if self.max_stages is not None
            else replace(found, options=(("max_stages", len(found.stages)),))
        )

    def _best_placement(self, problem: Problem) -> tuple[Placement, float]:
        """Return (placement, seconds of a step) for the best chain at the problem's micro-batch
        size.
        """
        resolved = resolve_constraints(problem)
        # The range from the first to the last node of one stage number, or of one constraint
        # without a stage number, must not share a block with nodes outside of it.
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
        forward, backward = mean_node_seconds(problem)
        tables = make_range_tables(
            problem, make_chain(problem.graph, forward + backward, _MAXIMUM_BLOCKS, groups)
        )
        rules = _chain_constraints(resolved, tables.chain, tables.samples)
        # Constraints name devices and stages of the full cluster, so they are valid for all devices
        # only. Smaller numbers of devices are tried only without constraints.
        least_devices = problem.cluster.size if rules else 1
        for devices in range(problem.cluster.size, least_devices - 1, -1):
            costs = ChainCosts(
                replace(tables, problem=replace(problem, cluster=problem.cluster.take(devices)))
            )
            pieces = self._best_chain(costs, rules)
            if pieces:
                return costs.placement(pieces), _step_seconds(problem, pieces)
            nearest = min(
                self._best_chains(costs, costs.excess, rules), key=_largest_cost, default=[]
            )
            if nearest:
                worst = max(nearest, key=lambda piece: piece.cost)
                need = costs.problem.memory_of(worst.device) + worst.cost
                stages = [nearest.index(worst)]
                raise out_of_memory_error(
                    costs.problem, stages, len(nearest), worst.device, need, least=True
                )
        raise InfeasibleError(
            (
                f"no chain of stages over {problem.cluster.size} "
                f"{plural(problem.cluster.size, 'device')} satisfies "
            )
            + " and ".join(map(str, resolved)),
            _MANUAL,
        )

    def _best_chain(
        self, costs: ChainCosts, rules: tuple[ChainConstraint, ...]
    ) -> list[ChainStage]:
        """Return the best chain over all numbers of stages; ties: the fewest stages win. Return []
        if there is no chain.

        A chain of at least three stages is replaced by a more even chain if the step of that chain
        is at most `_EVEN_ENOUGH` times as long. The more even chain has equally many stages, none
        slower than the slowest stage of the first chain, and the minimum sum of squared seconds.
        """
        step = partial(_step_seconds, costs.problem)
        aim = step if self.objective == "step" else _largest_cost
        best = min(self._best_chains(costs, costs.seconds, rules), key=aim, default=[])
        if len(best) < 3:
            return best
        slowest = _largest_cost(best) * (1 + 1e-9)

        def squared_seconds(from_end: int, device: int, degree: int) -> Matrix:
            """Return the squared seconds of stages; infinite for stages that are slower than
            `slowest`.
            """
            seconds = costs.seconds(from_end, device, degree)
            return np.where(seconds <= slowest, seconds**2, np.inf)

        evened = next(
            self._search_chains(costs, squared_seconds, rules, len(best), len(best), np.add), []
        )
        evened = [replace(piece, cost=piece.cost**0.5) for piece in evened]
        return evened if evened and step(evened) <= step(best) * _EVEN_ENOUGH else best

    def _best_chains(
        self, costs: ChainCosts, cost: StageCost, rules: tuple[ChainConstraint, ...]
    ) -> Iterator[list[ChainStage]]:
        """Yield the best chain for each number of stages for which there is one."""
        devices = costs.problem.cluster.size
        maximum = min(self.max_stages or devices, devices)
        has_stage_rules = any(rule.stage is not None for rule in rules)
        for stages in range(1, maximum + 1) if has_stage_rules else (maximum,):
            yield from self._search_chains(
                costs, cost, rules, stages, stages if has_stage_rules else 1
            )

    def _search_chains(
        self,
        costs: ChainCosts,
        cost: StageCost,
        rules: tuple[ChainConstraint, ...],
        most: int,
        least: int = 1,
        join: np.ufunc = np.maximum,
    ) -> Iterator[list[ChainStage]]:
        """Yield the best chain for each number of stages from `least` to `most`.

        Constraints on stage numbers are applied as if the chain had `most` stages. No stage has
        devices of several types unless the problem permits it. `join` combines the costs of stages:
        `np.maximum` for the largest cost, or `np.add` for their sum.
        """
        problem = costs.problem
        blocks = costs.tables.chain.blocks
        shared = self.replicate and bool(problem.graph.batch_axes)
        size = problem.micro_batch_size
        every = range(1, problem.cluster.size + 1)
        degrees = tuple(
            degree for degree in every if degree == 1 or (shared and size % degree == 0)
        )

        def constrained_cost(from_end: int, device: int, degree: int) -> Matrix:
            """Return the cost of stages at position `from_end` from the end of the chain, counted
            from 1, on `degree` devices from `device` on; infinite for stages that violate a
            constraint.
            """
            if not may_share_stage(problem, range(device, device + degree)):
                return np.full((blocks + 1, blocks + 1), np.inf)
            penalties = (
                rule.penalty(blocks + 1, most - from_end, device, degree) for rule in rules
            )
            return sum(penalties, cost(from_end, device, degree))

        for pieces in search_chains(
            blocks, problem.cluster.size, most, degrees, constrained_cost, join
        ):
            if len(pieces) >= least:
                yield pieces


def _largest_cost(pieces: list[ChainStage]) -> float:
    """Return the largest stage cost of a chain."""
    return max(piece.cost for piece in pieces)


def _step_seconds(problem: Problem, pieces: list[ChainStage]) -> float:
    """Return the seconds of a step of a chain whose stage costs are seconds per micro-batch."""
    return chain_step_seconds([piece.cost for piece in pieces], problem.micro_batches)
