"""What Tessel, GraphPipe, PaSE and TePDist are about, planned without naming a strategy or a
schedule.

Each paper's main cases at its sizes, compared with its own baselines as the benchmarks of that
paper have them.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path

from autopipe.configs import zoo
from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Mode, Problem
from autopipe.ir.schedule import StageGraph
from autopipe.passes.analysis.operators import op_instances
from autopipe.passes.auto.choose import choose_plan
from autopipe.passes.pipeline import PlanResult, Request, make_plan
from autopipe.passes.placement.data_parallel import DataParallel
from autopipe.passes.placement.tessel_shapes import TesselShapes
from autopipe.passes.schedule.published.base import GPipe
from autopipe.passes.schedule.published.one_f_one_b import OneForwardOneBackward
from benchmarks import graphpipe, pase, tessel
from benchmarks.table import Case, Row, Settings, cases_of
from benchmarks.tepdist import class_parts


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A model with its sizes, devices of a preset, and the samples of a step."""

    model: str
    settings: Settings
    preset: str
    devices: int
    batch: int
    precision: str = "fp32"
    mode: Mode = Mode.TRAIN
    memory_limit: int | None = None
    """Bytes a device; its own memory where there is none."""

    @contextmanager
    def written(self) -> Iterator[Request]:
        """The request, as long as its model's file is there."""
        train = self.mode is Mode.TRAIN
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            zoo.build(
                zoo.configure(self.model, {**dict(self.settings), "loss": train, "weights": "none"})
            ).save(path)
            yield Request(
                path,
                build_cluster(cluster_preset(self.preset), self.devices, None, None),
                strategy=None,
                scheduler=None,
                mode=self.mode,
                batch_size=self.batch,
                precision=self.precision,
                memory_limit=self.memory_limit,
            )


@cache
def chosen_plan(request: PlanRequest) -> PlanResult:
    """The plan that is chosen. Raises InfeasibleError where there is none."""
    with request.written() as written:
        return choose_plan(written)


def decision(found: PlanResult) -> str:
    """The plan in a few words."""
    summary = found.plan.summary
    stages = found.plan.placement.stages
    again = sum(stage.recompute for stage in stages)
    words = [
        f"{summary.strategy} under {summary.schedule}",
        (
            f"{summary.stages} stages of {', '.join(str(len(each.devices)) for each in stages)} "
            "devices"
        ),
        f"depth {summary.depth}",
        f"{summary.micro_batches} micro-batches of {summary.micro_batch_size}",
        *([f"{again} stages with recomputation"] if again else []),
        *(["state shared out"] if found.request.optimizer.shard else []),
    ]
    return ", ".join(words)


# What a placement looks like: Tessel's letters, branches beside one another, parts of tables.


def outline(problem: Problem, placement: Placement) -> str:
    """A letter a stage: `T` for one on all devices, `1` for one on a single device, `g` for one on
    some.
    """
    words = {problem.cluster.size: "T", 1: "1"}
    return "".join(words.get(len(stage.devices), "g") for stage in placement.stages)


def is_around_tables(problem: Problem, placement: Placement) -> bool:
    """True for an M or an NN: first and last stage on all devices, between them stages on single
    ones.

    Of an NN further stages on all devices stand between those.
    """
    return (
        problem.cluster.size > 1
        and re.fullmatch("T1+(T1*)*T", outline(problem, placement)) is not None
    )


def stages_beside(problem: Problem, placement: Placement) -> int:
    """By how many stages the longest way through the stages is shorter than their number: 0 for a
    chain.
    """
    return len(placement.stages) - StageGraph.of(problem, placement).depth


def row_parts(problem: Problem, placement: Placement) -> int:
    """The most parts into which the rows of a table are split, where it is looked up."""
    graph = problem.graph
    uses = op_instances(problem.graph)
    found = [1]
    for number, node in enumerate(graph.nodes):
        if node.op == "Gather" and graph.parameter(node.inputs[0]):
            dimensions = uses[number].space.operands[0]
            assert dimensions is not None, "a table has dimensions"
            splits = next(
                stage.splits_of(number) for stage in placement.stages if number in stage.nodes
            )
            found.append(prod(split.degree for split in splits if split.axis in dimensions[0]))
    return max(found)


_SHAPES: dict[str, Callable[[Problem, Placement], int]] = {
    "is_around_tables": is_around_tables,
    "stages_beside": stages_beside,
    "class_parts": class_parts,
    "row_parts": row_parts,
}
"""What tells a paper's placement: 0 where another one does not have it, of parts 1."""


