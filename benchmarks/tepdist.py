"""The experiments of Alibaba PAI, "TePDist" (2023), section "Performance Experiment", in the
simulator.

The paper publishes its tables of sizes and its charts as pictures, so only the numbers in its text
are compared. Sizes that grow with the devices are those of Alpa (OSDI 2022), the baseline of the
paper.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Final

from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Mode, Optimizer, Problem
from autopipe.ir.schedule import StageGraph
from autopipe.passes.analysis.operators import op_instances
from autopipe.passes.cost.measured import with_micro_batch_size
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.placement.tepdist.levels import LEVELS, LevelName
from autopipe.passes.placement.tepdist.strategy import TePDist
from autopipe.passes.schedule.limits import check_memory
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.published.one_f_one_b import OneForwardOneBackward
from autopipe.passes.schedule.simulate import simulate
from autopipe.passes.sharding.search import ExactSolver, Solver, SplitTables, make_split_tables
from autopipe.passes.solvers.min_sum import Assignment
from benchmarks.table import Case, Row, Settings, cases_of, zoo_graph

PEAK_FLOPS: Final = 15.6e12
"""Peak FLOP/s of a V100 in single precision, as the text counts them."""
BEST_SHARE: Final = {"gpt": 0.62, "moe": 0.58}
"""The highest published fraction of the peak, on 1 to 16 devices."""
PICTURE: Final = "theirs published as a picture only"
"""The note of rows without a published number."""

SIZES: Final = ("1.3b", "2.7b", "6.7b", "13b", "39b", "175b")
"""The sizes of GPT-3 for the comparison of optimisation levels."""
_MACHINE = (
    "V100-32GB by data sheet (fp32, 75% of the peak in products, 60% in convolutions), eight a "
    "server, 50 GB/s in it, "
    "12.5 GB/s between"
)
_ADAM = Optimizer("adamw")


def cases() -> list[Case]:
    """Return all parts in the paper's order."""
    extended, general = (
        [
            (f"{each.model}-{size}/p={devices}", (each, devices))
            for each in experiment
            for devices, size in each.sizes.items()
        ]
        for experiment in (_EXTENDED, _GENERAL)
    )
    return [
        *cases_of("model extension", _share_of_peak, extended),
        *cases_of(
            "model extension", _best_share, ((f"{each.model}/all", (each,)) for each in _EXTENDED)
        ),
        *cases_of("general", _share_of_linear, general),
        *cases_of("optimisation levels", _levels, ((f"gpt-{size}/p=8", (size,)) for size in SIZES)),
    ]


@dataclass(frozen=True, slots=True)
class Training:
    """Training of a model of the zoo, with its loss, in fp32 on V100s: servers of eight devices
    with NVLink, 100 Gb/s between servers.
    """

    model: str
    settings: Settings
    devices: int
    batch: int
    """Samples per step."""
    optimizer: Optimizer = Optimizer()  # noqa: RUF009 - it is frozen
    memory_limit: int | None = None
    """Bytes per device; None for the device's memory."""
    largest: int | None = None
    """Samples of the largest micro-batch that a strategy may choose; None for the samples of a
    step.
    """

    @property
    def free(self) -> Problem:
        """Return the problem in which the strategy chooses the micro-batch size, and stages
        recompute if memory requires it.
        """
        largest = self.largest or self.batch
        sizes = tuple(size for size in range(1, largest + 1) if largest % size == 0)
        return self._problem(largest, "auto", sizes)

    def given(self, micro_batch_size: int) -> Problem:
        """Return the problem with one micro-batch size, without recomputation."""
        return self._problem(micro_batch_size, "none", ())

    def _problem(self, micro_batch_size: int, recompute: str, sizes: tuple[int, ...]) -> Problem:
        graph = zoo_graph(self.model, self.settings, micro_batch_size)
        return Problem(
            graph,
            roofline_costs(graph),
            build_cluster(cluster_preset("tepdist-m8"), self.devices, None, None),
            self.batch,
            self.batch // micro_batch_size,
            Mode.TRAIN,
            "loss",
            self.optimizer,
            recompute=recompute,
            memory_limit=self.memory_limit,
            micro_batch_sizes=sizes,
        )


def step_flops(problem: Problem) -> float:
    """Return the FLOPs of the forwards and backwards of a step; recomputation does not count."""
    return problem.micro_batches * sum(
        work.forward_flops + work.backward_flops for work in problem.work
    )


