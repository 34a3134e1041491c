"""1F1B and related schedules: 1F1B+, kFkB, interleaved 1F1B, looped breadth-first, Chimera and
Hanayo.

In formulas, p is the number of devices of a pipeline and v the number of stages per device. F and B
are the times that one micro-batch takes on one device in all of its forwards and in all of its
backwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Phase, Schedule, StageGraph, Task
from autopipe.ir.words import plural
from autopipe.passes.cost.memory import in_flight_samples_by_stage
from autopipe.passes.schedule.orders import (
    Ticks,
    find_repetends,
    merge_orders,
    require_equal_micro_batches,
)
from autopipe.passes.schedule.predict import task_ticks
from autopipe.passes.schedule.published.base import (
    LOOPS,
    OPPOSITE,
    WAVES,
    PlacementPattern,
    Published,
    RankStages,
    alternate_phases,
    first_slot,
    forward_and_backward_slots,
    grid_slots,
    orders_by_slot,
)


@dataclass(frozen=True, slots=True)
class OneForwardOneBackward:
    """Each stage alternates one forward and one backward. It has as many micro-batches in flight
    (their forward has run, their backward has not) as there are stages on the longest path from it
    to an end of the graph of stages.

    For a chain this is 1F1B with flushes, Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN
    Training" (2021), section 2.2. For a DAG it is the extension by the depth of each stage of Jeon
    et al., "GraphPipe" (2024). Inference runs only forwards.
    """

    name: ClassVar[str] = "1f1b"

    def requires(self, problem: Problem, placement: Placement) -> None:
        """Raise InfeasibleError if stages have different micro-batch sizes."""
        require_equal_micro_batches(self.name, problem, placement)

    def run(self, problem: Problem, placement: Placement) -> Schedule:
        """Return the 1F1B schedule of a placement."""
        graph = StageGraph.of(problem, placement)
        return order_kfkb(
            graph, problem.micro_batches, problem.train, task_ticks(problem, placement)
        )


class OneForwardOneBackwardPlus(Published):
    """1F1B for placements in which some stages span the devices of other stages, such as a large
    embedding that is sharded over all devices. The other stages run 1F1B. The forward of a spanning
    stage runs directly before the forward of n, the next stage that does not span others, and its
    backward directly after the backward of n. If there is no such stage, its forward runs directly
    after the forward of l, the last stage that does not span others, and its backward directly
    before the backward of l.

    Lin et al., "Tessel" (HPCA 2024), section VI-A. It is the paper's baseline for placements that
    shard large embeddings over all devices. Without spanning stages it equals 1F1B.
    """

    name: ClassVar[str] = "1f1b_plus"

    def order(self, graph: StageGraph, micro_batches: int) -> Schedule:
        """Return the schedule of a training step. Raises InfeasibleError if the placement does not
        suit this schedule.
        """
        own = [stage for (stage,) in self.rank_stages(graph, micro_batches)]
        keyed = [pair for m in range(micro_batches) for pair in _keyed_tasks(graph, own, m)]
        lists: list[list[Task]] = [[] for _ in range(graph.devices)]
        for _, task in sorted(keyed, key=lambda pair: pair[0]):
            for device in graph.stage_devices[task.stage]:
                lists[device].append(task)
        return Schedule(micro_batches, tuple(map(tuple, lists)), find_repetends(lists))

    def rank_stages(self, graph: StageGraph, micro_batches: int) -> RankStages:
        """Return the stages that run 1F1B, one per pipeline rank: the stages whose devices are not
        a proper superset of another stage's devices. Raises InfeasibleError if there are several
        pipelines or two of these stages share a device.
        """
        if graph.pipeline_count > 1:
            raise InfeasibleError(
                "schedule 1f1b_plus requires one pipeline, but the placement uses "
                f"{graph.pipeline_count}"
            )
        groups = [frozenset(group) for group in graph.stage_devices]
        own = [
            stage
            for stage, group in enumerate(groups)
            if not any(other < group for other in groups)
        ]
        for other, stage in sorted(combinations(own, 2), key=lambda pair: pair[1]):
            if both := groups[stage] & groups[other]:
                raise InfeasibleError(
                    "schedule 1f1b_plus requires at most one stage on each device in addition "
                    f"to stages that span several devices, but stages {other} and {stage} are "
                    f"both on device {min(both)}",
                    hint="use schedule 1f1b, which supports several stages per device",
                )
        return tuple((stage,) for stage in own)


def _keyed_tasks(
    graph: StageGraph, own: list[int], m: int
) -> Iterator[tuple[tuple[int, int, bool, int], Task]]:
    """Yield (key, task) for all tasks of micro-batch m. The tasks of all micro-batches, sorted by
    key, have the order of the schedule.

    `own` are the stages that run 1F1B. For these stages, the first element of a key is twice the
    time slot of the task in the diagram of 1F1B, in which each task takes one slot. For another
    stage it is an odd number next to the key of a stage in `own`: the next stage in `own`, or the
    last if there is no next.
    """
    forwards = [Task(s, Phase.FORWARD, m) for s in own]
    backwards = [Task(s, Phase.BACKWARD, m) for s in own]
    slots = {
        task: slot
        for slot, task in forward_and_backward_slots(
            forwards, backwards, first_slot(m, len(own), len(own))
        )
    }
    for stage in range(len(graph.stage_devices)):
        nearest = next((other for other in own if other >= stage), own[-1])
        side = (nearest < stage) - (nearest > stage)
        for phase, direction in ((Phase.FORWARD, 1), (Phase.BACKWARD, -1)):
            key = 2 * slots[Task(nearest, phase, m)] + direction * side
            yield (key, m, phase is Phase.BACKWARD, direction * stage), Task(stage, phase, m)


@dataclass(frozen=True, slots=True)
class KForwardsKBackwards:
    """Each stage alternates k forwards and k backwards, and has as many samples in flight (their
    forward has run, their backward has not) as the stages after it require.

    Jeon et al., "GraphPipe" (2024), Algorithm 2. Stages may have different micro-batch sizes and
    form any DAG. The number of samples in flight follows from the paper's Table 2, and each
    backward runs as early as that number permits. With equal micro-batch sizes and k = 1 it equals
    1F1B. Inference runs only forwards.
    """

    name: ClassVar[str] = "kfkb"

    k: int | tuple[int, ...] = 1
    """Number of forwards, and of backwards, that a stage runs in a row: one number for all stages,
    or one for each stage. The value 1 has the minimum number of samples in flight.
    """

    def requires(self, problem: Problem, placement: Placement) -> None:
        """Raise ConfigurationError if a k is below 1, or if their number differs from the number of
        stages.
        """
        stages = len(placement.stages)
        if len(self.k_per_stage(stages)) != stages:
            raise ConfigurationError(
                f"schedule.k lists {len(self.k_per_stage(stages))} "
                f"{plural(len(self.k_per_stage(stages)), 'number')}, but the placement consists of "
                f"{stages} {plural(stages, 'stage')}",
                hint="set schedule.k to one number, or to one number per stage",
            )
        if min(self.k_per_stage(stages)) < 1:
            raise ConfigurationError(
                f"schedule.k contains {min(self.k_per_stage(stages))}, expected at least 1",
                hint="set schedule.k to 1 or more",
            )

    def run(self, problem: Problem, placement: Placement) -> Schedule:
        """Return the kFkB schedule of a placement."""
        graph = StageGraph.of(problem, placement)
        ticks = task_ticks(problem, placement)
        return order_kfkb(
            graph,
            problem.micro_batches,
            problem.train,
            ticks,
            self.k_per_stage(len(placement.stages)),
        )

    def k_per_stage(self, stages: int) -> tuple[int, ...]:
        """Return k of each of the `stages` stages. If `k` is a tuple, it is returned unchanged."""
        return (self.k,) * stages if isinstance(self.k, int) else self.k


def order_kfkb(
    graph: StageGraph,
    micro_batches: int,
    train: bool,
    ticks: Ticks,
    k_per_stage: Sequence[int] = (),
) -> Schedule:
    """Return the kFkB schedule: the `stage_order` of each stage, merged into one order per device.

    `micro_batches` is the number of micro-batches of the problem; a stage with smaller
    micro-batches runs several of them per micro-batch of the problem. `k_per_stage` contains k of
    each stage; empty means 1 for all stages, which is 1F1B if all micro-batches have one size.

    In the case of 1F1B, the orders of stages contain no circular wait. Proof: let depth(s) be the
    number of stages on the longest path from stage s to an end of the graph. Give forward F(s, m)
    the number 2m - depth(s) and backward B(s, m) the number 2m + depth(s) - 1. Each task has a
    larger number than the tasks that it depends on, because depth decreases along each edge.
    """
    k_per_stage = k_per_stage or (1,) * len(graph.stage_devices)
    numbers = (graph.micro_batches_of(stage, micro_batches) for stage in range(len(k_per_stage)))
    settings = zip(max_in_flight(graph, k_per_stage), k_per_stage, numbers, strict=True)
    lists = merge_orders(
        [stage_order(stage, *each, train) for stage, each in enumerate(settings)], graph, ticks
    )
    return Schedule(micro_batches, lists, find_repetends(lists))


def max_in_flight(graph: StageGraph, k_per_stage: Sequence[int]) -> tuple[int, ...]:
    """Return, for each stage, the maximum number of the stage's micro-batches in flight: their
    forward has run, their backward has not. `k_per_stage` contains k of each stage.
    """
    ratios = [graph.micro_batch_ratio_at(stage) for stage in range(len(k_per_stage))]
    samples = [math.lcm(*ratios) // ratio for ratio in ratios]
    in_flight = in_flight_samples_by_stage(k_per_stage, samples, graph.edges)
    return tuple(count // size for count, size in zip(in_flight, samples, strict=True))


def stage_order(
    stage: int, in_flight: int, k: int, micro_batches: Sequence[int], train: bool
) -> list[Task]:
    """Return the order of tasks of a stage: `in_flight` forwards, then alternately k backwards and
    k forwards, then the remaining backwards. Without `train`, return only the forwards.
    """
    forwards = [Task(stage, Phase.FORWARD, m) for m in micro_batches]
    backwards = [Task(stage, Phase.BACKWARD, m) for m in micro_batches]
    return alternate_phases(forwards, backwards, in_flight, k) if train else forwards


class InterleavedOneForwardOneBackward(Published):
    """1F1B with several stages per device. Each device runs p micro-batches on its first stage,
    then these p micro-batches on its second stage, and so on, where p is the number of devices of a
    pipeline.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM" (2021), section 2.2.2. With v stages per device, the bubble is (p - 1)(F + B) / v,
    where F and B are the times of the forwards and of the backwards of one micro-batch on one
    device. A device saves the activations of at most vp + p - 1 forwards of stages.
    """

    name: ClassVar[str] = "interleaved_1f1b"
    pattern: ClassVar[PlacementPattern] = LOOPS

    def rank_stages(self, graph: StageGraph, micro_batches: int) -> RankStages:
        """Return the stages of each pipeline rank. Raises InfeasibleError if a device has only one
        stage, or if p does not divide the number of micro-batches.
        """
        rank_stages = self.pattern.rank_stages(self.name, graph)
        if len(rank_stages[0]) < 2:
            raise InfeasibleError(
                f"schedule {self.name} requires several stages per device, but the placement "
                "assigns one",
                hint="use schedule 1f1b",
            )
        if micro_batches % len(rank_stages):
            raise InfeasibleError(
                f"schedule {self.name} requires a multiple of {len(rank_stages)} "
                f"{plural(len(rank_stages), 'micro-batch')} (the devices of a pipeline), "
                f"but the step has {micro_batches}",
                hint=f"set --micro-batches to a multiple of {len(rank_stages)}",
            )
        return rank_stages

    def orders(self, rank_stages: RankStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        """Return, for each rank, forwards until the first backward can run, then alternately one
        backward and one forward, then the remaining backwards. Forwards run a group of p
        micro-batches on each of the rank's stages before the next group. So do backwards, which
        visit the stages in reverse order.
        """
        p = len(rank_stages)
        found = []
        groups = [range(first, first + p) for first in range(0, micro_batches, p)]
        for rank, stages in enumerate(rank_stages):
            forwards = [
                Task(s, Phase.FORWARD, m) for group in groups for s in stages for m in group
            ]
            backwards = [
                Task(s, Phase.BACKWARD, m) for group in groups for s in stages[::-1] for m in group
            ]
            in_flight = (len(stages) - 1) * p + 2 * (p - 1 - rank) + 1
            found.append(alternate_phases(forwards, backwards, in_flight))
        return found


class LoopedBreadthFirst(Published):
    """GPipe with several stages per device: a device runs all micro-batches on one stage before it
    runs the next stage.

    Lamy-Poirier, "Breadth-First Pipeline Parallelism" (2022), section 4.1. On p devices with v
    stages each, and with at least p micro-batches, the bubble is (p - 1)(F + B) / v, where F and B
    are the times of the forwards and of the backwards of one micro-batch on one device. The
    activations of all micro-batches are saved.
    """

    name: ClassVar[str] = "looped_bfs"
    pattern: ClassVar[PlacementPattern] = LOOPS

    def orders(self, rank_stages: RankStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        """Return, for each rank, the forwards of all micro-batches stage by stage, then the
        backwards of all micro-batches stage by stage in reverse order.
        """
        phases = (Phase.FORWARD, 1), (Phase.BACKWARD, -1)
        return [
            [
                Task(s, phase, m)
                for phase, direction in phases
                for s in stages[::direction]
                for m in range(micro_batches)
            ]
            for stages in rank_stages
        ]


class Chimera(Published):
    """1F1B in two pipelines that pass the same p devices in opposite directions. Each pipeline runs
    micro-batches in groups of p / 2.

    Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional
    Pipelines" (2021), sections III-A and III-C, direct concatenation. With M micro-batches, and if
    forwards and backwards take equally long, a step has 2M + p - 2 slots, and each device is idle
    in p - 2 of them. A device saves the activations of p/2 + 1 to p micro-batches, and has the
    parameters of two stages.
    """

    name: ClassVar[str] = "chimera"
    pattern: ClassVar[PlacementPattern] = OPPOSITE

    def orders(self, rank_stages: RankStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        """Return the order of tasks of each rank. Tasks are sorted by the time slots of
        `grid_slots`, in which each forward and each backward takes one slot. Even micro-batches run
        on the first pipeline, odd micro-batches on the second.
        """
        down = [stages[0] for stages in rank_stages]
        up = [stages[1] for stages in reversed(rank_stages)]
        half = len(rank_stages) // 2
        slots = (
            *grid_slots(down, range(0, micro_batches, 2), half),
            *grid_slots(up, range(1, micro_batches, 2), half),
        )
        return orders_by_slot(rank_stages, slots)


class Hanayo(Published):
    """Chimera without a second copy of the parameters: instead of two pipelines of opposite
    directions, one pipeline visits the devices in ascending and descending order.

    Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training
    Efficiency" (2023). The placement determines the number of waves w: 2w stages on each of p
    devices. Groups of p micro-batches follow one another without a gap. Let F and B be the times of
    the forwards and of the backwards of one micro-batch on one device. If F = B, the bubble is
    therefore (p - 1)(F + B) / 2w for any number of micro-batches. A device saves the activations of
    2wp forwards of stages.
    """

    name: ClassVar[str] = "hanayo"
    pattern: ClassVar[PlacementPattern] = WAVES

    def orders(self, rank_stages: RankStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        """Return the order of tasks of each rank. Tasks are sorted by the time slots of
        `grid_slots`, in which each forward and each backward takes one slot. Micro-batches run in
        groups of p, the number of devices.
        """
        return orders_by_slot(
            rank_stages,
            grid_slots(
                range(len(rank_stages) * len(rank_stages[0])),
                range(micro_batches),
                len(rank_stages),
            ),
        )
