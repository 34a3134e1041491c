"""Limits of a step: the memory there is, the least time it could take, and how long it takes under
1F1B.

Searches ask for thousands of steps under 1F1B: those of chains are worked out without a list of
tasks.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.errors import OutOfMemoryError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Schedule, StageGraph
from autopipe.ir.timeline import Message, Prediction, StagePrediction, Timeline
from autopipe.ir.words import plural
from autopipe.passes.cost.memory_check import size_text
from autopipe.passes.cost.stages import StageCost, step_seconds
from autopipe.passes.schedule.predict import predicted, ticks_of
from autopipe.passes.schedule.published.one_f_one_b import order_kfkb
from autopipe.passes.schedule.simulate import simulate
from autopipe.passes.schedule.tessel.model import makespan_bound
from autopipe.passes.schedule.tessel.stage_blocks import stage_blocks

SAME = 1e-9
"""Relative difference of times that are equal but for the rounding of floats."""

# Seconds of a tick: small enough that rounding down to it is no more than rounding of floats.
_TICK_S = 1e-15

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Step:
    """A step of which no tasks are held; all as of a `Timeline`."""

    end: float
    peak_memory: tuple[int, ...]
    static_memory: tuple[int, ...]


def check_memory(problem: Problem, placement: Placement, timeline: Timeline | Step) -> None:
    """Raise OutOfMemoryError, naming the device that misses its limit by most, its stages and by
    how much.
    """
    excess = {
        device: peak - problem.memory_of(device)
        for device, peak in enumerate(timeline.peak_memory)
        if peak > problem.memory_of(device)
    }
    if not excess:
        return
    device = max(excess, key=lambda each: (excess[each], -each))
    stages = [index for index, stage in enumerate(placement.stages) if device in stage.devices]
    named = f"{plural(len(stages), 'stage')} {', '.join(map(str, stages))}"
    peak = timeline.peak_memory[device]
    limit = problem.memory_of(device)
    static = timeline.static_memory[device]
    others = (
        (
            f", and {len(excess) - 1} more "
            f"{plural(len(excess) - 1, 'device exceeds', 'devices exceed')} theirs"
        )
        if len(excess) > 1
        else ""
    )
    raise OutOfMemoryError(
        f"{named} on device {device} would need {size_text(peak)} where {size_text(limit)} may "
        "be used: "
        f"{size_text(excess[device])} too much "
        f"({size_text(static)} are parameters, gradients, optimizer state and buffers){others}",
        hint=(
            "use smaller micro-batches, a schedule that keeps fewer of them, more devices or a "
            "larger memory limit"
        ),
    )


def lower_bound(problem: Problem, placement: Placement, prediction: Prediction) -> float:
    """Return the seconds that a step takes at least under any schedule of this placement.

    The bound is the maximum of the critical path of one micro-batch and, for each device, its
    computation between the earliest start and the minimum that follows. If backwards can be split,
    only their first halves count in what follows, and splitting takes no time. The update comes
    after that. If there are fewer micro-batches than pipelines, only the pipelines that have one
    count.
    """
    stages = StageGraph.of(problem, placement)
    end_s = least_end(stages, prediction)
    units = problem.micro_batches // stages.pipeline_count
    if not units:
        units = 1
        stages, prediction = _first_pipelines(stages, prediction, problem.micro_batches)
    free = replace(prediction, stages=tuple(map(_freely_split, prediction.stages)))
    blocks = stage_blocks(stages, free, problem.train, _TICK_S, split=problem.train, up=False)
    return makespan_bound(blocks.graph, units) * _TICK_S + end_s


def _freely_split(stage: StagePrediction) -> StagePrediction:
    """Return the stage with halves of its backward that take no longer than the whole.

    If the device waits for the host in both halves, they take longer together than a backward that
    is not split.
    """
    input_gradient_s = min(stage.input_gradient_s, stage.backward_s)
    weight_gradient_s = min(stage.weight_gradient_s, stage.backward_s - input_gradient_s)
    return replace(
        stage, input_gradient_s=input_gradient_s, weight_gradient_s=weight_gradient_s, split_s=0.0
    )


def _first_pipelines(
    stages: StageGraph, prediction: Prediction, count: int
) -> tuple[StageGraph, Prediction]:
    """Return (graph, prediction): the stages of the first `count` pipelines alone, and what is
    predicted of them.
    """
    kept = [stage for stage, pipeline in enumerate(stages.pipelines) if pipeline < count]
    renumbered = {stage: position for position, stage in enumerate(kept)}
    graph = replace(
        stages,
        stage_devices=tuple(stages.stage_devices[stage] for stage in kept),
        edges=tuple(
            (renumbered[one], renumbered[other]) for one, other in stages.edges if one in renumbered
        ),
        pipelines=tuple(stages.pipelines[stage] for stage in kept),
        ratios=tuple(stages.ratios[stage] for stage in kept) if stages.ratios else (),
    )
    messages = (
        replace(
            each,
            source_stage=renumbered[each.source_stage],
            target_stage=renumbered[each.target_stage],
        )
        for each in prediction.messages
        if each.source_stage in renumbered
    )
    return graph, Prediction(tuple(prediction.stages[stage] for stage in kept), tuple(messages))


def least_end(stages: StageGraph, prediction: Prediction) -> float:
    """Seconds that a step takes at least after its last task: sums of gradients and the update."""
    ends: dict[int, float] = defaultdict(float)
    for devices, costs in zip(stages.stage_devices, prediction.stages, strict=True):
        for device in devices:
            ends[device] += costs.gradient_s + costs.update_s
    return min(ends.values())


def quality(schedule: Schedule, step_s: float, bound_s: float) -> tuple[bool, float]:
    """True if the schedule is proven to be the best for its placement, and the share that lies
    above what is proven. Of a searched steady state the period counts, of any other schedule the
    step, against `bound_s`.
    """
    proof = schedule.proof
    if proof is not None and schedule.period is not None:
        value = schedule.period
        bound = proof.lower_bound
        optimal = proof.optimal
    else:
        value = step_s
        bound = bound_s
        optimal = proof is not None and proof.optimal
    gap = max(0.0, (value - bound) / value) if value else 0.0
    optimal = optimal or gap <= SAME
    return optimal, 0.0 if optimal else gap


def busy_s(costs: Sequence[StageCost], micro_batches: int) -> float:
    """Seconds that the busiest stage takes of a step: the step is no shorter."""
    return max(step_seconds(cost, micro_batches) for cost in costs)


def quick_step(
    problem: Problem, placement: Placement, costs: Sequence[StageCost]
) -> Timeline | Step:
    """The step under 1F1B with stages of such costs, whatever memory says."""
    graph = StageGraph.of(problem, placement)
    prediction = predicted(problem, placement, costs)
    return predicted_step(graph, prediction, problem.micro_batches, problem.train)


def quick_step_seconds(problem: Problem, placement: Placement, costs: Sequence[StageCost]) -> float:
    """Seconds of that step. Raises InfeasibleError where memory does not hold the placement."""
    step = quick_step(problem, placement, costs)
    check_memory(problem, placement, step)
    return step.end


def predicted_step(
    graph: StageGraph, prediction: Prediction, micro_batches: int, train: bool
) -> Timeline | Step:
    """The step of kFkB's order with k = 1, which is 1F1B's where micro-batches are equal."""
    if is_chain(graph):
        return chain_step(graph, prediction, micro_batches, train)
    schedule = order_kfkb(graph, micro_batches, train, ticks_of(prediction.stages))
    return simulate(schedule, graph.stage_devices, prediction)


def is_chain(graph: StageGraph) -> bool:
    """True if stages have devices of their own, each sends to the next at least, and all run whole
    micro-batches.
    """
    groups = [device for group in graph.stage_devices for device in group]
    return (
        len(set(groups)) == len(groups)
        and set(graph.edges) >= set(itertools.pairwise(range(len(graph.stage_devices))))
        and not graph.ratios
        and graph.pipeline_count == 1
    )


def chain_step(graph: StageGraph, prediction: Prediction, micro_batches: int, train: bool) -> Step:
    """The step that `simulate` gives for kFkB's order with k = 1, to the last bit, where
    `is_chain`. With tasks of one length, stage s of p runs forward m in slot s + m (warming up) or
    s + 2m, and its backward in slot 2p - 1 - s + 2m. Whatever the lengths, a task waits only for
    tasks of earlier slots, so slots are gone through in order, all stages of a slot at once.
    """
    stages = prediction.stages
    ends = _ends(stages, prediction.messages, micro_batches, train)
    last = max(
        float(end + stage.gradient_s) + stage.update_s
        for end, stage in zip(ends, stages, strict=True)
    )  # In the order in which a simulation adds them.
    peak = [0] * graph.devices
    static = [0] * graph.devices
    for index, (stage, group) in enumerate(zip(stages, graph.stage_devices, strict=True)):
        kept = min(len(stages) - index, micro_batches) * stage.kept_bytes if train else 0
        for device in group:
            static[device] = stage.static_bytes
            peak[device] = stage.static_bytes + kept + stage.transient_bytes
    return Step(last, tuple(peak), tuple(static))


def _ends(
    stages: Sequence[StagePrediction], messages: Sequence[Message], count: int, train: bool
) -> _Floats:
    """When each stage's last task ends."""
    size = len(stages)
    # Of each pair of stages the slowest messages there and back: a link has one a micro-batch, in
    # order. A message of no bytes is there at once, whatever the link does.
    slowest: dict[tuple[int, int], tuple[float, float]] = {}
    for each in messages:
        there, back = slowest.get((each.source_stage, each.target_stage), (0.0, 0.0))
        there = max(there, each.forward_s if each.forward_bytes else 0.0)
        back = max(back, each.backward_s if each.backward_bytes else 0.0)
        slowest[each.source_stage, each.target_stage] = there, back
    ends = np.array(list(slowest), dtype=np.intp).reshape(-1, 2).T.copy()
    seconds = np.array(list(slowest.values())).reshape(-1, 2).T.copy()
    link_free = np.zeros_like(seconds)
    # When all is there that a micro-batch waits for: of each way (forward, backward) a row a stage.
    arrived = np.zeros((2, size, count))
    lengths = np.array([[stage.forward_s, stage.backward_s] for stage in stages]).T.copy()
    done = np.zeros(size)

    def run(way: int, runs: NDArray[np.bool_], number: NDArray[np.intp]) -> None:
        """One task of each stage that `runs`, with its messages."""
        done[runs] = np.maximum(done[runs], arrived[way][runs, number[runs]]) + lengths[way][runs]
        sent = runs[ends[way]]
        free = link_free[way]
        at = ends[way][sent]
        free[sent] = np.maximum(done[at], free[sent]) + seconds[way][sent]
        np.maximum.at(arrived[way], (ends[1 - way][sent], number[at]), free[sent])

    every = np.arange(size)
    warm_up = np.minimum(size - every, count) if train else np.full(size, count)
    for slot in range(2 * (size + count) - 1 if train else size + count - 1):
        early = slot - every
        late = (slot - every) // 2
        is_early = (early >= 0) & (early < warm_up)
        is_late = ((slot - every) % 2 == 0) & (late >= warm_up) & (late < count)
        run(0, is_early | is_late, np.where(is_early, early, late))
        if train:
            twice = slot - 2 * size + 1 + every
            run(1, (twice % 2 == 0) & (twice >= 0) & (twice < 2 * count), twice // 2)
    return done
