"""1F1B and its kin: 1F1B+, kFkB, interleaved 1F1B, the breadth-first loop, Chimera and Hanayo's
waves.
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
from autopipe.passes.cost.memory import stages_in_flight
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
    Form,
    LaneStages,
    Published,
    by_lane,
    first_slot,
    in_turn,
    on_grid,
    there_and_back,
)


@dataclass(frozen=True, slots=True)
class OneForwardOneBackward:
    """Each stage keeps as many micro-batches in flight as there are stages on the longest way from
    it to the end.

    For a chain this is 1F1B with flushes as in Narayanan et al., "Memory-Efficient
    Pipeline-Parallel DNN Training" (2021), section 2.2; for a DAG its extension by the depth of
    each stage, as in Jeon et al., "GraphPipe" (2024). Inference runs forwards alone.
    """

    name: ClassVar[str] = "1f1b"

    def requires(self, problem: Problem, placement: Placement) -> None:
        require_equal_micro_batches(self.name, problem, placement)

    def run(self, problem: Problem, placement: Placement) -> Schedule:
        graph = StageGraph.of(problem, placement)
        return order_kfkb(
            graph, problem.micro_batches, problem.train, task_ticks(problem, placement)
        )


class OneForwardOneBackwardPlus(Published):
    """1F1B on the stages of one device; those of several run just before the next stage, and
    backward just after it.

    Lin et al., "Tessel" (HPCA 2024), section VI-A, where it is the baseline for placements that
    split large embeddings over all devices. Without such stages it is 1F1B.
    """

    name: ClassVar[str] = "1f1b_plus"

    def order(self, graph: StageGraph, micro_batches: int) -> Schedule:
        own = [stage for (stage,) in self.lanes(graph, micro_batches)]
        placed = [pair for m in range(micro_batches) for pair in _placed(graph, own, m)]
        lists: list[list[Task]] = [[] for _ in range(graph.devices)]
        for _, task in sorted(placed, key=lambda each: each[0]):
            for device in graph.stage_devices[task.stage]:
                lists[device].append(task)
        return Schedule(micro_batches, tuple(map(tuple, lists)), find_repetends(lists))

    def lanes(self, graph: StageGraph, micro_batches: int) -> LaneStages:
        """The stages of 1F1B itself: those whose devices span no other stage's."""
        if graph.pipeline_count > 1:
            raise InfeasibleError(
                "schedule 1f1b_plus runs one pipeline, but the placement has "
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
                    "schedule 1f1b_plus runs one stage a device, beside those that span "
                    "others' devices, but stages "
                    f"{other} and {stage} are both on device {min(both)}",
                    hint="1f1b takes any number of stages a device",
                )
        return tuple((stage,) for stage in own)


