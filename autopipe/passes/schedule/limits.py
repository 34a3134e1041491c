"""Memory check of a simulated step, lower bounds of its time, and a fast computation of the step
under 1F1B.

Searches need the step under 1F1B for thousands of placements. For a chain of stages, `chain_step`
computes it without a list of tasks.
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
from autopipe.passes.schedule.predict import make_ticks, prediction_from_costs
from autopipe.passes.schedule.published.one_f_one_b import order_kfkb
from autopipe.passes.schedule.simulate import simulate
from autopipe.passes.schedule.tessel.model import makespan_bound
from autopipe.passes.schedule.tessel.stage_blocks import stage_blocks

SAME = 1e-9
"""Relative difference below which two times count as equal, because floating-point results are
rounded.
"""

_TICK_S = 1e-15
"""Seconds of a tick, the unit of integer times. It is so short that rounding a time to ticks is
negligible compared with the rounding of floating-point numbers.
"""

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The length and memory of a simulated step, without its tasks: `end` in seconds, the others in
    bytes per device. The fields have the names of those of a `Timeline`.
    """

    end: float
    peak_memory: tuple[int, ...]
    static_memory: tuple[int, ...]


def check_memory(problem: Problem, placement: Placement, timeline: Timeline | StepSummary) -> None:
    """Raise OutOfMemoryError if a device needs more memory than its limit.

    The message names the device with the largest excess, its stages and the bytes, and the number
    of other devices that exceed their limits.
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
    stage_text = f"{plural(len(stages), 'stage')} {', '.join(map(str, stages))}"
    peak = timeline.peak_memory[device]
    limit = problem.memory_of(device)
    static = timeline.static_memory[device]
    others = (
        (
            f", and {len(excess) - 1} more "
            f"{plural(len(excess) - 1, 'device exceeds', 'devices exceed')} the limit"
        )
        if len(excess) > 1
        else ""
    )
    raise OutOfMemoryError(
        f"{stage_text} on device {device} would need {size_text(peak)}, "
        f"{size_text(excess[device])} above the limit of {size_text(limit)} "
        f"({size_text(static)} are parameters, gradients, optimizer state and buffers){others}",
        hint=(
            "use smaller micro-batches, a schedule with fewer micro-batches in flight, more "
            "devices or a larger memory limit"
        ),
    )


def lower_bound(problem: Problem, placement: Placement, prediction: Prediction) -> float:
    """Return a lower bound, in seconds, of the step under any schedule of this placement.

    The bound is at least the critical path of one micro-batch. For each device, it is also at least
    the sum of three times: the earliest start of its computation, its computation, and the minimum
    time from the end of one of its tasks to the end of the micro-batch. The minimum time of
    gradient all-reduce and update at the end of the step is added.

    The bound assumes that each backward can be split into input and weight gradients at no cost.
    Other tasks never wait for weight gradients, so these do not count in the third time. If there
    are fewer micro-batches than pipelines, only the pipelines with a micro-batch count.
    """
    stages = StageGraph.of(problem, placement)
    end_s = min_time_after_tasks(stages, prediction)
    micro_batches_per_pipeline = problem.micro_batches // stages.pipeline_count
    if not micro_batches_per_pipeline:
        micro_batches_per_pipeline = 1
        stages, prediction = _first_pipelines(stages, prediction, problem.micro_batches)
    split_prediction = replace(prediction, stages=tuple(map(_with_free_split, prediction.stages)))
    blocks = stage_blocks(
        stages, split_prediction, problem.train, _TICK_S, split=problem.train, round_up=False
    )
    return makespan_bound(blocks.graph, micro_batches_per_pipeline) * _TICK_S + end_s


def _with_free_split(stage: StagePrediction) -> StagePrediction:
    """Return the stage with the two halves of a split backward shortened, so that together they
    take no longer than an unsplit backward.

    The predicted halves together can take longer, because the device may wait for the host in both.
    """
    input_gradient_s = min(stage.input_gradient_s, stage.backward_s)
    weight_gradient_s = min(stage.weight_gradient_s, stage.backward_s - input_gradient_s)
    return replace(
        stage, input_gradient_s=input_gradient_s, weight_gradient_s=weight_gradient_s, split_s=0.0
    )


def _first_pipelines(
    stages: StageGraph, prediction: Prediction, count: int
) -> tuple[StageGraph, Prediction]:
    """Return (graph, prediction) with only the stages and messages of the first `count`
    pipelines.
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


