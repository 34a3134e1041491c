"""The tables and figures of Jeon et al., "GraphPipe" (ASPLOS 2025), section 7 and appendix A, in
the simulator.

Figures 6, 7 and 9 are charts: of them only what the text says in numbers is here as theirs.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Final

from autopipe.api.timeline_figure import Picture, step_picture
from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Mode, Problem
from autopipe.ir.schedule import Schedule, StageGraph
from autopipe.ir.timeline import Message, Prediction, Timeline
from autopipe.passes.cost.measured import with_micro_batch_size
from autopipe.passes.cost.memory import in_flight_samples_by_stage
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.registry import strategy_class
from autopipe.passes.schedule.limits import check_memory
from autopipe.passes.schedule.predict import make_ticks, predict
from autopipe.passes.schedule.published.one_f_one_b import order_kfkb
from autopipe.passes.schedule.simulate import simulate
from benchmarks.table import Case, Row, Settings, cases_of, zoo_graph

DEVICES: Final = (4, 8, 16, 32)
BATCH: Final = {
    "mmt": (64, 128, 256, 512),
    "dlrm": (256, 512, 1024, 2048),
    "candle-uno": (4096, 8192, 16384, 32768),
}
"""Samples of a step, by `DEVICES`."""
MODELS: Final = tuple(BATCH)
SEARCH_S: Final[dict[str, dict[str, tuple[float, ...]]]] = {
    "mmt": {
        "graphpipe": (0.12, 0.76, 3.00, 10.11),
        "pipedream": (2.57, 11.9, 44.3, 151.0),
        "piper": (52.9, 126.0, 304.0, 745.0),
    },
    "dlrm": {"graphpipe": (0.33, 2.73, 13.28, 54.6), "pipedream": (6.39, 31.3, 131.0, 505.0)},
    "candle-uno": {"graphpipe": (0.19, 1.43, 6.14, 22.37), "pipedream": (3.84, 17.0, 66.10, 234.0)},
}
"""Table 1, by `DEVICES`; Piper's search does not end on the models that are missing."""
LARGEST_SPEEDUP: Final = 1.61
"""Over the better sequential pipeline, up to, 32 devices (abstract, section 7.4)."""
PARALLEL_SPEEDUP: Final = (1.12, 1.40)
"""Figure 9, 32 devices: stages beside one another with PipeDream's micro-batches, over PipeDream;
least and most.
"""
FULL_SPEEDUP: Final = (1.25, 1.61)
"""Figure 9, 32 devices: with larger micro-batches too."""
BRANCHES_SPEEDUP: Final = {16: 2.0}
"""Figure 7, over PipeDream by number of branches of CANDLE-Uno, up to."""
CASE_STUDY: Final = {"depth": (8, 4), "micro_batch_size": (2, 4)}
"""Section 7.5, eight devices: of the sequential pipeline and of GraphPipe's."""
CASE_STUDY_SPEEDUP: Final = {"depth": 1.10, "micro_batch_size": 1.10, "both": 1.20}
SEQUENTIAL_THROUGHPUT: Final = {
    "piper": (113.94, 187.92, 286.83, 609.76),
    "pipedream": (113.2, 190.1, 277.0, 592.4),
    "graphpipe": (113.6, 189.5, 287.52, 608.82),
}
"""Appendix A.3: samples a second of a transformer with one branch, by `DEVICES`."""
IN_FLIGHT: Final = {(1, 2, 4): 10, (4, 4, 4): 12}
"""Figure 5: samples that the first of three stages keeps, by their micro-batches."""

PAPER: Settings = (("size", "paper"),)
AS_PUBLISHED: Final = ", slowest stage"
"""After a strategy's name: its objective is the slowest stage's time alone, as in its paper."""
SEQUENTIAL: Final = ("pipedream", "pipedream" + AS_PUBLISHED, "piper")
_OPTIONS: Final[dict[str, dict[str, object]]] = {
    "graphpipe": {},
    "pipedream": {"sweep": True},
    "pipedream" + AS_PUBLISHED: {"sweep": True, "objective": "slowest_stage"},
    "piper": {},
}
_ASSUMPTIONS: Final = (
    "simulated: V100 by data sheet (fp32, 75% of the peak in products), NVLink 50 GB/s in a "
    "node of four, 12.5 GB/s "
    "between nodes; a sequential pipeline's stage also waits for the one before it"
)


