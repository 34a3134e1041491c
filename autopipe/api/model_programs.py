"""Programs of a model that the profiler runs: the full model on one device, and a pipeline of two
stages on two ranks.

A run of the pipeline corrects the time that messages take from a rank, because moving messages
interrupts the tasks of the rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from autopipe.api.profile_samples import is_small
from autopipe.api.synthetic_programs import write_timed_program
from autopipe.backends.torch.profiler.communication import (
    median_forward_interval,
)
from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.ir.errors import AutopipeError
from autopipe.ir.measured_costs import (
    Costs,
    DeviceCosts,
)
from autopipe.ir.placement import crossing_values
from autopipe.ir.problem import Mode, Optimizer, Problem
from autopipe.ir.program import Program
from autopipe.ir.schedule import Phase
from autopipe.passes.analysis.gradients import sent_bytes
from autopipe.passes.cost.measured import costed_work, measured_cluster
from autopipe.passes.frontend import Model
from autopipe.passes.lower.lower import lower
from autopipe.passes.placement.pipedream import PipeDream
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.published.one_f_one_b import KForwardsKBackwards
from autopipe.passes.schedule.simulate import simulate

_CONSTANT_WEIGHTS = Optimizer(lr=0.0)
"""Optimizer of the measured programs. The learning rate is 0 because some models diverge when they
train on random samples for long.
"""


def write_timed(model: Model, precision: str, program: Program, folder: Path) -> None:
    """Write a program that runs training steps of the model with learning rate 0."""
    write_timed_program(
        program, str(model.path.absolute()), model.digest, _CONSTANT_WEIGHTS, precision, folder
    )


_PIPELINE_MICRO_BATCHES = 8
"""Number of micro-batches of a step of the model's pipeline."""
_PIPELINE_RANKS = 2
"""Number of ranks, and of stages, of the model's pipeline."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A program of two stages under 1F1B."""

    folder: Path
    period_s: float
    """Predicted seconds between two micro-batches if sending and receiving take no time of the
    ranks.
    """
    messages: int
    """Number of values that one stage sends to the other."""
    size_bytes: int
    """Size of all these values in bytes."""


def write_pipeline(
    model: Model, precision: str, costs: DeviceCosts, folder: Path
) -> Pipeline | None:
    """Write the model as a program of two stages. According to `costs`, the slower stage takes
    as little time as possible, without the overhead of sending and receiving. Return None if the
    model is not trained, cannot be partitioned, or is too large.
    """
    if model.mode is not Mode.TRAIN or not is_small(model, precision):
        return None
    try:
        problem = _problem(model, precision, costs)
        placement = PipeDream(replicate=False).run(problem)
        if len(placement.stages) < _PIPELINE_RANKS:
            return None
        schedule = KForwardsKBackwards().run(problem, placement)
        write_timed(
            model,
            precision,
            lower(model.graph, placement, schedule, model.loss, precision=precision),
            folder,
        )
    except AutopipeError:
        return None
    whole = sent_bytes(model.graph, precision)
    sizes = [whole[name] for name, _, _ in crossing_values(model.graph, placement)]
    devices = tuple(stage.devices for stage in placement.stages)
    timeline = simulate(schedule, devices, predict(problem, placement))
    starts = [
        span.start
        for span in timeline.spans
        if span.task.stage == 1 and span.task.phase is Phase.FORWARD
    ]
    return Pipeline(folder, median_forward_interval(starts), len(sizes), sum(sizes))


def _problem(model: Model, precision: str, costs: DeviceCosts) -> Problem:
    exchanges = tuple(each for each in costs.exchanges if each.kind not in ("post", "follow"))
    found = Costs((replace(costs, exchanges=exchanges),))
    cluster = measured_cluster(build_cluster(cluster_preset("cpu-local"), _PIPELINE_RANKS), found)
    return Problem(
        graph=model.graph,
        work=costed_work(model.graph, precision, cluster, found),
        cluster=cluster,
        batch_size=_PIPELINE_MICRO_BATCHES * (model.batch or 1),
        micro_batches=_PIPELINE_MICRO_BATCHES,
        mode=model.mode,
        loss=model.loss,
        precision=precision,
        costs=found,
    )
