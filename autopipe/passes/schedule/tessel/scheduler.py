"""Scheduler `tessel`: the best order found for a placement, at least as good as 1F1B and GPipe in
simulation.
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
from autopipe.passes.schedule.limits import SAME, lower_bound, min_time_after_tasks
from autopipe.passes.schedule.orders import find_repetends
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.published.base import GPipe
from autopipe.passes.schedule.published.one_f_one_b import (
    KForwardsKBackwards,
    OneForwardOneBackward,
)
from autopipe.passes.schedule.simulate import simulate, static_memory
from autopipe.passes.schedule.tessel.model import SearchOptions, require_memory
from autopipe.passes.schedule.tessel.search import search
from autopipe.passes.schedule.tessel.stage_blocks import (
    StageBlocks,
    add_links,
    add_memory,
    busiest_seconds,
    stage_blocks,
    stage_schedule,
)

_TICKS = 10_000
"""Number of ticks in the work of the busiest device on one micro-batch. Times are rounded up to
ticks, so each time is overstated by less than one tick.
"""

_MIN_SPLIT_SAVING = 0.05
"""Minimum fraction of the step that split backwards must save to be used. Programs with split
backwards are longer, and the two halves of a backward take longer than an unsplit backward (10%
longer for tiny operators), which the cost model does not include.
"""

_MAX_UNROLLED_TASKS = 60
"""Maximum number of tasks of a device before its order repeats. Each of them is a line of the
program.
"""
_PATIENCE = 8.0
"""Multiple of its time limit for which a search may run on a busy machine. There it then finds the
result that it finds on an idle machine, so that equal requests make equal plans.
"""


@dataclass(frozen=True, slots=True)
class Tessel:
    """Search, for any placement, for the order of tasks with the shortest period of its steady
    state, then the shortest warm-up and cool-down, then the least memory.

    Lin et al., "Tessel: Boosting Distributed Execution of Large DNN Models via Flexible Schedule
    Search" (HPCA 2024). Stages may form chains or branches. A device may run several stages, a
    stage may run on several devices, and each stage has its own micro-batch size. Backwards are
    split into input gradients and weight gradients if this shortens the step by more than 5%. They
    are also split if this holds for a step of fewer micro-batches, and repeating the order of that
    step is shorter than the unsplit schedule. 1F1B and GPipe (kFkB if micro-batch sizes differ) are
    simulated too, and the schedule with the shortest step that fits in memory is used. If messages
    of the result wait for each other on their links, a second search includes the links.
    """

    time_limit: float = 4.0
    """Seconds that the search may take. They are counted as the work of an idle machine, so that
    equal requests make equal plans on any machine. If the plan has a time limit, that limit is
    measured by the clock.
    """

    name: ClassVar[str] = "tessel"

    def requires(self, problem: Problem, placement: Placement) -> None:
        """Raise ConfigurationError unless the time limit is above 0."""
        if not self.time_limit > 0:
            raise ConfigurationError(
                f"schedule.time_limit is {self.time_limit:g}, expected a number above 0",
                hint="set schedule.time_limit to a number of seconds",
            )

    def run(self, problem: Problem, placement: Placement) -> Schedule:
        """Return the best schedule found for a placement whose stages form any DAG. If no schedule
        fits in memory, return the schedule that exceeds the memory limits least. Raises
        InfeasibleError if there is no schedule.
        """
        return self._run(problem, placement, lambda each: predict(each, placement))

    def run_with(self, problem: Problem, placement: Placement, prediction: Prediction) -> Schedule:
        """Return the best schedule found for the times in `prediction`, which are used for any
        number of micro-batches.
        """
        return self._run(problem, placement, lambda _: prediction)

    def _run(
        self, problem: Problem, placement: Placement, prediction_of: Callable[[Problem], Prediction]
    ) -> Schedule:
        """Return the best schedule found. `prediction_of` returns the prediction for the problem,
        possibly with fewer micro-batches.
        """
        stages = StageGraph.of(problem, placement)
        prediction = prediction_of(problem)
        bound = lower_bound(problem, placement, prediction)
        deadline = math.inf if problem.time_limit is None else time.monotonic() + problem.time_limit
        best = _Search(self, problem, placement, stages, prediction, prediction_of, deadline).best(
            bound
        )
        if best is None:
            raise InfeasibleError(
                "every order of the stages' tasks exceeds the memory limit of a device",
                hint="use more devices, smaller micro-batches or a larger memory limit",
            )
        # Without a steady state, the proof covers the complete step, including gradient all-reduce
        # and update.
        proof = best.schedule.proof or Proof(best.name, 0.0, optimal=False)
        if best.schedule.period is None:
            step_bound = max(proof.lower_bound + min_time_after_tasks(stages, prediction), bound)
            rounding = 0.0 if best.step <= bound * (1 + SAME) else proof.rounding
            optimal = best.step * (1 - rounding) <= step_bound * (1 + SAME)
            proof = replace(proof, lower_bound=step_bound, optimal=optimal, rounding=rounding)
        return replace(best.schedule, proof=proof)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A schedule with its simulated step (seconds), the highest peak memory of a device (bytes),
    and the scheduler's name.
    """

    name: str
    schedule: Schedule
    step: float
    peak: int
    excess: int
    """Sum over all devices of the bytes that they need beyond their memory limits."""
    messages_wait: bool
    """True if the tasks end later in the simulation than in the search, because messages wait for
    each other on their links, which the search ignores.
    """


