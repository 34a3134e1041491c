"""The cases that Tessel, GraphPipe, PaSE and TePDist are about, at their sizes, against their papers' baselines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from autopipe.cli.bench.auto import baselines
from autopipe.cli.bench.auto.baselines import Baseline
from autopipe.cli.bench.auto.chosen import Asked, chosen, decision
from autopipe.cli.bench.auto.shapes import is_around_tables, row_parts, stages_beside
from autopipe.cli.bench.row import Case, Row
from autopipe.cli.bench.tepdist.last_layer import class_parts
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Mode, Problem
from autopipe.passes.pipeline import PlanResult


@dataclass(frozen=True, slots=True)
class Shape:
    """What tells a paper's placement: 0 where another one does not have it, of parts 1."""

    name: str
    of: Callable[[Problem, Placement], int]


TABLES = Shape("is_around_tables", is_around_tables)
BESIDE = Shape("stages_beside", stages_beside)
CLASSES = Shape("class_parts", class_parts)
ROWS = Shape("row_parts", row_parts)


@dataclass(frozen=True, slots=True)
class Headline:
    """A case of a paper: what is asked for, what its placement looks like, and what it is compared with there."""

    asked: Asked
    shapes: tuple[Shape, ...]
    baselines: Callable[[Asked], Iterator[Baseline]]
    strategy: str
    """The paper's own, as autopipe has it."""

    @property
    def name(self) -> str:
        """`gpt-11b/p=4`; of inference the samples, too."""
        asked = self.asked
        samples = "" if asked.mode is Mode.TRAIN else f"/{asked.batch}"
        return f"{asked.model}-{dict(asked.settings)['size']}/p={asked.devices}{samples}"


_V100 = "v100-32gb"
_SUMMIT = "summit"
_MOST = "of any plan: all devices busy with the model's operators and nothing else"

HEADLINES = (
    *(
        Headline(
            Asked("gpt", (("size", size), ("sequence", 1024)), _V100, devices, 128, "fp16"),
            (TABLES, CLASSES),
            baselines.of_tessel_training,
            "tessel_shapes",
        )
        for devices, size in ((4, "11b"), (8, "24b"))
    ),
    *(
        Headline(
            Asked("mt5", (("size", size), ("source", 512), ("target", 512)), _V100, devices, 128, "fp16"),
            (TABLES, CLASSES),
            baselines.of_tessel_training,
            "tessel_shapes",
        )
        for devices, size in ((4, "1.8b"), (8, "9.5b"))
    ),
    *(
        Headline(
            Asked("flava", (("size", "paper"),), _V100, 4, samples, "fp16", Mode.INFER),
            (BESIDE,),
            baselines.of_tessel_inference,
            "tessel_shapes",
        )
        for samples in (1, 4)
    ),
    *(
        Headline(
            Asked(model, (("size", "paper"),), _SUMMIT, devices, batch), (BESIDE,), baselines.of_graphpipe, "graphpipe"
        )
        for model, batches in (("mmt", (128, 512)), ("dlrm", (512, 2048)), ("candle-uno", (8192, 32768)))
        for devices, batch in zip((8, 32), batches, strict=True)
    ),
    Headline(Asked("vgg19", (("size", "million"),), "tepdist-m8", 8, 256), (CLASSES,), baselines.of_tepdist, "tepdist"),
    Headline(Asked("rnnlm", (("size", "paper"),), "1080ti-pcie", 32, 64), (CLASSES, ROWS), baselines.of_pase, "pase"),
)


def headlines() -> list[Case]:
    """One case a model and number of devices."""
    return [Case(each.name, "headlines", partial(_rows, each)) for each in HEADLINES]


def _rows(headline: Headline) -> Iterator[Row]:
    case, asked = headline.name, headline.asked
    try:
        found = chosen(asked)
    except InfeasibleError as error:
        yield Row(case, "step_time_s", None, None, "s", "auto", error.message)
        return
    step_s, placement = found.timeline.end, found.plan.placement
    note = f"simulated: {asked.preset}, {asked.precision}, {asked.batch} samples; {decision(found)}"
    yield Row(case, "step_time_s", None, step_s, "s", "auto", note)
    for shape in headline.shapes:
        yield Row(case, shape.name, None, float(shape.of(found.problem, placement)), "", "auto", decision(found))
    ideal = found.plan.breakdown
    for baseline in headline.baselines(asked):
        figure = baseline.step_s / step_s if baseline.step_s else None
        variant = f"auto over {baseline.name}"
        yield Row(case, "speedup", baseline.theirs, figure, "times", variant, baseline.note)
        if baseline.step_s and ideal is not None:
            yield Row(case, "most_speedup", None, baseline.step_s / ideal.ideal_s, "times", variant, _MOST)
    yield _over_own_strategy(case, headline.strategy, found)


def _over_own_strategy(case: str, strategy: str, found: PlanResult) -> Row:
    """The chosen plan beside the best one of the paper's own strategy, whatever its options and its schedule."""
    own = [each for each in found.plan.alternatives if each.choice.strategy == strategy]
    best = min(own, key=lambda each: each.step_time_s or math.inf, default=None)
    variant = f"auto over the best of {strategy}"
    if best is None or best.step_time_s is None:
        return Row(case, "speedup", None, None, "times", variant, "it has no plan")
    options = "".join(f", {name} {value}" for name, value in best.choice.options)
    note = f"under {best.choice.schedule}{options}, {best.stages} stages, {best.micro_batches} micro-batches"
    return Row(case, "speedup", None, best.step_time_s / found.timeline.end, "times", variant, note)
