"""The scheduler that searches: the best order found for a placement, never worse than the published
ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from autopipe.ir.block_schedule import BlockSchedule
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Proof, Schedule, StageGraph, Task
from autopipe.ir.timeline import Prediction
from autopipe.passes.batching import divisors
from autopipe.passes.registry import Scheduler
from autopipe.passes.schedule.limits import SAME, least_end, lower_bound
from autopipe.passes.schedule.orders import find_repetends
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.published.base import GPipe
from autopipe.passes.schedule.published.one_f_one_b import (
    KForwardsKBackwards,
    OneForwardOneBackward,
)
from autopipe.passes.schedule.simulate import simulate, static_memory
from autopipe.passes.schedule.tessel.model import SearchOptions, require_room
from autopipe.passes.schedule.tessel.search import search
from autopipe.passes.schedule.tessel.stage_blocks import (
    StageBlocks,
    busiest_seconds,
    stage_blocks,
    stage_schedule,
    with_links,
    with_memory,
)

_TICKS = 10_000
"""Ticks of the busiest device's work on one unit: each of its times is overstated by less than one
of them.
"""

_WORTH = 0.05
"""Share of the step that splitting backwards must save to be done: their programs are longer, and
two halves take a little more than the whole (a tenth more where operators are tiny), which the cost
model does not count.
"""

# Tasks of a device before its order repeats: a line each is still a program that can be read.
_MOST_TASKS = 60
_PATIENCE = 8.0
"""Times its seconds that a search may take on a busy machine, so that equal requests make equal
plans there too.
"""


@dataclass(frozen=True, slots=True)
class Tessel:
    """Searches the order with the shortest period, then the shortest ends, then the least memory,
    for any placement.

    Lin et al., "Tessel: Boosting Distributed Execution of Large DNN Models via Flexible Schedule
    Search" (HPCA 2024). Stages may be chains or branches, several a device, or on several devices,
    each with micro-batches of its own size; backwards are split into the gradients of inputs and of
    weights where that shortens the step by more than a twentieth, or where the split order of fewer
    micro-batches, repeated, is shorter. 1F1B's and GPipe's order (kFkB's where micro-batches
    differ) are simulated too, and the one with the shortest step that fits the memory is kept.
    Where messages would wait for one another on their links, those are searched as well.
    """

    time_limit: float = 4.0
    """Seconds that the search may take, counted as the work that an idle machine gets done in them,
    so that equal requests make equal plans; the limit of the whole plan, where there is one, is the
    clock's.
    """

    name: ClassVar[str] = "tessel"

    def requires(self, problem: Problem, placement: Placement) -> None:
        if not self.time_limit > 0:
            hint = "give a number of seconds above 0"
            raise ConfigurationError(
                f"time_limit is {self.time_limit:g}", hint=hint, where="schedule"
            )

    def run(self, problem: Problem, placement: Placement) -> Schedule:
        """The schedule, for any DAG of stages; where none fits the memory, the one that exceeds it
        by least.
        """
        return self._run(problem, placement, lambda each: predict(each, placement))

    def run_with(self, problem: Problem, placement: Placement, prediction: Prediction) -> Schedule:
        """The schedule where stages take what a prediction says, the cost model's or another."""
        return self._run(problem, placement, lambda _: prediction)

    def _run(
        self, problem: Problem, placement: Placement, prediction_of: Callable[[Problem], Prediction]
    ) -> Schedule:
        stages = StageGraph.of(problem, placement)
        prediction = prediction_of(problem)
        bound = lower_bound(problem, placement, prediction)
        deadline = math.inf if problem.time_limit is None else time.monotonic() + problem.time_limit
        best = _Search(self, problem, placement, stages, prediction, prediction_of, deadline).best(
            bound
        )
        if best is None:
            raise InfeasibleError(
                "no order of the stages' tasks keeps to the memory of all devices"
            )
        # Without a steady state the proof is of the step, of which sums and updates are the end.
        proof = best.schedule.proof or Proof(best.name, 0.0, optimal=False)
        if best.schedule.period is None:
            least = max(proof.lower_bound + least_end(stages, prediction), bound)
            rounding = 0.0 if best.step <= bound * (1 + SAME) else proof.rounding
            optimal = best.step * (1 - rounding) <= least * (1 + SAME)
            proof = replace(proof, lower_bound=least, optimal=optimal, rounding=rounding)
        return replace(best.schedule, proof=proof)