def cases() -> list[Case]:
    """All parts, in the paper's order."""
    every = [
        (f"{model}/p={devices}", (model, devices, batch))
        for model in MODELS
        for devices, batch in zip(DEVICES, BATCH[model], strict=True)
    ]
    large = [(f"mmt/p={devices}", (devices,)) for devices in (256, 1024)]
    one_branch = [(f"sequential/p={devices}", (devices,)) for devices in DEVICES]
    return [
        *cases_of("Figure 5", _in_flight, [("three-stages/in-flight", ())]),
        *cases_of("Figure 6", _throughput, every),
        *cases_of("Figure 6", _largest_speedup, [("all/p=32", ())]),
        *cases_of("Table 1", _search_times, every),
        *cases_of("Table 1", _search_time_of_many_devices, large),
        *cases_of(
            "Figure 7",
            _by_branches,
            ((f"candle-uno-{count}/branches", (count,)) for count in (2, 4, 8, 16)),
        ),
        *cases_of(
            "Figure 7",
            _by_micro_batch,
            ((f"mmt/p=8/b={size}", (size,)) for size in (1, 2, 4, 8, 16)),
        ),
        *cases_of("Figure 9", _ablation, ((f"{model}/p=32", (model,)) for model in MODELS)),
        *cases_of("Figure 9", _ablation_range, [("all/p=32", ())]),
        Case(
            "two-branch/p=8", "Figures 8 and 10", partial(_case_study, "two-branch/p=8"), _pictures
        ),
        *cases_of("A.3", _one_branch, one_branch),
    ]


@cache
def problem_of(model: str, devices: int, batch: int, settings: Settings = PAPER) -> Problem:
    """Training a model with its loss on Summit, in fp32 with SGD; a strategy chooses the size of
    micro-batches.
    """
    graph = zoo_graph(model, settings, batch)
    sizes = tuple(size for size in range(1, batch + 1) if batch % size == 0)
    cluster = build_cluster(cluster_preset("summit"), devices, None, None)
    return Problem(
        graph, roofline_costs(graph), cluster, batch, 1, Mode.TRAIN, "loss", micro_batch_sizes=sizes
    )


# Steps of a placement: as the graph of stages that it is, and as a chain.


@dataclass(frozen=True, slots=True)
class Step:
    """A placement, the order of its tasks, and the step they make."""

    problem: Problem
    placement: Placement
    schedule: Schedule
    timeline: Timeline
    depth: int

    @property
    def throughput(self) -> float:
        """Samples a second."""
        return self.problem.batch_size / self.timeline.end

    @property
    def decision(self) -> str:
        """The placement in a few words."""
        stages = self.placement.stages
        groups = sorted({len(stage.devices) for stage in self.placement.stages})
        most = f" to {groups[-1]}" if len(groups) > 1 else ""
        shared = "" if groups == [1] else f" of {groups[0]}{most} devices"
        return (
            f"{len(stages)} stages{shared}, depth {self.depth}, micro-batches of "
            f"{self.problem.micro_batch_size}"
        )


def graph_step(problem: Problem, placement: Placement) -> Step:
    """Stages wait for those that they read from alone. Raises InfeasibleError where memory does not
    hold it.
    """
    sized = _sized(problem, placement)
    return _step(sized, placement, StageGraph.of(sized, placement), predict(sized, placement))


def sequential_step(problem: Problem, placement: Placement) -> Step:
    """Each stage also waits for the one before it, as in a sequential pipeline: PipeDream's and
    Piper's.

    Micro-batches are kept by the place of a stage in the chain. Raises InfeasibleError where memory
    does not hold it.
    """
    sized = _sized(problem, placement)
    graph = StageGraph.of(sized, placement)
    predicted = predict(sized, placement)
    chain = tuple(itertools.pairwise(range(len(placement.stages))))
    first = [stage.devices[0] for stage in placement.stages]
    # Take no time.
    waits = tuple(Message(one, two, first[one], first[two], 0, 0, 0.0, 0.0) for one, two in chain)
    chained = replace(graph, edges=tuple(sorted({*graph.edges, *chain})))
    return _step(
        sized, placement, chained, replace(predicted, messages=(*predicted.messages, *waits))
    )


def _sized(problem: Problem, placement: Placement) -> Problem:
    """The problem on the placement's largest micro-batches."""
    return with_micro_batch_size(
        problem, math.lcm(*(stage.micro_batch_size for stage in placement.stages))
    )