def _better_candidate(new: _Candidate, old: _Candidate | None, min_saving: float) -> _Candidate:
    """Return the better of two candidates. The candidate with the smaller memory excess is better.
    With equal excess, `new` is better only if its step is shorter than that of `old` by at least
    the fraction `min_saving`.

    If `min_saving` permits equal steps and the steps are equal, the candidate with the lower peak
    memory is better; ties go to `new`.
    """
    if old is None or new.excess < old.excess:
        return new
    if new.excess > old.excess or new.step > old.step * (1 - min_saving + SAME):
        return old
    return new if new.step < old.step * (1 - SAME) or new.peak <= old.peak else old


def _reaches_bound(candidate: _Candidate, bound: float) -> bool:
    """True if the candidate fits in memory and its step equals the lower bound `bound`, in
    seconds.
    """
    return not candidate.excess and candidate.step <= bound * (1 + SAME)


def repeated_schedule(schedule: Schedule, times: int, stages: StageGraph) -> Schedule:
    """Return the schedule that runs `schedule` `times` times, each time on further
    micro-batches.
    """

    def shifted(task: Task, number: int) -> Task:
        """Return the task in repetition `number`."""
        own = schedule.micro_batches * stages.micro_batch_ratio_at(task.stage)
        return replace(task, micro_batch=task.micro_batch + number * own)

    orders = tuple(
        tuple(shifted(task, number) for number in range(times) for task in order)
        for order in schedule.tasks
    )
    return Schedule(schedule.micro_batches * times, orders, find_repetends(orders))


