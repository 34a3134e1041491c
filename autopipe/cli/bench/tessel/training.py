"""Figures 13 and 14: training GPT and mT5 with large tables, ours against the baselines, in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from autopipe.cli.bench.row import Case, Row
from autopipe.cli.bench.tessel.chain import device_seconds, equal_groups, tables_apart
from autopipe.cli.bench.tessel.published import GPT_SPEEDUP, MT5_SPEEDUP
from autopipe.cli.bench.tessel.recomputed import with_layers_recomputed
from autopipe.cli.bench.tessel.step import step_seconds
from autopipe.cli.bench.tessel.v100 import problem_on_v100
from autopipe.configs.zoo.settings import Setting
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.placement.tessel_shapes.strategy import TesselShapes
from autopipe.passes.registry import Scheduler
from autopipe.passes.schedule.published.bidirectional import Chimera
from autopipe.passes.schedule.published.one_f_one_b import OneForwardOneBackward, OneForwardOneBackwardPlus
from autopipe.passes.schedule.tessel.scheduler import Tessel

_BATCH = 128
_MICRO_BATCH_SIZES = (1, 2, 4)

_ASSUMPTIONS = (
    "simulated: V100-32GB by data sheet, eight a server, 50 GB/s in it, 12.5 GB/s between; fp16 compute on fp32 "
    "parameters, SGD, so 8 bytes a parameter; each layer recomputed; batch 128; best micro-batch of 1, 2 and 4"
)


@dataclass(frozen=True, slots=True)
class _Model:
    """A model's sizes in Table III by number of devices, and what the paper reports of it."""

    name: str
    sizes: Mapping[int, str]
    tokens: Mapping[str, int]
    """Its settings for the length of a sample."""
    shape: str
    speedup: Mapping[str, float]

    def settings(self, size: str) -> dict[str, Setting]:
        """The zoo's settings of a size."""
        return {"size": size, "loss": True, **self.tokens}


_MODELS = (
    _Model("gpt", {4: "11b", 8: "24b", 16: "47b", 32: "77b"}, {"sequence": 1024}, "m", GPT_SPEEDUP),
    _Model("mt5", {4: "1.8b", 8: "9.5b", 16: "43b", 32: "88b"}, {"source": 512, "target": 512}, "nn", MT5_SPEEDUP),
)

_Placements = Callable[[Problem], Iterable[Placement]]


@dataclass(frozen=True, slots=True)
class Way:
    """A schedule with the placements it is used on."""

    name: str
    placements: _Placements
    scheduler: Scheduler
    published: str | None
    """The paper's name of the baseline; None where it has none like it."""


def training() -> list[Case]:
    """One case a model and number of devices."""
    return [
        Case(f"{model.name}-{size}/p={devices}", "Figures 13, 14", partial(_rows, model, size, devices))
        for model in _MODELS
        for devices, size in model.sizes.items()
    ]


def _rows(model: _Model, size: str, devices: int) -> Iterator[Row]:
    case = f"{model.name}-{size}/p={devices}"
    ours = Way("tessel", in_shape(model.shape), Tessel(time_limit=10.0), None)
    problems = problems_in_sizes(model.name, model.settings(size), devices, _BATCH)
    lengths = ", ".join(f"{name} {count} tokens" for name, count in model.tokens.items())
    least, note = best_step(problems, ours)
    yield _throughput(case, ours, least, f"{note}; {lengths}")
    for way in rivals(model.shape):
        step, note = best_step(problems, way)
        yield _throughput(case, way, step, f"{note}; {lengths}")
        theirs = model.speedup[way.published] if way.published else None
        figure = step / least if step and least else None
        meaning = "theirs: the largest of all sizes" if theirs else "theirs: no figure"
        yield Row(case, "speedup", theirs, figure, "times", f"tessel over {way.name}", meaning)


def problems_in_sizes(model: str, settings: Mapping[str, Setting], devices: int, batch: int) -> list[Problem]:
    """The model in micro-batches of each size that is tried."""
    return [problem_on_v100(model, settings, devices, batch, each) for each in _MICRO_BATCH_SIZES]


def rivals(shape: str) -> tuple[Way, ...]:
    """What the paper compares its shape with, and Chimera."""
    return (
        Way("1f1b_plus", in_shape(shape), OneForwardOneBackwardPlus(), "1f1b_plus"),
        Way("1f1b, equal groups", equal_groups, OneForwardOneBackward(), "1f1b"),
        Way("1f1b, tables apart", tables_apart, OneForwardOneBackward(), None),
        Way("chimera", in_shape("x"), Chimera(), None),
    )


def _throughput(case: str, way: Way, step: float | None, note: str) -> Row:
    return Row(case, "throughput", None, _BATCH / step if step else None, "samples/s", way.name, note)


def best_step(problems: Sequence[Problem], way: Way) -> tuple[float | None, str]:
    """Seconds of the fastest step over micro-batch sizes and placements, and how it came about."""
    best: tuple[float, int] | None = None
    refusal = "out of memory"
    for problem in problems:
        try:
            step = _fastest(problem, way)
        except InfeasibleError as error:
            refusal = error.message
            continue
        if best is None or step < best[0]:
            best = step, problem.micro_batch_size
    return (None, refusal) if best is None else (best[0], f"{_ASSUMPTIONS}, here {best[1]}")


def _fastest(problem: Problem, way: Way) -> float:
    """The shortest step of the placements that fit, without simulating those whose busiest device alone takes longer.

    Raises InfeasibleError where none fits.
    """
    loads = [(max(device_seconds(problem, each)), each) for each in way.placements(problem)]
    best: float | None = None
    refusal: InfeasibleError | None = None
    for load, placement in sorted(loads, key=lambda each: each[0]):
        if best is not None and load * problem.micro_batches >= best:
            break
        try:
            step = step_seconds(problem, placement, way.scheduler)
        except InfeasibleError as error:
            refusal = refusal or error
            continue
        best = step if best is None else min(best, step)
    if best is None:
        raise refusal or InfeasibleError("there is no such placement")
    return best


def in_shape(name: str) -> _Placements:
    """The placements in a shape of the paper: one a problem."""

    def placements(problem: Problem) -> Iterator[Placement]:
        yield with_layers_recomputed(TesselShapes(name).run(problem))

    return placements