@dataclass(frozen=True, slots=True)
class SimulatedPlan:
    """A placement at its micro-batch size, with the simulated step."""

    problem: Problem
    placement: Placement
    step_s: float

    @property
    def throughput(self) -> float:
        """Return samples per second."""
        return self.problem.batch_size / self.step_s

    @property
    def flops(self) -> float:
        """Return FLOP/s per device."""
        return step_flops(self.problem) / self.step_s / self.problem.cluster.size

    @property
    def decision(self) -> str:
        """Return a short description of the placement."""
        stages = self.placement.stages
        again = sum(stage.recompute for stage in stages)
        words = [
            (
                f"{_counted(len(stages), 'stage')} of "
                f"{_counted(max(len(stage.devices) for stage in stages), 'device')}"
            ),
            (
                f"{_counted(self.problem.micro_batches, 'micro-batch', 'es')} of "
                f"{self.problem.micro_batch_size}"
            ),
        ]
        return ", ".join([*words, f"{again} with recomputation"] if again else words)


@cache
def simulated_plan(training: Training) -> SimulatedPlan | str:
    """The strategy's placement, by its defaults, under 1F1B; or why there is none."""
    problem = training.free
    try:
        placement = TePDist().run(problem)
        own = with_micro_batch_size(problem, placement.stages[0].micro_batch_size)
        schedule = OneForwardOneBackward().run(own, placement)
        timeline = simulate(
            schedule, StageGraph.of(own, placement).stage_devices, predict(own, placement)
        )
        check_memory(own, placement, timeline)
    except InfeasibleError as error:
        return error.message
    return SimulatedPlan(own, placement, timeline.end)


def _counted(count: int, word: str, plural: str = "s") -> str:
    return f"{count} {word}{plural if count > 1 else ''}"


def class_parts(problem: Problem, placement: Placement) -> int:
    """Parts into which the classes are split in the layer that gives the logits: the last that
    reads parameters.
    """
    graph = problem.graph
    last = max(
        number for number, node in enumerate(graph.nodes) if any(map(graph.parameter, node.inputs))
    )
    dimensions = op_instances(graph)[last].space.results[0]
    assert dimensions is not None, "it gives the logits"
    splits = next(stage.splits_of(last) for stage in placement.stages if last in stage.nodes)
    return prod(split.degree for split in splits if split.axis in dimensions[-1])


# Models that grow with the devices.


@dataclass(frozen=True, slots=True)
class Experiment:
    """A model and how its work grows with the devices: by its samples, or by its size."""

    model: str
    sizes: Mapping[int, str]
    batch: Mapping[int, int]
    """Samples of a step, by the number of devices as `sizes`."""
    optimizer: Optimizer = Optimizer()  # noqa: RUF009 - it is frozen
    settings: Settings = ()
    most_a_device: int | None = None
    """Samples of a micro-batch, for each device."""

    def training(self, devices: int, memory_limit: int | None = None) -> Training:
        """The training on a number of devices."""
        settings: Settings = (("size", self.sizes[devices]), *self.settings)
        largest = self.most_a_device and self.most_a_device * devices
        return Training(
            self.model,
            settings,
            devices,
            self.batch[devices],
            self.optimizer,
            memory_limit,
            largest,
        )


def _extended(model: str, sizes: tuple[str, ...], settings: Settings = ()) -> Experiment:
    """1,024 samples a step with Adam; a micro-batch of more than one device holds of GPT without
    recomputation.
    """
    devices = (1, 2, 4, 8, 16)
    by_devices = dict(zip(devices, sizes, strict=True))
    return Experiment(
        model, by_devices, dict.fromkeys(devices, 1024), _ADAM, settings, most_a_device=16
    )


def _by_samples(model: str, size: str, samples: int, optimizer: Optimizer) -> Experiment:
    """Always the same model, with as many samples for each device."""
    devices = (1, 2, 4, 8)
    return Experiment(
        model, dict.fromkeys(devices, size), {each: samples * each for each in devices}, optimizer
    )


_EXTENDED = (
    _extended(
        "gpt", ("350m", "760m", "1.3b", "2.7b", "6.7b"), (("sequence", 1024), ("vocabulary", 51200))
    ),
    _extended("moe", ("380m", "690m", "1.3b", "2.4b", "10b")),
)
_EXTENDED_NOTE = (
    f"simulated: {_MACHINE}; fp32, AdamW, 1024 samples of 1024 tokens a step; sizes grow as "
    "Alpa's (OSDI 2022), "
    "since the paper's are pictures; operations of forward and backward, recomputation not counted"
)
_GENERAL = (
    _by_samples("vgg19", "million", 32, Optimizer()),
    _by_samples("bert", "dnabert", 32, _ADAM),
    _by_samples("unet", "paper", 8, Optimizer()),
    Experiment(
        "wide-resnet", {1: "250m", 2: "500m", 4: "1b", 8: "2b"}, dict.fromkeys((1, 2, 4, 8), 1536)
    ),
)
"""Batches and sizes are ours, since the paper's are pictures."""
_GENERAL_NOTE = (
    f"theirs published as a picture, and as close to linear; ours simulated: {_MACHINE}; "
    "operations a second and "
    "device, over one device's"
)


