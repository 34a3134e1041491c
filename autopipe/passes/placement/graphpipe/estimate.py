"""A step of stages under 1F1B, from the search's own prices.

From stretches of the line to stages on devices.

True if a stage graph is valid: conditions C1 to C4 of Jeon et al., "GraphPipe" (2024), section 3.

Shares no code with the search, and asks the model's graph alone.

The fewest devices for a line, however many micro-batches its stages keep: what no number of them gets below.

A step of a placement as the simulator sees it: what the search's own prices are held against.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopipe.ir.cluster import Cluster
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage, recomputed_nodes
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Phase, Schedule, StageGraph
from autopipe.passes.analysis.chain import Chain
from autopipe.passes.analysis.operators import SampleAxes
from autopipe.passes.cost.memory_check import equal_device_runs
from autopipe.passes.placement.graphpipe.search import NEVER, Devices
from autopipe.passes.placement.graphpipe.series_parallel import BlockRun, Region
from autopipe.passes.placement.graphpipe.stage_costs import StageOption
from autopipe.passes.schedule.predict import predict, ticks_of
from autopipe.passes.schedule.published.one_f_one_b import order_1f1b
from autopipe.passes.schedule.simulate import simulate


@dataclass(frozen=True, slots=True)
class DraftStage:
    """A stage that has no devices yet: blocks `start` to `stop - 1` of a line on `degree` devices."""

    start: int
    stop: int
    run: int
    """The run of the cluster's devices that it is to have its own from."""
    degree: int
    recompute: bool
    forward: float
    """Seconds of a micro-batch, like all that follows by the search's own prices."""
    backward: float
    arriving: float
    returning: float
    end: float
    """Seconds of the step's end."""
    memory: float
    """Bytes on a device."""
    in_flight: int

    @staticmethod
    def of(way: StageOption, start: int, stop: int, in_flight: int) -> DraftStage:
        """A stretch run in some way."""
        at = (start, stop)
        memory = way.always[at] + in_flight * way.kept[at]
        return DraftStage(
            start,
            stop,
            way.run,
            way.degree,
            way.recompute,
            forward=float(way.forward[at]),
            backward=float(way.backward[at]),
            arriving=float(way.arriving[at]),
            returning=float(way.returning[at]),
            end=float(way.end[at]),
            memory=float(memory),
            in_flight=in_flight,
        )


def stages_of(
    chain: Chain, samples: SampleAxes, cluster: Cluster, drafts: Sequence[DraftStage], size: int
) -> tuple[Stage, ...]:
    """Stages in the line's order, on micro-batches of `size` samples."""
    stages = []
    for draft, devices in zip(drafts, groups(equal_device_runs(cluster), drafts), strict=True):
        nodes = chain.nodes(draft.start, draft.stop)
        stages.append(Stage(nodes, devices, size, samples.splits(nodes, draft.degree), draft.recompute))
    return tuple(stages)


def groups(runs: Sequence[range], drafts: Sequence[DraftStage]) -> list[tuple[int, ...]]:
    """Neighbouring devices of its run for each stage, larger groups first: where degrees and nodes are powers of two,
    no group that would fit into a node then lies in two. Among equal ones neighbours in the line are neighbours."""
    order = sorted(range(len(drafts)), key=lambda stage: -drafts[stage].degree)
    found: list[tuple[int, ...]] = [()] * len(drafts)
    firsts = [run.start for run in runs]
    for stage in order:
        run, degree = drafts[stage].run, drafts[stage].degree
        found[stage] = tuple(range(firsts[run], firsts[run] + degree))
        firsts[run] += degree
    assert all(first <= run.stop for first, run in zip(firsts, runs, strict=True)), "more devices than there are"
    return found


def check_stages(graph: Graph, placement: Placement) -> None:
    """Raise InfeasibleError unless C1 to C3 hold.

    C1: the stages part the nodes, and each is convex: no way leads out of it and back. C2: where a node reads what
    another stage computes there is an edge between the two, from the earlier to the later. C3: no device has two
    stages.
    """
    owner: dict[int, int] = {}
    for index, stage in enumerate(placement.stages):
        for node in stage.nodes:
            if owner.setdefault(node, index) != index:
                raise InfeasibleError(f"C1: {graph.nodes[node].name!r} is in stages {owner[node]} and {index}")
    if len(owner) != len(graph.nodes):
        raise InfeasibleError(f"C1: {len(graph.nodes) - len(owner)} nodes are in no stage")
    devices = [device for stage in placement.stages for device in stage.devices]
    if len(set(devices)) != len(devices):
        raise InfeasibleError("C3: a device has two stages")
    recomputed = recomputed_nodes(graph)
    behind = [0] * len(graph.nodes)
    for index, reader in enumerate(graph.nodes):
        for name in reader.inputs:
            producer = graph.producer(name) if name else None
            if producer is None or producer in recomputed:
                continue
            if owner[producer] > owner[index] and index not in recomputed:
                raise InfeasibleError(f"C2: stage {owner[index]} reads {name!r} of the later stage {owner[producer]}")
            behind[index] |= behind[producer]
            if owner[producer] != owner[index]:
                behind[index] |= 1 << owner[producer]
        if behind[index] >> owner[index] & 1 and index not in recomputed:
            raise InfeasibleError(f"C1: a way leads out of stage {owner[index]} and back to {reader.name!r}")


