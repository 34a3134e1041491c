"""Figure 15: inference of Flava, branches on devices of their own against a chain and against tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopipe.cli.bench.row import Case, Row
from autopipe.cli.bench.tessel.published import FLAVA_LATENCY_REDUCTION, FLAVA_THROUGHPUT
from autopipe.cli.bench.tessel.step import step_seconds
from autopipe.cli.bench.tessel.v100 import problem_on_v100
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.placement.tessel_shapes.cuts import costed_model, stage_of_several
from autopipe.passes.placement.tessel_shapes.strategy import TesselShapes
from autopipe.passes.registry import Scheduler
from autopipe.passes.schedule.published.base import GPipe
from autopipe.passes.schedule.published.one_f_one_b import OneForwardOneBackward
from autopipe.passes.schedule.tessel.scheduler import Tessel

_DEVICES = 4
_CASE = f"flava-paper/p={_DEVICES}"
_MICRO_BATCH_SIZES = (1, 4, 16)
_COUNTS = (1, 2, 4, 8, 32, 128)


def inference() -> list[Case]:
    """One case."""
    return [Case(_CASE, "Figure 15", _rows)]


def _rows() -> Iterator[Row]:
    for size in _MICRO_BATCH_SIZES:
        problem = problem_on_v100("flava", {"size": "paper"}, _DEVICES, max(_COUNTS) * size, size)
        variants: dict[str, tuple[Placement, Scheduler]] = {
            "tessel": (TesselShapes("k").run(problem), Tessel()),
            "1f1b": (TesselShapes("v").run(problem), OneForwardOneBackward()),
            "tensor_parallel": (tensor_parallel(problem), GPipe()),
        }
        ends = {name: [step_seconds(_of(problem, count), *way) for count in _COUNTS] for name, way in variants.items()}
        yield from _compared(size, ends)


def _of(problem: Problem, micro_batches: int) -> Problem:
    return replace(problem, batch_size=problem.micro_batch_size * micro_batches, micro_batches=micro_batches)


def _compared(size: int, ends: dict[str, list[float]]) -> Iterator[Row]:
    """Rows of one micro-batch size. `ends[variant][i]` is the end of `_COUNTS[i]` micro-batches, in seconds."""
    note = f"simulated, V100-32GB by data sheet, fp16 compute, {size} sample(s) a micro-batch"
    for variant, found in ends.items():
        yield Row(_CASE, "latency_s", None, found[0], "s", f"{variant}, size={size}", note)
        yield Row(
            _CASE, "throughput", None, _COUNTS[-1] * size / found[-1], "samples/s", f"{variant}, size={size}", note
        )
    ours = ends["tessel"]
    few = max(theirs / mine for mine, theirs in zip(ours[:-1], ends["1f1b"], strict=False))
    yield Row(
        _CASE,
        "latency_reduction",
        FLAVA_LATENCY_REDUCTION,
        1 - ours[0] / ends["1f1b"][0],
        "",
        f"over 1f1b, size={size}",
        note,
    )
    yield Row(
        _CASE, "speedup", FLAVA_THROUGHPUT["1f1b"], few, "times", f"over 1f1b, few micro-batches, size={size}", note
    )
    yield Row(
        _CASE,
        "speedup",
        FLAVA_THROUGHPUT["tensor_parallel"],
        ends["tensor_parallel"][-1] / ours[-1],
        "times",
        f"over tensor_parallel, size={size}",
        note,
    )


def tensor_parallel(problem: Problem) -> Placement:
    """All products split over all devices."""
    model = costed_model(problem)
    nodes = range(len(problem.graph.nodes))
    return Placement((stage_of_several(problem, model, nodes, tuple(range(_DEVICES)), frozenset()),))