def _step(problem: Problem, placement: Placement, graph: StageGraph, predicted: Prediction) -> Step:
    schedule = order_kfkb(graph, problem.micro_batches, problem.train, make_ticks(predicted.stages))
    timeline = simulate(schedule, graph.stage_devices, predicted)
    check_memory(problem, placement, timeline)
    return Step(problem, placement, schedule, timeline, graph.depth)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A strategy's placement and how long the search took; without one why there is none."""

    seconds: float
    placement: Placement | None = None
    refusal: str = ""


@cache
def search_result(
    strategy: str,
    model: str,
    devices: int,
    batch: int,
    settings: Settings = PAPER,
    size: int | None = None,
) -> SearchResult:
    """A strategy's placement of a model; with `size` on micro-batches of that many samples."""
    problem = problem_of(model, devices, batch, settings)
    if size is not None:
        problem = replace(with_micro_batch_size(problem, size), micro_batch_sizes=())
    chosen = strategy_class(strategy.partition(",")[0])(**_OPTIONS[strategy])
    start = time.perf_counter()
    try:
        chosen.requires(problem)
        placement = chosen.run(problem)
    except InfeasibleError as error:
        return SearchResult(time.perf_counter() - start, refusal=error.message)
    return SearchResult(time.perf_counter() - start, placement)


@cache
def step_of(
    strategy: str,
    model: str,
    devices: int,
    batch: int,
    settings: Settings = PAPER,
    size: int | None = None,
) -> Step | str:
    """The step of a placement: GraphPipe's as a graph of stages, others' as a chain; or why there
    is none.
    """
    found = search_result(strategy, model, devices, batch, settings, size)
    if found.placement is None:
        return found.refusal
    run = graph_step if strategy == "graphpipe" else sequential_step
    try:
        return run(problem_of(model, devices, batch, settings), found.placement)
    except InfeasibleError as error:
        return error.message


def best_pipedream(model: str, devices: int, batch: int, settings: Settings = PAPER) -> Step | str:
    """The step of PipeDream's placements that is shorter in the simulator: by either objective."""
    found = [step_of(name, model, devices, batch, settings) for name in SEQUENTIAL[:2]]
    steps = [step for step in found if isinstance(step, Step)]
    return max(steps, key=lambda step: step.throughput) if steps else found[0]


def _throughput_row(
    case: str, strategy: str, step: Step | str, theirs: float | None = None, note: str = ""
) -> Row:
    """Samples a second, or why there are none; the note is the step's decision where none is
    given.
    """
    ours, told = (None, step) if isinstance(step, str) else (step.throughput, note or step.decision)
    return Row(case, "throughput", theirs, ours, "samples/s", strategy, told)


# The paper's tables and figures.


def _in_flight(case: str) -> Iterator[Row]:
    """Figure 5: samples that the first of three stages keeps, by the micro-batches of the
    stages.
    """
    for sizes, theirs in IN_FLIGHT.items():
        ours = in_flight_samples_by_stage((1, 1, 1), sizes, ((0, 1), (1, 2)))[0]
        variant = "micro-batches of " + ", ".join(map(str, sizes))
        yield Row(case, "in_flight", theirs, ours, "samples", variant, "by Table 2, 1F1B")


def _throughput(case: str, model: str, devices: int, batch: int) -> Iterator[Row]:
    """Figure 6: GraphPipe against the sequential pipelines of PipeDream and Piper."""
    ours = step_of("graphpipe", model, devices, batch)
    for strategy in ("graphpipe", *SEQUENTIAL):
        step = step_of(strategy, model, devices, batch)
        yield _throughput_row(case, strategy, step, note=_ASSUMPTIONS)
        if isinstance(step, str):
            continue
        yield Row(case, "depth", None, step.depth, "stages", strategy, step.decision)
        if strategy != "graphpipe" and isinstance(ours, Step):
            gain = ours.throughput / step.throughput
            yield Row(
                case, "speedup", None, gain, "times", f"graphpipe over {strategy}", _ASSUMPTIONS
            )


def _largest_speedup(case: str) -> Iterator[Row]:
    """The largest gain over the best of the sequential pipelines."""
    gains = []
    for model in MODELS:
        ours, *others = (
            step_of(name, model, DEVICES[-1], BATCH[model][-1])
            for name in ("graphpipe", *SEQUENTIAL)
        )
        rivals = [step.throughput for step in others if isinstance(step, Step)]
        if rivals and isinstance(ours, Step):
            gains.append(ours.throughput / max(rivals))
    variant = "graphpipe over the best sequential pipeline"
    yield Row(
        case, "speedup", LARGEST_SPEEDUP, max(gains), "times", variant, f"up to; {_ASSUMPTIONS}"
    )