def check_schedule(schedule: Schedule) -> None:
    """Raise InfeasibleError unless C4 holds on every device: micro-batches in order, forward before backward."""
    for device, order in enumerate(schedule.tasks):
        done: dict[tuple[int, Phase], int] = {}
        for task in order:
            last = done.get((task.stage, task.phase), -1)
            if task.micro_batch <= last:
                raise InfeasibleError(f"C4: {task} comes after micro-batch {last}", where=f"device {device}")
            if task.phase is not Phase.FORWARD and task.micro_batch > done.get((task.stage, Phase.FORWARD), -1):
                raise InfeasibleError(f"C4: {task} comes before its forward", where=f"device {device}")
            done[task.stage, task.phase] = task.micro_batch


def trial(problem: Problem, placement: Placement) -> tuple[float, float]:
    """Seconds of a step under 1F1B, and the share of its memory that the fullest device needs.

    `problem` is that of the placement's micro-batches.
    Of many micro-batches the first are simulated; the others take as long as the last of those.
    """
    graph = StageGraph.of(problem, placement)
    prediction = predict(problem, placement)
    ticks = ticks_of(prediction.stages)
    ends = []
    most = 0.0
    count = problem.micro_batches
    enough = _PERIODS * graph.depth + 2
    for micro_batches in (count,) if count <= enough + graph.depth else (enough, enough + graph.depth):
        schedule = order_1f1b(graph, micro_batches, problem.train, ticks)
        check_schedule(schedule)
        timeline = simulate(schedule, graph.stage_devices, prediction)
        ends.append(timeline.end)
        shares = [peak / problem.memory_of(device) for device, peak in enumerate(timeline.peak_memory)]
        most = max(most, *shares)
    if len(ends) == 1:
        return ends[0], most
    return ends[1] + (ends[1] - ends[0]) / graph.depth * (count - enough - graph.depth), most


_PERIODS = 3
"""Micro-batches, times the stages' depth, after which a step goes on as it did."""


def stage_depths(before: Sequence[Sequence[int]]) -> list[int]:
    """For each stage the stages on the longest way from it to the end; `before` are the stages that each reads from."""
    depths = [1] * len(before)
    for stage, sources in reversed(list(enumerate(before))):
        for source in sources:
            depths[source] = max(depths[source], depths[stage] + 1)
    return depths


def step_seconds(
    drafts: Sequence[DraftStage], before: Sequence[Sequence[int]], micro_batches: int, train: bool
) -> float:
    """Seconds of a step. Of many micro-batches the first are looked at; others take as long as the last of those."""
    depth = max(stage_depths(before))
    enough = _PERIODS * depth + 2
    if micro_batches <= enough + depth:
        return _simulated(drafts, before, micro_batches, train)
    first, second = (_simulated(drafts, before, count, train) for count in (enough, enough + depth))
    return second + (second - first) / depth * (micro_batches - enough - depth)


def _simulated(drafts: Sequence[DraftStage], before: Sequence[Sequence[int]], count: int, train: bool) -> float:
    """Tasks start when their stage is free and all messages are there; F(s, m) is in turn 2m - depth(s) and B(s, m) in
    2m + depth(s) - 1, which is 1F1B's order on each stage and comes after all that a task waits for."""
    depths = stage_depths(before)
    after: list[list[int]] = [[] for _ in drafts]
    for stage, sources in enumerate(before):
        for source in sources:
            after[source].append(stage)
    turns = [(2 * m - depth, 0, stage, m) for stage, depth in enumerate(depths) for m in range(count)]
    if train:
        turns += [(2 * m + depth - 1, 1, stage, m) for stage, depth in enumerate(depths) for m in range(count)]
    free = [0.0] * len(drafts)
    done = [[[0.0] * count for _ in drafts] for _ in range(2)]
    for _, phase, stage, m in sorted(turns):
        draft = drafts[stage]
        message, seconds = (draft.returning, draft.backward) if phase else (draft.arriving, draft.forward)
        start = free[stage]
        for other in (after if phase else before)[stage]:
            start = max(start, done[phase][other][m] + message)
        free[stage] = done[phase][stage][m] = start + seconds
    return max(end + draft.end for end, draft in zip(free, drafts, strict=True))


def fewest_devices(regions: tuple[Region, ...], needs: Sequence[Devices], runs: Sequence[int]) -> int:
    """Result of `Search.least` where `needs`, one a run of `runs` devices, are the same at all levels.

    It is `NEVER` where there is no line. Without levels each place has one number, and branches are a line like all
    else.
    """
    ends = tuple(itertools.accumulate(reversed(runs)))
    kinds = tuple(zip(reversed(needs), (0, *ends), ends, strict=False))
    front = np.full(len(needs[0]), NEVER, dtype=np.int16)
    front[-1] = 0
    for place in _places(regions):
        seen = front[place + 1 :]
        for own, start, end in kinds:
            least = int((own[place, place + 1 :] + (np.maximum(seen, start) if start else seen)).min())
            if least <= end:
                front[place] = min(front[place], least)
    return int(front[0])


def _places(regions: tuple[Region, ...]) -> Iterator[int]:
    """All places where a stage may begin, from the last to the first."""
    for region in reversed(regions):
        if isinstance(region, BlockRun):
            yield from range(region.stop - 1, region.start - 1, -1)
        else:
            for branch in reversed(region.branches):
                yield from _places(branch)