@dataclass(frozen=True, slots=True)
class _Candidate:
    name: str
    schedule: Schedule
    step: float
    peak: int
    excess: int
    """Bytes that devices would need beside what they have, all together."""
    messages_wait: bool
    """True if the step is longer than the search expected, since messages wait for one another on
    their links.
    """


def _better(new: _Candidate, old: _Candidate | None, worth: float) -> _Candidate:
    """The one that fits memory better, is shorter by more than the share `worth`, needs less
    memory; else the new.
    """
    if old is None or new.excess < old.excess:
        return new
    if new.excess > old.excess or new.step > old.step * (1 - worth + SAME):
        return old
    return new if new.step < old.step * (1 - SAME) or new.peak <= old.peak else old


def _is_at(candidate: _Candidate, bound: float) -> bool:
    """True if the candidate fits memory and its step is as short as `bound`."""
    return not candidate.excess and candidate.step <= bound * (1 + SAME)


def repeated_schedule(schedule: Schedule, times: int, stages: StageGraph) -> Schedule:
    """Return the schedule run `times` times, for as many times the micro-batches."""

    def later(task: Task, number: int) -> Task:
        own = schedule.micro_batches * stages.micro_batch_ratio_at(task.stage)
        return replace(task, micro_batch=task.micro_batch + number * own)

    orders = tuple(
        tuple(later(task, number) for number in range(times) for task in order)
        for order in schedule.tasks
    )
    return Schedule(schedule.micro_batches * times, orders, find_repetends(orders))