_SEARCHED = "measured here, once, all sizes of micro-batches; theirs on an Apple M1 Max"


def _search_times(case: str, model: str, devices: int, batch: int) -> Iterator[Row]:
    search_result("graphpipe", "two-branch", 2, 4, ())  # What loads on first use is not counted.
    for strategy in ("graphpipe", "pipedream", "piper"):
        published = SEARCH_S[model].get(strategy)
        theirs = published[DEVICES.index(devices)] if published else None
        yield _search_row(case, strategy, search_result(strategy, model, devices, batch), theirs)


def _search_time_of_many_devices(case: str, devices: int) -> Iterator[Row]:
    """MMT on more devices than the paper's, with 16 samples a device as there."""
    yield _search_row(
        case, "graphpipe", search_result("graphpipe", "mmt", devices, 16 * devices), None
    )


def _search_row(case: str, strategy: str, found: SearchResult, theirs: float | None) -> Row:
    ours = None if found.refusal else found.seconds
    return Row(case, "search_time_s", theirs, ours, "s", strategy, found.refusal or _SEARCHED)


def _by_branches(case: str, branches: int) -> Iterator[Row]:
    """Figure 7: CANDLE-Uno by its number of branches."""
    variant = "graphpipe over pipedream"
    gains = []
    for devices, batch in list(zip(DEVICES, BATCH["candle-uno"], strict=True))[:3]:
        settings = (*PAPER, ("branches", branches))
        ours = step_of("graphpipe", "candle-uno", devices, batch, settings)
        rival = best_pipedream("candle-uno", devices, batch, settings)
        gain = None
        note = ours if isinstance(ours, str) else str(rival)
        if isinstance(ours, Step) and isinstance(rival, Step):
            gain = ours.throughput / rival.throughput
            note = f"{ours.decision}; against {rival.decision}"
            gains.append(gain)
        yield Row(
            f"candle-uno-{branches}/p={devices}", "speedup", None, gain, "times", variant, note
        )
    theirs = BRANCHES_SPEEDUP.get(branches)
    note = f"up to, on 4 to 16 devices; {_ASSUMPTIONS}"
    yield Row(case, "speedup", theirs, max(gains, default=None), "times", variant, note)


def _by_micro_batch(case: str, size: int) -> Iterator[Row]:
    """Figure 7: MMT on 8 devices by the size of micro-batches."""
    for strategy in ("graphpipe", *SEQUENTIAL[:2]):
        yield _throughput_row(
            case, strategy, step_of(strategy, "mmt", 8, BATCH["mmt"][1], PAPER, size)
        )


_PARALLEL = "parallel stages alone"
_FULL = "with micro-batches of its own"


def _ablation(case: str, model: str) -> Iterator[Row]:
    """Figure 9: what stages beside one another bring, and what larger micro-batches bring on
    top.
    """
    for variant, gain, note in _gains(model):
        yield Row(case, "speedup", None, gain, "times", variant, note)


def _ablation_range(case: str) -> Iterator[Row]:
    for variant, published in {_PARALLEL: PARALLEL_SPEEDUP, _FULL: FULL_SPEEDUP}.items():
        found = [
            gain for model in MODELS for name, gain, _ in _gains(model) if name == variant and gain
        ]
        for theirs, ours, which in zip(
            published, (min(found), max(found)), ("least", "most"), strict=True
        ):
            note = f"{which} of {', '.join(MODELS)}"
            yield Row(case, "speedup", theirs, ours, "times", f"{variant}, {which}", note)


def _gains(model: str) -> Iterator[tuple[str, float | None, str]]:
    """Each step of the ablation, its gain over the sequential pipeline, and what it is."""
    batch = BATCH[model][-1]
    base = best_pipedream(model, 32, batch)
    if isinstance(base, str):
        yield _FULL, None, base
        return
    for what, size in ((_PARALLEL, base.problem.micro_batch_size), (_FULL, None)):
        step = step_of("graphpipe", model, 32, batch, PAPER, size)
        if isinstance(step, str):
            yield what, None, step
        else:
            yield (
                what,
                step.throughput / base.throughput,
                f"{step.decision}; against {base.decision}",
            )


def _one_branch(case: str, devices: int) -> Iterator[Row]:
    """Appendix A.3: on a model with one branch nothing is lost."""
    place = DEVICES.index(devices)
    for strategy in ("graphpipe", "pipedream", "piper", "pipedream" + AS_PUBLISHED):
        step = step_of(strategy, "mmt", devices, BATCH["mmt"][place], (("size", "sequential"),))
        theirs = (
            SEQUENTIAL_THROUGHPUT[strategy][place] if strategy in SEQUENTIAL_THROUGHPUT else None
        )
        yield _throughput_row(case, strategy, step, theirs)


