"""What the papers compare with, and what they report of it, as the benchmarks of each paper have it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopipe.cli.bench.auto.chosen import Asked, asked_for
from autopipe.cli.bench.graphpipe.planned import step_of
from autopipe.cli.bench.graphpipe.published import LARGEST_SPEEDUP
from autopipe.cli.bench.graphpipe.throughput import SEQUENTIAL
from autopipe.cli.bench.pase.published import SPEEDUP_AT_32
from autopipe.cli.bench.pase.speedups import step_of_strategy
from autopipe.cli.bench.tessel.inference import tensor_parallel
from autopipe.cli.bench.tessel.published import (
    FLAVA_LATENCY_REDUCTION,
    FLAVA_THROUGHPUT,
    GPT_SPEEDUP,
    MT5_SPEEDUP,
)
from autopipe.cli.bench.tessel.step import step_seconds
from autopipe.cli.bench.tessel.training import best_step, problems_in_sizes, rivals
from autopipe.cli.bench.tessel.v100 import problem_on_v100
from autopipe.ir.errors import InfeasibleError
from autopipe.passes.pipeline import make_plan
from autopipe.passes.placement.data_parallel import DataParallel
from autopipe.passes.placement.tessel_shapes.strategy import TesselShapes
from autopipe.passes.schedule.published.base import GPipe
from autopipe.passes.schedule.published.one_f_one_b import OneForwardOneBackward

_NO_LIMIT = 2**60
_UP_TO = "theirs: the largest of all sizes"


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the paper's system is compared with."""

    name: str
    step_s: float | None
    """None where it has no step: `note` says why."""
    theirs: float | None = None
    """How many times faster the paper's system is; None where it states no number."""
    note: str = ""


def of_tessel_training(asked: Asked) -> Iterator[Baseline]:
    """1F1B+ on the paper's shape, 1F1B and Chimera: each on its best placement, micro-batches of 1, 2 or 4 samples.

    Figures 13 and 14. All layers recompute there.
    """
    shape, theirs = {"gpt": ("m", GPT_SPEEDUP), "mt5": ("nn", MT5_SPEEDUP)}[asked.model]
    problems = problems_in_sizes(asked.model, {**dict(asked.settings), "loss": True}, asked.devices, asked.batch)
    for way in rivals(shape):
        step_s, note = best_step(problems, way)
        published = theirs[way.published] if way.published else None
        yield Baseline(way.name, step_s, published, _UP_TO if published and step_s else note)


def of_tessel_inference(asked: Asked) -> Iterator[Baseline]:
    """1F1B on a chain, and tensor parallelism, a sample at a time.

    Figure 15: of one micro-batch the latency, of several the throughput.
    """
    problem = problem_on_v100(asked.model, dict(asked.settings), asked.devices, asked.batch, 1)
    problem = replace(problem, memory_limit=None)
    single = asked.batch == 1
    chain = step_seconds(problem, TesselShapes("v").run(problem), OneForwardOneBackward())
    yield Baseline("1f1b", chain, 1 / (1 - FLAVA_LATENCY_REDUCTION) if single else FLAVA_THROUGHPUT["1f1b"], _UP_TO)
    tensor = step_seconds(problem, tensor_parallel(problem), GPipe())
    yield Baseline("tensor_parallel", tensor, None if single else FLAVA_THROUGHPUT["tensor_parallel"], _UP_TO)


def of_graphpipe(asked: Asked) -> Iterator[Baseline]:
    """Sequential pipelines of PipeDream and Piper. Figure 6; theirs is over the best of them on 32 devices."""
    for name in SEQUENTIAL:
        found = step_of(name, asked.model, asked.devices, asked.batch)
        if isinstance(found, str):
            yield Baseline(name, None, None, found)
        else:
            theirs = LARGEST_SPEEDUP if asked.devices == 32 else None
            yield Baseline(name, found.timeline.end, theirs, _UP_TO if theirs else "")


def of_pase(asked: Asked) -> Iterator[Baseline]:
    """Data parallelism. Figure 6a."""
    step_s, note = step_of_strategy(asked.model, asked.devices, asked.preset, "data_parallel")
    yield Baseline("data_parallel", step_s, SPEEDUP_AT_32[asked.model] if asked.devices == 32 else None, note)


def of_tepdist(asked: Asked) -> Iterator[Baseline]:
    """Data parallelism, as if memory held it where it does not. What the paper reports is a picture."""
    for memory_limit, name in ((None, "data_parallel"), (_NO_LIMIT, "data_parallel, were memory no limit")):
        try:
            with asked_for(replace(asked, memory_limit=memory_limit)) as request:
                named = replace(request, strategy=DataParallel(), scheduler=OneForwardOneBackward())
                yield Baseline(name, make_plan(named).timeline.end)
                return
        except InfeasibleError as error:
            yield Baseline(name, None, None, error.message)