# What each paper's system is compared with.

_NO_LIMIT = 2**60
_UP_TO = "theirs: the largest of all sizes"


@dataclass(frozen=True, slots=True)
class Baseline:
    """A system that a paper compares its own with."""

    name: str
    step_s: float | None
    """None where it has no step: `note` says why."""
    theirs: float | None = None
    """How many times faster the paper's system is; None where it states no number."""
    note: str = ""


def of_tessel_training(request: PlanRequest) -> Iterator[Baseline]:
    """1F1B+ on the paper's shape, 1F1B and Chimera: each on its best placement, micro-batches of 1,
    2 or 4 samples.

    Figures 13 and 14. All layers recompute there.
    """
    shape, theirs = {"gpt": ("m", tessel.GPT_SPEEDUP), "mt5": ("nn", tessel.MT5_SPEEDUP)}[
        request.model
    ]
    settings = {**dict(request.settings), "loss": True}
    problems = tessel.problems_in_sizes(request.model, settings, request.devices, request.batch)
    for system in tessel.baselines(shape):
        step_s, note = tessel.best_step(problems, system)
        published = theirs[system.published] if system.published else None
        yield Baseline(system.name, step_s, published, _UP_TO if published and step_s else note)


def of_tessel_inference(request: PlanRequest) -> Iterator[Baseline]:
    """1F1B on a chain, and tensor parallelism, a sample at a time.

    Figure 15: of one micro-batch the latency, of several the throughput.
    """
    single = request.batch == 1
    published = tessel.FLAVA_THROUGHPUT
    problem = tessel.problem_on_v100(
        request.model, dict(request.settings), request.devices, request.batch, 1
    )
    problem = replace(problem, memory_limit=None)
    chain = tessel.step_seconds(problem, TesselShapes("v").run(problem), OneForwardOneBackward())
    theirs = 1 / (1 - tessel.FLAVA_LATENCY_REDUCTION) if single else published["1f1b"]
    yield Baseline("1f1b", chain, theirs, _UP_TO)
    step_s = tessel.step_seconds(problem, tessel.tensor_parallel(problem), GPipe())
    yield Baseline(
        "tensor_parallel", step_s, None if single else published["tensor_parallel"], _UP_TO
    )


def of_graphpipe(request: PlanRequest) -> Iterator[Baseline]:
    """Sequential pipelines of PipeDream and Piper. Figure 6; theirs is over the best of them on 32
    devices.
    """
    for name in graphpipe.SEQUENTIAL:
        found = graphpipe.step_of(name, request.model, request.devices, request.batch)
        if isinstance(found, str):
            yield Baseline(name, None, None, found)
        else:
            theirs = graphpipe.LARGEST_SPEEDUP if request.devices == 32 else None
            yield Baseline(name, found.timeline.end, theirs, _UP_TO if theirs else "")


def of_pase(request: PlanRequest) -> Iterator[Baseline]:
    """Data parallelism. Figure 6a."""
    step_s, note = pase.step_of_strategy(
        request.model, request.devices, request.preset, "data_parallel"
    )
    theirs = pase.SPEEDUP_AT_32[request.model] if request.devices == 32 else None
    yield Baseline("data_parallel", step_s, theirs, note)


def of_tepdist(request: PlanRequest) -> Iterator[Baseline]:
    """Data parallelism, as if memory held it where it does not. What the paper reports is a
    picture.
    """
    for memory_limit, name in (
        (None, "data_parallel"),
        (_NO_LIMIT, "data_parallel, were memory no limit"),
    ):
        try:
            with replace(request, memory_limit=memory_limit).written() as written:
                named = replace(written, strategy=DataParallel(), scheduler=OneForwardOneBackward())
                yield Baseline(name, make_plan(named).timeline.end)
                return
        except InfeasibleError as error:
            yield Baseline(name, None, None, error.message)


# The papers' main cases.


@dataclass(frozen=True, slots=True)
class Headline:
    """A paper's main case: the request, what tells its placement, and what it is compared with
    there.
    """

    request: PlanRequest
    shapes: tuple[str, ...]
    """Of `_SHAPES`."""
    baselines: Callable[[PlanRequest], Iterator[Baseline]]
    strategy: str
    """The paper's own, as autopipe has it."""

    @property
    def name(self) -> str:
        """`gpt-11b/p=4`; of inference the samples, too."""
        request = self.request
        samples = "" if request.mode is Mode.TRAIN else f"/{request.batch}"
        return f"{request.model}-{dict(request.settings)['size']}/p={request.devices}{samples}"