def min_time_after_tasks(stages: StageGraph, prediction: Prediction) -> float:
    """Return the minimum time, in seconds, between the last task of a step and the end of the step.

    It is the minimum, over all devices with a stage, of the time of the device's gradient
    all-reduces plus its update.
    """
    ends: dict[int, float] = defaultdict(float)
    for devices, costs in zip(stages.stage_devices, prediction.stages, strict=True):
        for device in devices:
            ends[device] += costs.gradient_s + costs.update_s
    return min(ends.values())


def optimality(schedule: Schedule, step_s: float, bound_s: float) -> tuple[bool, float]:
    """Return (optimal, gap) of a schedule, relative to a proven lower bound.

    If a search proved a lower bound of the schedule's period, its period is compared with that
    bound. Otherwise the step, which takes `step_s` seconds, is compared with its lower bound
    `bound_s`.

    - optimal: True if the period or step is proven to be the minimum for the placement.
    - gap: amount by which the period or step exceeds the bound, as a fraction of the period or
      step; 0 if optimal.
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
    """Return the seconds that the busiest stage computes in a step, which is a lower bound of the
    step.
    """
    return max(step_seconds(cost, micro_batches) for cost in costs)


def quick_step(
    problem: Problem, placement: Placement, costs: Sequence[StageCost]
) -> Timeline | StepSummary:
    """Return the step of a placement under kFkB with k = 1 (1F1B if all stages have equal
    micro-batch sizes), computed from the costs of its stages. Memory limits are ignored.
    """
    graph = StageGraph.of(problem, placement)
    prediction = prediction_from_costs(problem, placement, costs)
    return step_under_1f1b(graph, prediction, problem.micro_batches, problem.train)


def quick_step_seconds(problem: Problem, placement: Placement, costs: Sequence[StageCost]) -> float:
    """Return the seconds of the step of a placement under 1F1B. Raises OutOfMemoryError if a device
    needs more memory than its limit.
    """
    step = quick_step(problem, placement, costs)
    check_memory(problem, placement, step)
    return step.end


def step_under_1f1b(
    graph: StageGraph, prediction: Prediction, micro_batches: int, train: bool
) -> Timeline | StepSummary:
    """Return the step under schedule kFkB with k = 1, which is 1F1B if all stages have equal
    micro-batch sizes. The result has a list of tasks (`Timeline`) only if `is_chain(graph)` is
    False.
    """
    if is_chain(graph):
        return chain_step(graph, prediction, micro_batches, train)
    schedule = order_kfkb(graph, micro_batches, train, make_ticks(prediction.stages))
    return simulate(schedule, graph.stage_devices, prediction)


def is_chain(graph: StageGraph) -> bool:
    """True if `chain_step` applies to the stages: there is one pipeline, no two stages share a
    device, each stage except the last sends to the next, and all micro-batches have one size.
    """
    groups = [device for group in graph.stage_devices for device in group]
    return (
        len(set(groups)) == len(groups)
        and set(graph.edges) >= set(itertools.pairwise(range(len(graph.stage_devices))))
        and not graph.ratios
        and graph.pipeline_count == 1
    )


def chain_step(
    graph: StageGraph, prediction: Prediction, micro_batches: int, train: bool
) -> StepSummary:
    """Return the step that `simulate` computes for the order of kFkB with k = 1. The results are
    equal to the last bit. The graph must be a chain (`is_chain`).

    Suppose that each task takes one time slot, and let p be the number of stages. Stage s runs
    forward m in slot s + m during its warm-up and in slot s + 2m after it, and backward m in slot
    2p - 1 - s + 2m. Each task depends only on tasks of earlier slots. These dependencies do not
    change if tasks have other lengths. The real times are therefore computed slot by slot, for all
    stages of a slot at once. Time O((p + micro-batches) * (p + pairs of stages that exchange
    messages)).
    """
    stages = prediction.stages
    last_ends = _end_of_each_stage(stages, prediction.messages, micro_batches, train)
    # The result of a floating-point sum depends on the order of its additions. The order here is
    # that of `simulate`, so that both functions return equal times.
    step_end = max(
        float(last_end + stage.gradient_s) + stage.update_s
        for last_end, stage in zip(last_ends, stages, strict=True)
    )
    peak = [0] * graph.devices
    static = [0] * graph.devices
    for index, (stage, group) in enumerate(zip(stages, graph.stage_devices, strict=True)):
        in_flight = min(len(stages) - index, micro_batches)
        saved = in_flight * stage.kept_bytes if train else 0
        for device in group:
            static[device] = stage.static_bytes
            peak[device] = stage.static_bytes + saved + stage.transient_bytes
    return StepSummary(step_end, tuple(peak), tuple(static))


def _end_of_each_stage(
    stages: Sequence[StagePrediction], messages: Sequence[Message], count: int, train: bool
) -> _Floats:
    """Return the time in seconds at which the last task of each stage ends. Each stage runs `count`
    micro-batches.
    """
    size = len(stages)
    # Seconds of the slowest activation and of the slowest gradient between two stages. Each link
    # carries one message per micro-batch and direction, so the slowest link decides. A message of 0
    # bytes arrives immediately.
    slowest: dict[tuple[int, int], tuple[float, float]] = {}
    for message in messages:
        pair = (message.source_stage, message.target_stage)
        forward_s, backward_s = slowest.get(pair, (0.0, 0.0))
        forward_s = max(forward_s, message.forward_s if message.forward_bytes else 0.0)
        backward_s = max(backward_s, message.backward_s if message.backward_bytes else 0.0)
        slowest[pair] = forward_s, backward_s
    # The first index of these arrays is the direction: 0 for forward, 1 for backward.
    # senders[0], senders[1]: sending stage of each pair in forward and in backward.
    senders = np.array(list(slowest), dtype=np.intp).reshape(-1, 2).T.copy()
    message_s = np.array(list(slowest.values())).reshape(-1, 2).T.copy()
    link_free = np.zeros_like(message_s)
    # arrived[direction, s, m]: time in seconds at which all messages for micro-batch m have arrived
    # at stage s.
    arrived = np.zeros((2, size, count))
    task_s = np.array([[stage.forward_s, stage.backward_s] for stage in stages]).T.copy()
    done = np.zeros(size)  # End, in seconds, of the latest task of each stage so far.

    def run(direction: int, runs: NDArray[np.bool_], number: NDArray[np.intp]) -> None:
        """Run one task on each stage s for which runs[s] is True: micro-batch number[s] in the
        given direction (0 for forward, 1 for backward). Then send the messages of these tasks.
        """
        start = np.maximum(done[runs], arrived[direction][runs, number[runs]])
        done[runs] = start + task_s[direction][runs]
        sent = runs[senders[direction]]
        free = link_free[direction]
        sender = senders[direction][sent]
        receiver = senders[1 - direction][sent]
        free[sent] = np.maximum(done[sender], free[sent]) + message_s[direction][sent]
        np.maximum.at(arrived[direction], (receiver, number[sender]), free[sent])

    stage = np.arange(size)
    warm_up = np.minimum(size - stage, count) if train else np.full(size, count)
    for slot in range(2 * (size + count) - 1 if train else size + count - 1):
        # Micro-batch whose forward runs in this slot if the stage is still in its warm-up.
        early = slot - stage
        # Micro-batch whose forward runs in this slot if the stage has finished its warm-up.
        late = (slot - stage) // 2
        is_early = (early >= 0) & (early < warm_up)
        is_late = ((slot - stage) % 2 == 0) & (late >= warm_up) & (late < count)
        run(0, is_early | is_late, np.where(is_early, early, late))
        if train:
            # Twice the micro-batch whose backward runs in this slot. An odd or negative number
            # means that no backward runs.
            twice = slot - 2 * size + 1 + stage
            run(1, (twice % 2 == 0) & (twice >= 0) & (twice < 2 * count), twice // 2)
    return done