def _share_of_peak(case: str, experiment: Experiment, devices: int) -> Iterator[Row]:
    """The model extension experiment: GPT and MoE that grow with the devices, 1 to 16 of them."""
    step = simulated_plan(experiment.training(devices))
    if isinstance(step, str):
        yield Row(case, "share_of_peak", None, None, "", "tepdist", step)
        return
    yield Row(
        case,
        "share_of_peak",
        None,
        step.flops / PEAK_FLOPS,
        "",
        "tepdist",
        f"{PICTURE}; {_EXTENDED_NOTE}",
    )
    yield Row(
        case,
        "throughput",
        None,
        step.throughput,
        "samples/s",
        "tepdist",
        f"{PICTURE}; {step.decision}",
    )


def _best_share(case: str, experiment: Experiment) -> Iterator[Row]:
    steps = [simulated_plan(experiment.training(devices)) for devices in experiment.sizes]
    shares = [step.flops / PEAK_FLOPS for step in steps if not isinstance(step, str)]
    note = f"best of {len(shares)} sizes, of 15.6 TFLOPS a device; {_EXTENDED_NOTE}"
    yield Row(case, "share_of_peak", BEST_SHARE[experiment.model], max(shares), "", "tepdist", note)


def _share_of_linear(case: str, experiment: Experiment, devices: int) -> Iterator[Row]:
    """The general experiment: throughput on 1 to 8 devices of one server against one device's,
    times as many.
    """
    step = simulated_plan(experiment.training(devices))
    base = simulated_plan(experiment.training(1))
    base_note = ""
    if isinstance(base, str):
        base = simulated_plan(experiment.training(1, memory_limit=2**60))
        base_note = ", which would need more memory than it has and is simulated as if it had it"
        assert isinstance(base, SimulatedPlan), base
    if isinstance(step, str):
        yield Row(case, "throughput", None, None, "samples/s", "tepdist", step)
        return
    yield Row(
        case,
        "throughput",
        None,
        step.throughput,
        "samples/s",
        "tepdist",
        f"{PICTURE}; {step.decision}",
    )
    note = f"{_GENERAL_NOTE}{base_note}; {experiment.optimizer.name}"
    yield Row(case, "share_of_linear", None, step.flops / base.flops, "", "tepdist", note)
    if experiment.model == "vgg19":
        note = (
            "theirs: model parallel, in how many parts is not said; ours: parts that the classes "
            "are split into"
        )
        yield Row(
            case,
            "class_parts",
            None,
            class_parts(step.problem, step.placement),
            "parts",
            "tepdist",
            note,
        )


# How long O2 and O3 search in a GPT-3 that grows, and what they find.

_LEVELS: tuple[LevelName, ...] = ("O2", "O3")
_DEVICES = 8
_BATCH = 64
_MICRO_BATCH = 8
_LIMIT_S = 120.0
_SETTING = (
    f"all layers, unrolled, in one stage on {_DEVICES} V100-32GB of one server, {_BATCH} "
    "samples of 2048 tokens in "
    f"micro-batches of {_MICRO_BATCH}, memory no limit"
)


def _levels(case: str, size: str) -> Iterator[Row]:
    for level in _LEVELS:
        # What loads on first use is not counted.
        _searched(_tables((("layers", 2),))[0], LEVELS[level](None))
    tables, seconds = _tables((("size", size),))
    counted = f"{len(tables.nodes)} operators, {len(tables.model.costs)} variables"
    yield Row(
        case,
        "table_time_s",
        None,
        seconds,
        "s",
        "",
        f"of processor time, once for all levels; {counted}",
    )
    exact, _ = _searched(tables, ExactSolver(_LIMIT_S))
    for level in _LEVELS:
        answer, seconds = _searched(tables, LEVELS[level](_LIMIT_S))
        timed = (
            f"{PICTURE}; of processor time, solvers included, tables not, at most {_LIMIT_S:g} s "
            "by the clock"
        )
        yield Row(case, "search_time_s", None, seconds, "s", level, f"{timed}; {_SETTING}")
        own = (
            "its own proof: least"
            if answer.proven
            else f"its own bound: at least {float(answer.bound):.6g}"
        )
        proof = f"{PICTURE}; {own}; {float(answer.cost / exact.cost):.6f} times the exact search's"
        yield Row(case, "objective", None, float(answer.cost), "s a step", level, proof)


def _tables(settings: Settings) -> tuple[SplitTables, float]:
    """The search's tables for a GPT, and the seconds that they took."""
    problem = Training("gpt", settings, _DEVICES, _BATCH).given(_MICRO_BATCH)
    start = _processor_s()
    tables = make_split_tables(problem, range(len(problem.graph.nodes)), tuple(range(_DEVICES)))
    return tables, _processor_s() - start


def _searched(tables: SplitTables, solver: Solver) -> tuple[Assignment, float]:
    start = _processor_s()
    answer = solver(tables, None)
    return answer, _processor_s() - start


def _processor_s() -> float:
    """Seconds that this process and those that it started and that ended have computed."""
    return sum(os.times()[:4])