def _tessel(model: str, size: str, devices: int, tokens: Settings) -> Headline:
    request = PlanRequest(model, (("size", size), *tokens), "v100-32gb", devices, 128, "fp16")
    return Headline(
        request, ("is_around_tables", "class_parts"), of_tessel_training, "tessel_shapes"
    )


def _flava(samples: int) -> Headline:
    request = PlanRequest(
        "flava", (("size", "paper"),), "v100-32gb", 4, samples, "fp16", Mode.INFER
    )
    return Headline(request, ("stages_beside",), of_tessel_inference, "tessel_shapes")


def _graphpipe(model: str, devices: int, batch: int) -> Headline:
    request = PlanRequest(model, graphpipe.PAPER, "summit", devices, batch)
    return Headline(request, ("stages_beside",), of_graphpipe, "graphpipe")


_GPT_TOKENS = (("sequence", 1024),)
_MT5_TOKENS = (("source", 512), ("target", 512))
_VGG = PlanRequest("vgg19", (("size", "million"),), "tepdist-m8", 8, 256)
_RNNLM = PlanRequest("rnnlm", (("size", "paper"),), "1080ti-pcie", 32, 64)
HEADLINES = (
    _tessel("gpt", "11b", 4, _GPT_TOKENS),
    _tessel("gpt", "24b", 8, _GPT_TOKENS),
    _tessel("mt5", "1.8b", 4, _MT5_TOKENS),
    _tessel("mt5", "9.5b", 8, _MT5_TOKENS),
    _flava(1),
    _flava(4),
    _graphpipe("mmt", 8, 128),
    _graphpipe("mmt", 32, 512),
    _graphpipe("dlrm", 8, 512),
    _graphpipe("dlrm", 32, 2048),
    _graphpipe("candle-uno", 8, 8192),
    _graphpipe("candle-uno", 32, 32768),
    Headline(_VGG, ("class_parts",), of_tepdist, "tepdist"),
    Headline(_RNNLM, ("class_parts", "row_parts"), of_pase, "pase"),
)


def cases() -> list[Case]:
    """One case a model and number of devices."""
    return cases_of("headlines", _rows, ((each.name, (each,)) for each in HEADLINES))


def _rows(case: str, headline: Headline) -> Iterator[Row]:
    request = headline.request
    try:
        found = chosen_plan(request)
    except InfeasibleError as error:
        yield Row(case, "step_time_s", None, None, "s", "auto", error.message)
        return
    step_s = found.timeline.end
    placement = found.plan.placement
    ideal = found.plan.breakdown
    note = (
        f"simulated: {request.preset}, {request.precision}, {request.batch} samples; "
        f"{decision(found)}"
    )
    yield Row(case, "step_time_s", None, step_s, "s", "auto", note)
    for name in headline.shapes:
        yield Row(
            case,
            name,
            None,
            float(_SHAPES[name](found.problem, placement)),
            "",
            "auto",
            decision(found),
        )
    for baseline in headline.baselines(request):
        figure = baseline.step_s / step_s if baseline.step_s else None
        variant = f"auto over {baseline.name}"
        yield Row(case, "speedup", baseline.theirs, figure, "times", variant, baseline.note)
        if baseline.step_s and ideal is not None:
            most = "of any plan: all devices busy with the model's operators and nothing else"
            yield Row(
                case, "most_speedup", None, baseline.step_s / ideal.ideal_s, "times", variant, most
            )
    yield _over_own_strategy(case, headline.strategy, found)


def _over_own_strategy(case: str, strategy: str, found: PlanResult) -> Row:
    """The chosen plan beside the best one of the paper's own strategy, whatever its options and its
    schedule.
    """
    own = [each for each in found.plan.alternatives if each.choice.strategy == strategy]
    best = min(own, key=lambda each: each.step_time_s or math.inf, default=None)
    variant = f"auto over the best of {strategy}"
    if best is None or best.step_time_s is None:
        return Row(case, "speedup", None, None, "times", variant, "it has no plan")
    options = "".join(f", {name} {value}" for name, value in best.choice.options)
    note = (
        f"under {best.choice.schedule}{options}, {best.stages} stages, {best.micro_batches} "
        "micro-batches"
    )
    return Row(case, "speedup", None, best.step_time_s / found.timeline.end, "times", variant, note)