def _placed(
    graph: StageGraph, own: list[int], m: int
) -> Iterator[tuple[tuple[int, int, bool, int], Task]]:
    """Micro-batch m's tasks, with keys that sort those of all: twice the slot on the grid, odd
    between slots.
    """
    forwards, backwards = (
        [Task(s, phase, m) for s in own] for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    slots = {
        task: slot
        for slot, task in there_and_back(forwards, backwards, first_slot(m, len(own), len(own)))
    }
    for stage in range(len(graph.stage_devices)):
        near = next((other for other in own if other >= stage), own[-1])
        side = (near < stage) - (near > stage)
        for phase, way in ((Phase.FORWARD, 1), (Phase.BACKWARD, -1)):
            key = 2 * slots[Task(near, phase, m)] + way * side
            yield (key, m, phase is Phase.BACKWARD, way * stage), Task(stage, phase, m)


@dataclass(frozen=True, slots=True)
class KForwardsKBackwards:
    """Each stage keeps as many samples in flight as the stages behind it ask for, and runs k tasks
    of a kind in a row.

    Jeon et al., "GraphPipe" (2024), Algorithm 2: stages may have micro-batches of different sizes
    and several stages before and behind them; what is kept follows from the paper's Table 2, and
    each backward comes as early as that allows. With equal sizes and k = 1 it is 1F1B. Inference
    runs forwards alone.
    """

    name: ClassVar[str] = "kfkb"

    k: int | tuple[int, ...] = 1
    """Forwards, and backwards, in a row: one number, or one for each stage. 1 keeps the fewest
    samples.
    """

    def requires(self, problem: Problem, placement: Placement) -> None:
        stages = len(placement.stages)
        if len(self.ks(stages)) != stages:
            raise ConfigurationError(
                f"schedule.k has {len(self.ks(stages))} {plural(len(self.ks(stages)), 'number')}, "
                f"but the placement {stages} {plural(stages, 'stage')}",
                hint="give one number for all, or one for each stage",
            )
        if min(self.ks(stages)) < 1:
            raise ConfigurationError(
                f"schedule.k is {min(self.ks(stages))}", hint="it must be at least 1"
            )

    def run(self, problem: Problem, placement: Placement) -> Schedule:
        graph = StageGraph.of(problem, placement)
        ticks = task_ticks(problem, placement)
        return order_kfkb(
            graph, problem.micro_batches, problem.train, ticks, self.ks(len(placement.stages))
        )

    def ks(self, stages: int) -> tuple[int, ...]:
        return (self.k,) * stages if isinstance(self.k, int) else self.k


def order_kfkb(
    graph: StageGraph, micro_batches: int, train: bool, ticks: Ticks, ks: Sequence[int] = ()
) -> Schedule:
    """The stages' orders, merged where a device has several stages; `micro_batches` are the largest
    ones of a step. Without `ks` all are 1, which is 1F1B where micro-batches are equal: each stage
    keeps as many as it is deep. Orders never wait in a circle then: F(s, m) at 2m - depth(s) and
    B(s, m) at 2m + depth(s) - 1 is a numbering in which every task comes after all that it waits
    for, since depth falls along every edge.
    """
    ks = ks or (1,) * len(graph.stage_devices)
    numbers = (graph.micro_batches_of(stage, micro_batches) for stage in range(len(ks)))
    each_stage = zip(kept_micro_batches(graph, ks), ks, numbers, strict=True)
    lists = merge_orders(
        [stage_order(s, *each, train) for s, each in enumerate(each_stage)], graph, ticks
    )
    return Schedule(micro_batches, lists, find_repetends(lists))


def kept_micro_batches(graph: StageGraph, ks: Sequence[int]) -> tuple[int, ...]:
    """The most of its own micro-batches that each stage keeps between forward and backward."""
    ratios = [graph.micro_batch_ratio_at(stage) for stage in range(len(ks))]
    samples = [math.lcm(*ratios) // each for each in ratios]
    in_flight = stages_in_flight(ks, samples, graph.edges)
    return tuple(kept // size for kept, size in zip(in_flight, samples, strict=True))


def stage_order(
    stage: int, kept: int, k: int, micro_batches: Sequence[int], train: bool
) -> list[Task]:
    """A stage's tasks: `kept` forwards, then k backwards and k forwards in turn; without training
    forwards alone.
    """
    forwards, backwards = (
        [Task(stage, phase, m) for m in micro_batches] for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    return in_turn(forwards, backwards, kept, k) if train else forwards


class InterleavedOneForwardOneBackward(Published):
    """Each device runs a group of as many micro-batches as there are devices through each of its
    stages in turn.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM" (2021), section 2.2.2. With v stages on each of p devices the bubble is (p - 1)(F +
    B) / v, and vp + p - 1 activations are kept.
    """

    name: ClassVar[str] = "interleaved_1f1b"
    form: ClassVar[Form] = LOOPS

    def lanes(self, graph: StageGraph, micro_batches: int) -> LaneStages:
        lanes = self.form.lanes(self.name, graph)
        if len(lanes[0]) < 2:
            raise InfeasibleError(
                f"schedule {self.name} runs several stages a device, but here is one",
                hint="take 1f1b",
            )
        if micro_batches % len(lanes):
            raise InfeasibleError(
                f"schedule {self.name} runs groups of {len(lanes)} "
                f"{plural(len(lanes), 'micro-batch')}, "
                "one for each device, but there are "
                f"{micro_batches}",
                hint=f"make their number a multiple of {len(lanes)}",
            )
        return lanes

    def orders(self, lanes: LaneStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        """Forwards until the first backward can arrive, then one forward and one backward in turn.
        A device runs a group of p micro-batches through stage after stage of its own, then the next
        group.
        """
        p = len(lanes)
        found = []
        groups = [range(first, first + p) for first in range(0, micro_batches, p)]
        for place, stages in enumerate(lanes):
            forwards = [
                Task(s, Phase.FORWARD, m) for group in groups for s in stages for m in group
            ]
            backwards = [
                Task(s, Phase.BACKWARD, m) for group in groups for s in stages[::-1] for m in group
            ]
            found.append(
                in_turn(forwards, backwards, (len(stages) - 1) * p + 2 * (p - 1 - place) + 1)
            )
        return found


class LoopedBreadthFirst(Published):
    """GPipe on several stages a device, stage by stage.

    Lamy-Poirier, "Breadth-First Pipeline Parallelism" (2022), section 4.1. With v stages on each of
    p devices and at least p micro-batches the bubble is (p - 1)(F + B) / v; the activations of all
    micro-batches are kept.
    """

    name: ClassVar[str] = "looped_bfs"
    form: ClassVar[Form] = LOOPS

    def orders(self, lanes: LaneStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        ways = (Phase.FORWARD, 1), (Phase.BACKWARD, -1)
        return [
            [
                Task(s, phase, m)
                for phase, way in ways
                for s in stages[::way]
                for m in range(micro_batches)
            ]
            for stages in lanes
        ]


class Chimera(Published):
    """1F1B in both directions; each pipeline takes groups of half as many micro-batches as there
    are devices.

    Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional
    Pipelines" (2021), sections III-A and III-C, direct concatenation. With m micro-batches on p
    devices and F = B the bubble is p - 2 slots of 2m + p - 2; a device keeps p/2 + 1 to p
    activations, and parameters twice.
    """

    name: ClassVar[str] = "chimera"
    form: ClassVar[Form] = OPPOSITE

    def orders(self, lanes: LaneStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        down = [stages[0] for stages in lanes]
        up = [stages[1] for stages in reversed(lanes)]
        half = len(lanes) // 2
        slots = (
            *on_grid(down, range(0, micro_batches, 2), half),
            *on_grid(up, range(1, micro_batches, 2), half),
        )
        return by_lane(lanes, slots)


class Hanayo(Published):
    """Chimera without a second copy of the parameters: its two directions are two halves of one
    pipeline.

    Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training
    Efficiency" (2023). The placement says how many waves there are: w waves are 2w stages on each
    of p devices. Groups of p micro-batches follow one another without a gap on the grid, so that
    with F = B the bubble is (p - 1)(F + B) / 2w whatever their number; 2wp activations are kept.
    """

    name: ClassVar[str] = "hanayo"
    form: ClassVar[Form] = WAVES

    def orders(self, lanes: LaneStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        return by_lane(
            lanes, on_grid(range(len(lanes) * len(lanes[0])), range(micro_batches), len(lanes))
        )
