"""The model in two stages on two ranks, by which it is set right what messages take of a rank's own time.

They take more than a rank spends on them: what moves them interrupts its tasks, ranks that wait for one another take
the slower one's time, and with several micro-batches under way each finds less of its own in the caches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from autopipe.backends.torch.profiler.communication import period_of
from autopipe.cli.profiling.timed import is_small, write_timed
from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.ir.errors import AutopipeError
from autopipe.ir.measured_costs import Costs, DeviceCosts
from autopipe.ir.placement import Placement, crossing_values
from autopipe.ir.problem import Mode, Problem
from autopipe.ir.schedule import Phase, Schedule
from autopipe.passes.cost.measured import costed_work, measured_cluster
from autopipe.passes.frontend import Model
from autopipe.passes.lower.lower import lower
from autopipe.passes.placement.pipedream import PipeDream
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.published.one_f_one_b import KForwardsKBackwards
from autopipe.passes.schedule.simulate import simulate

_MICRO_BATCHES = 8
_RANKS = 2


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A program of two stages under 1F1B."""

    folder: Path
    period_s: float
    """From one micro-batch to the next as predicted, if the ends of messages took nothing."""
    messages: int
    """Values that go from one stage to the other."""
    size_bytes: int
    """Of all of them."""


def write_pipeline(model: Model, precision: str, costs: DeviceCosts, folder: Path) -> Pipeline | None:
    """Write the model in two stages, cut where `costs` say that they take equally long without the ends of messages.

    None where it is not trained, cannot be cut, or is too large.
    """
    if model.mode is not Mode.TRAIN or not is_small(model, precision):
        return None
    try:
        problem = _problem(model, precision, costs)
        placement = PipeDream(replicate=False).run(problem)
        if len(placement.stages) < _RANKS:
            return None
        schedule = KForwardsKBackwards().run(problem, placement)
        write_timed(model, precision, lower(model.graph, placement, schedule, model.loss), folder)
    except AutopipeError:
        return None
    sizes = [model.graph.type_of(name).bytes for name, _, _ in crossing_values(model.graph, placement)]
    return Pipeline(folder, _period(problem, placement, schedule), len(sizes), sum(sizes))


def _period(problem: Problem, placement: Placement, schedule: Schedule) -> float:
    """Predicted seconds from a forward of the second stage to its next."""
    devices = tuple(stage.devices for stage in placement.stages)
    timeline = simulate(schedule, devices, predict(problem, placement))
    starts = [span.start for span in timeline.spans if span.task.stage == 1 and span.task.phase is Phase.FORWARD]
    return period_of(starts)


def _problem(model: Model, precision: str, costs: DeviceCosts) -> Problem:
    exchanges = tuple(each for each in costs.exchanges if each.kind not in ("post", "follow"))
    found = Costs((replace(costs, exchanges=exchanges),))
    cluster = measured_cluster(build_cluster(cluster_preset("cpu-local"), _RANKS), found)
    return Problem(
        graph=model.graph,
        work=costed_work(model.graph, precision, cluster, found),
        cluster=cluster,
        batch_size=_MICRO_BATCHES * (model.batch or 1),
        micro_batches=_MICRO_BATCHES,
        mode=model.mode,
        loss=model.loss,
        precision=precision,
        costs=found,
    )