# Section 7.5: two branches of four blocks on eight devices, a block a device, as a chain and as a
# graph (Figure 8).

_BATCH = 64
_BLOCKS = 4
_SMALL, _LARGE = CASE_STUDY["micro_batch_size"]
_CHAIN = "chain, micro-batches of"
_GRAPH = "graph, micro-batches of"
_SLOW_LAUNCH_S = 50e-6
"""Seconds to launch an operator in a runtime that makes a task of each: about what the paper's
figures imply.
"""
_STUDIED = (
    f"simulated, one block a device as in the paper; {_BATCH} samples a step, of which the "
    "paper does not tell the "
    "number; depth counts the last device's wait for the other branch, which it joins"
)


def _case_study(case: str) -> Iterator[Row]:
    limit = max(
        max(_studied(*each).timeline.peak_memory) for each in ((_CHAIN, _SMALL), (_GRAPH, _LARGE))
    )
    fitting = (
        f"ours: the largest whose step fits into {limit / 2**30:.2f} GiB, what theirs need by our "
        "count"
    )
    for number, (name, size) in enumerate(((_CHAIN, _SMALL), (_GRAPH, _LARGE))):
        step = _studied(name, size)
        variant = f"{name} {size}"
        yield Row(
            case, "depth", CASE_STUDY["depth"][number], step.depth, "stages", variant, _STUDIED
        )
        largest = max(
            each
            for each in (1, 2, 4, 8, 16)
            if max(_studied(name, each).timeline.peak_memory) <= limit
        )
        yield Row(case, "micro_batch_size", size, largest, "samples", variant, fitting)
    for name, size in itertools.product((_CHAIN, _GRAPH), (_SMALL, _LARGE)):
        step = _studied(name, size)
        variant = f"{name} {size}"
        yield Row(case, "throughput", None, step.throughput, "samples/s", variant, _STUDIED)
        yield Row(
            case,
            "peak_memory_bytes",
            None,
            max(step.timeline.peak_memory),
            "bytes",
            variant,
            _STUDIED,
        )
    for launch_s, words, note in (
        (None, "", _STUDIED),
        (
            _SLOW_LAUNCH_S,
            ", slow launches",
            f"{_STUDIED}; launching an operator takes 50 us, not 5",
        ),
    ):
        steps = (
            _studied(*each, launch_s)
            for each in ((_CHAIN, _SMALL), (_GRAPH, _SMALL), (_GRAPH, _LARGE))
        )
        base, beside, both = (step.throughput for step in steps)
        gains = {"depth": beside / base, "micro_batch_size": both / beside, "both": both / base}
        for what, gain in gains.items():
            yield Row(
                case,
                "speedup",
                CASE_STUDY_SPEEDUP[what],
                gain,
                "times",
                f"from {what}{words}",
                note,
            )


def _pictures() -> Iterator[Picture]:
    for name, size in ((_CHAIN, _SMALL), (_GRAPH, _LARGE)):
        step = _studied(name, size)
        limits = (None,) * len(step.timeline.memory)
        yield step_picture(
            f"{name} {size}, depth {step.depth}", step.schedule, step.timeline, limits
        )


@cache
def _studied(name: str, size: int, launch_s: float | None = None) -> Step:
    problem = problem_of("two-branch", 2 * _BLOCKS, _BATCH)
    if launch_s is not None:
        devices = tuple(
            replace(device, launch_latency_s=launch_s) for device in problem.cluster.devices
        )
        problem = replace(problem, cluster=replace(problem.cluster, devices=devices))
    run = sequential_step if name == _CHAIN else graph_step
    return run(problem, _one_block_a_device(problem.graph, size))


def _one_block_a_device(graph: Graph, size: int) -> Placement:
    """Branch after branch; what joins them stands on the last device."""
    members: list[list[int]] = [[] for _ in range(2 * _BLOCKS)]
    for index, node in enumerate(graph.nodes):
        _, branch, block, *_ = (*node.name.split("/"), "", "")
        inside = branch.startswith("branches.") and block.startswith("blocks.")
        number = (
            int(branch.partition(".")[2]) * _BLOCKS + int(block.partition(".")[2]) if inside else -1
        )
        members[number].append(index)
    return Placement(
        tuple(Stage(tuple(nodes), (device,), size) for device, nodes in enumerate(members))
    )