@dataclass(frozen=True, slots=True)
class _Search:
    """Search for the schedule of one problem and placement."""

    scheduler: Tessel
    problem: Problem
    placement: Placement
    stages: StageGraph
    prediction: Prediction
    prediction_of: Callable[[Problem], Prediction]
    """Returns the prediction for a problem that differs from `problem` in the number of
    micro-batches.
    """
    deadline: float
    """Value of `time.monotonic` from which no further numbers of micro-batches are searched."""

    def best(self, bound: float) -> _Candidate | None:
        """Return the best candidate, or None if there is none. `bound` is a lower bound of the step
        in seconds; the search ends when a candidate reaches it.

        The schedule with split backwards is chosen if it saves `_MIN_SPLIT_SAVING` of the step. If
        it saves less, but splitting saves enough for fewer micro-batches
        (`_repeated_split_candidate`), the better of the split schedule and the repeated schedule is
        chosen. Otherwise the schedule with unsplit backwards is chosen.
        """
        best = self._best_of(self._unsplit_candidates(), bound)
        if not self.problem.train or (best is not None and _reaches_bound(best, bound)):
            return best
        split = self._best_of(self._split_candidates(), bound)
        if split is None:
            return best
        chosen = _better_candidate(split, best, _MIN_SPLIT_SAVING)
        if chosen is split or split.excess or split.step >= chosen.step * (1 - SAME):
            return chosen
        repeated = self._repeated_split_candidate(chosen.step)
        return chosen if repeated is None else _better_candidate(split, repeated, 0.0)

    def _repeated_split_candidate(self, longest_s: float) -> _Candidate | None:
        """Return a schedule with split backwards of fewer micro-batches, repeated until all
        micro-batches have run, or None if none qualifies.

        Warm-up and cool-down are a larger fraction of the step if there are fewer micro-batches, so
        splitting may save enough only there. The result has the largest number n of micro-batches
        per repetition with two properties. First, the repeated split schedule takes less than
        `longest_s` seconds. Second, splitting saves `_MIN_SPLIT_SAVING` of a step of n
        micro-batches, or this method finds a repeated split schedule that is shorter than the
        unsplit schedule of n micro-batches.
        """
        count = self.problem.micro_batches
        for count_per_run in reversed(divisors(count)[:-1]):
            times = count // count_per_run
            if count_per_run % self.stages.pipeline_count or time.monotonic() > self.deadline:
                continue
            problem = replace(
                self.problem,
                micro_batches=count_per_run,
                batch_size=count_per_run * self.problem.micro_batch_size,
            )
            fewer = replace(self, problem=problem, prediction=self.prediction_of(problem))
            bound = lower_bound(problem, self.placement, fewer.prediction)
            if times * bound >= longest_s:
                continue
            split = fewer._best_of(fewer._split_candidates(), bound)
            if split is None or split.excess or times * split.step >= longest_s:
                continue
            unsplit = fewer._best_of(fewer._unsplit_candidates(), bound)
            if _better_candidate(split, unsplit, _MIN_SPLIT_SAVING) is split or (
                unsplit and fewer._repeated_split_candidate(unsplit.step)
            ):
                return self._simulate(
                    split.name, repeated_schedule(split.schedule, times, self.stages)
                )
        return None

    def _best_of(self, candidates: Iterable[_Candidate], bound: float) -> _Candidate | None:
        """Return the best of the candidates, or None if there are none. Stops at the first
        candidate that reaches `bound`.
        """
        best: _Candidate | None = None
        for candidate in candidates:
            best = _better_candidate(candidate, best, 0.0)
            if _reaches_bound(best, bound):
                break
        return best

    def _unsplit_candidates(self) -> Iterator[_Candidate]:
        """Yield candidates with unsplit backwards: published schedules first, then searched
        schedules. The published schedules are 1F1B and GPipe, or kFkB if micro-batch sizes differ;
        with equal sizes, kFkB equals 1F1B.
        """
        published: tuple[Scheduler, ...] = (OneForwardOneBackward(), GPipe())
        for scheduler in (KForwardsKBackwards(),) if self.stages.ratios else published:
            schedule = scheduler.run(self.problem, self.placement)
            yield self._simulate(scheduler.name, schedule)
        yield from self._searched_candidates(split=False)

    def _split_candidates(self) -> Iterator[_Candidate]:
        """Yield searched candidates with split backwards."""
        return self._searched_candidates(split=True)

    def _searched_candidates(self, split: bool) -> Iterator[_Candidate]:
        """Yield the candidate of a search without links. If its messages wait for each other, also
        yield the candidate of a second search, in which messages are blocks on links. `split` is
        True for split backwards.
        """
        for links in (False, True):
            found = self._search_once(split, links)
            if found is not None:
                yield found
            if found is None or not found.messages_wait:
                break

    def _search_once(self, split: bool, links: bool) -> _Candidate | None:
        """Return the candidate of one search; None if the search finds no order of the blocks of
        one micro-batch that keeps the memory limits. `split` is True for split backwards, `links`
        if messages are blocks on links.
        """
        problem = self.problem
        stages = self.stages
        prediction = self.prediction
        repetitions = -(-problem.micro_batches // stages.pipeline_count)
        tick = busiest_seconds(stages, prediction) / _TICKS
        blocks = stage_blocks(stages, prediction, problem.train, tick, split=split)
        if links:
            blocks = add_links(blocks, stages, prediction.messages)
        static = static_memory(stages.devices, stages.stage_devices, prediction.stages)
        free = [problem.memory_of(device) - used for device, used in enumerate(static)]
        blocks = add_memory(blocks, prediction.stages, free, repetitions)
        # Up to four searches share the time limit: with unsplit and with split backwards, each
        # without and with links.
        limit = self.scheduler.time_limit
        patience = _PATIENCE
        if problem.time_limit is not None:
            limit = min(limit, problem.time_limit)
            patience = 1.0
        limit /= 4 if problem.train else 2
        options = SearchOptions(
            limit, problem.seed, patience=patience, unrolled=_MAX_UNROLLED_TASKS
        )
        try:
            require_memory(blocks.graph, repetitions)
            found = search(blocks.graph, repetitions, options)
        except InfeasibleError:
            return None
        schedule = stage_schedule(blocks, found, stages, problem.micro_batches)
        # A search with split backwards covers all orders, unless splitting costs time: two adjacent
        # halves are an unsplit backward.
        has_split_cost = split and any(stage.split_s for stage in prediction.stages)
        unsplit_load = math.floor(busiest_seconds(stages, prediction) / tick)
        load = unsplit_load if has_split_cost else max(blocks.graph.loads)
        all_orders = (
            (split or not problem.train)
            and not has_split_cost
            and problem.micro_batches % stages.pipeline_count == 0
        )
        proof = _make_proof(self.scheduler.name, blocks, found, all_orders, load)
        schedule = replace(
            schedule, period=schedule.period if found.repetend else None, proof=proof
        )
        return self._simulate(self.scheduler.name, schedule, found.makespan * tick)

    def _simulate(self, name: str, schedule: Schedule, tasks_s: float = math.inf) -> _Candidate:
        """Return the candidate of a schedule, with its simulated step. If the tasks end later than
        `tasks_s` seconds, their end in the search, the period and proof from the search are
        removed.
        """
        step = simulate(schedule, self.stages.stage_devices, self.prediction)
        messages_wait = max(span.end for span in step.spans) > tasks_s * (1 + SAME)
        if messages_wait:
            schedule = replace(schedule, period=None, proof=None)
        excess = [
            max(0, peak - self.problem.memory_of(device))
            for device, peak in enumerate(step.peak_memory)
        ]
        peak = max(step.peak_memory)
        return _Candidate(name, schedule, step.end, peak, sum(excess), messages_wait)


def _make_proof(
    name: str, blocks: StageBlocks, found: BlockSchedule, all_orders: bool, load: int
) -> Proof:
    """Return the proof of the period or, without a steady state, of the step, with times in
    seconds.

    `load` is a lower bound, in ticks, of the time of the busiest device per micro-batch in any
    order. `all_orders` is True if the search covers all orders of the placement. `name` is the name
    of the scheduler.
    """
    if found.repetend is not None:
        bound = found.lower_bound if all_orders else load
        optimal = found.optimal and found.period == bound
        return Proof(name, bound * blocks.tick_s, optimal, blocks.rounding)
    # Times are rounded to ticks, which lengthens a path by up to one tick per block and per delay
    # on it. The bound is reduced by all of these ticks, so that it remains a lower bound.
    error = 2 * found.units * len(blocks.graph.blocks)
    bound = max(0, found.lower_bound - error) if all_orders else 0
    optimal = found.optimal and all_orders
    return Proof(name, bound * blocks.tick_s, optimal, error / found.makespan)