@dataclass(frozen=True, slots=True)
class _Search:
    scheduler: Tessel
    problem: Problem
    placement: Placement
    stages: StageGraph
    prediction: Prediction
    prediction_of: Callable[[Problem], Prediction]
    """Return the prediction for another number of micro-batches, the first of which accumulates no
    gradients.
    """
    deadline: float
    """Seconds of the monotonic clock after which no further numbers of micro-batches are searched.
    """

    def best(self, bound: float) -> _Candidate | None:
        """Return the candidate that the scheduler takes, where no step takes less than `bound`
        seconds.

        Split backwards must save `_WORTH` of the step, unless the schedule of fewer micro-batches
        is split and shorter if repeated. None if there is no candidate.
        """
        best = self._first_best(self._whole(), bound)
        if not self.problem.train or (best is not None and _is_at(best, bound)):
            return best
        split = self._first_best(self._split(), bound)
        if split is None:
            return best
        chosen = _better(split, best, _WORTH)
        if chosen is split or split.excess or split.step >= chosen.step * (1 - SAME):
            return chosen
        repeated = self._repeated(chosen.step)
        return chosen if repeated is None else _better(split, repeated, 0.0)

    def _repeated(self, longest_s: float) -> _Candidate | None:
        """Return the split schedule that `best` takes for fewer micro-batches, repeated for all of
        them.

        Warm-up and cool-down are a larger fraction of the step of fewer micro-batches, so that
        splitting may be worth it for them only. Of the numbers whose steps take less than
        `longest_s` seconds together, the largest counts. None if there is no such number.
        """
        count = self.problem.micro_batches
        for part in reversed(divisors(count)[:-1]):
            times = count // part
            if part % self.stages.pipeline_count or time.monotonic() > self.deadline:
                continue
            problem = replace(
                self.problem, micro_batches=part, batch_size=part * self.problem.micro_batch_size
            )
            fewer = replace(self, problem=problem, prediction=self.prediction_of(problem))
            bound = lower_bound(problem, self.placement, fewer.prediction)
            if times * bound >= longest_s:
                continue
            split = fewer._first_best(fewer._split(), bound)
            if split is None or split.excess or times * split.step >= longest_s:
                continue
            whole = fewer._first_best(fewer._whole(), bound)
            if _better(split, whole, _WORTH) is split or (whole and fewer._repeated(whole.step)):
                return self._judged(
                    split.name, repeated_schedule(split.schedule, times, self.stages)
                )
        return None

    def _first_best(self, candidates: Iterable[_Candidate], bound: float) -> _Candidate | None:
        """Return the best of the candidates up to the first that is as short as `bound`."""
        best: _Candidate | None = None
        for candidate in candidates:
            best = _better(candidate, best, 0.0)
            if _is_at(best, bound):
                break
        return best

    def _whole(self) -> Iterator[_Candidate]:
        """Schedules that do not split backwards, published ones first.

        If all micro-batches are equal, kFkB's order is 1F1B's.
        """
        published: tuple[Scheduler, ...] = (OneForwardOneBackward(), GPipe())
        for each in (KForwardsKBackwards(),) if self.stages.ratios else published:
            yield self._judged(each.name, each.run(self.problem, self.placement))
        yield from self._all_searched(split=False)

    def _split(self) -> Iterator[_Candidate]:
        return self._all_searched(split=True)

    def _all_searched(self, split: bool) -> Iterator[_Candidate]:
        """Searched schedules: if messages of the first wait for one another, a second whose search
        includes links.
        """
        for links in (False, True):
            found = self._searched(split, links)
            if found is not None:
                yield found
            if found is None or not found.messages_wait:
                break

    def _searched(self, split: bool, links: bool) -> _Candidate | None:
        """The searched order; None where memory does not suffice for a single unit."""
        problem = self.problem
        stages = self.stages
        prediction = self.prediction
        units = -(-problem.micro_batches // stages.pipeline_count)
        tick = busiest_seconds(stages, prediction) / _TICKS
        blocks = stage_blocks(stages, prediction, problem.train, tick, split=split)
        if links:
            blocks = with_links(blocks, stages, prediction.messages)
        static = static_memory(stages.devices, stages.stage_devices, prediction.stages)
        free = [problem.memory_of(device) - used for device, used in enumerate(static)]
        blocks = with_memory(blocks, prediction.stages, free, units)
        # Each way to cut tasks is searched without links and perhaps with them: each search has a
        # share of the time.
        limit = self.scheduler.time_limit
        patience = _PATIENCE
        if problem.time_limit is not None:
            limit = min(limit, problem.time_limit)
            patience = 1.0
        limit /= 4 if problem.train else 2
        options = SearchOptions(limit, problem.seed, patience=patience, unrolled=_MOST_TASKS)
        try:
            require_room(blocks.graph, units)
            found = search(blocks.graph, units, options)
        except InfeasibleError:
            return None
        schedule = stage_schedule(blocks, found, stages, problem.micro_batches)
        # A whole backward is a split one whose halves follow each other: with split ones no order
        # is left out, unless splitting costs time.
        costs = split and any(each.split_s for each in prediction.stages)
        whole = math.floor(busiest_seconds(stages, prediction) / tick)
        load = whole if costs else max(blocks.graph.loads)
        all_orders = (
            (split or not problem.train)
            and not costs
            and problem.micro_batches % stages.pipeline_count == 0
        )
        proof = _proof(self.scheduler.name, blocks, found, all_orders, load)
        schedule = replace(
            schedule, period=schedule.period if found.repetend else None, proof=proof
        )
        return self._judged(self.scheduler.name, schedule, found.makespan * tick)

    def _judged(self, name: str, schedule: Schedule, tasks_s: float = math.inf) -> _Candidate:
        """The schedule with the step that it makes; a proof is void where tasks are not done in
        `tasks_s`.
        """
        step = simulate(schedule, self.stages.stage_devices, self.prediction)
        wait = max(span.end for span in step.spans) > tasks_s * (1 + SAME)
        if wait:
            schedule = replace(schedule, period=None, proof=None)
        excess = [
            max(0, peak - self.problem.memory_of(device))
            for device, peak in enumerate(step.peak_memory)
        ]
        return _Candidate(name, schedule, step.end, max(step.peak_memory), sum(excess), wait)


def _proof(
    name: str, blocks: StageBlocks, found: BlockSchedule, all_orders: bool, load: int
) -> Proof:
    """Proof of the period or, without a steady state, of the whole step, in seconds. `load` is a
    lower bound on one unit's time on the busiest device, in any order.
    """
    if found.repetend is not None:
        least = found.lower_bound if all_orders else load
        optimal = found.optimal and found.period == least
        return Proof(name, least * blocks.tick_s, optimal, blocks.rounding)
    # A chain of blocks and delays is overstated by less than a tick for each.
    error = 2 * found.units * len(blocks.graph.blocks)
    least = max(0, found.lower_bound - error) if all_orders else 0
    return Proof(name, least * blocks.tick_s, found.optimal and all_orders, error / found.makespan)
