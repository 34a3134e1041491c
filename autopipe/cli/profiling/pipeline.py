"""The model in two stages on two ranks, by which it is set right what messages take of a rank's own time.

They take more than a rank spends on them: what moves them interrupts its tasks, ranks that wait for one another take
the slower one's time, and with several micro-batches under way each finds less of its own in the caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autopipe.backends.torch.emission.folder import ProgramFiles, write_program
from autopipe.backends.torch.emission.manifest import Provenance
from autopipe.cli.profiling.samples import bytes_of, samples_of
from autopipe.cli.profiling.whole import MOST_BYTES, STANDSTILL
from autopipe.configs.cluster_file import build_cluster
from autopipe.configs.presets import cluster_preset
from autopipe.ir.costs import Costs, DeviceCosts
from autopipe.ir.errors import AutopipeError
from autopipe.ir.placement import Placement, crossing_values
from autopipe.ir.problem import Mode, Problem
from autopipe.passes.cost.measured import costed_work, measured_cluster
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.frontend import Model
from autopipe.passes.lower.assemble import lower
from autopipe.passes.placement.pipedream.strategy import PipeDream
from autopipe.passes.schedule.named.kfkb import KForwardsKBackwards

_MICRO_BATCHES = 8
_RANKS = 2


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A program of two stages under 1F1B."""

    folder: Path
    own_s: float
    """What a micro-batch takes in the slower stage without messages, by what was measured of the rest."""
    messages: int
    """Values that go from one stage to the other."""
    size_bytes: int
    """Of all of them."""


def write_pipeline(model: Model, precision: str, costs: DeviceCosts, folder: Path) -> Pipeline | None:
    """Write the model in two stages, cut where `costs` say that they take equally long; they are those of its operators
    and tasks.

    None where it is not trained, cannot be cut, or is too large.
    """
    if model.mode is not Mode.TRAIN or sum(map(bytes_of, samples_of(model, precision))) > MOST_BYTES:
        return None
    try:
        problem = _problem(model, precision, costs)
        placement = PipeDream(replicate=False).run(problem)
        if len(placement.stages) < _RANKS:
            return None
        _write(problem, placement, model, folder)
    except AutopipeError:
        return None
    sizes = [model.graph.type_of(name).bytes for name, _, _ in crossing_values(model.graph, placement)]
    own = max(each.forward_s + each.backward_s for each in stage_costs(problem, placement))
    return Pipeline(folder, own, len(sizes), sum(sizes))


def _problem(model: Model, precision: str, costs: DeviceCosts) -> Problem:
    found = Costs((costs,))
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


def _write(problem: Problem, placement: Placement, model: Model, folder: Path) -> None:
    schedule = KForwardsKBackwards().run(problem, placement)
    program = lower(model.graph, placement, schedule, model.loss)
    titles = ("Half of the model.",) * _RANKS, ("Half of the model.",) * _RANKS
    file = Provenance(str(model.path.absolute()), model.digest, "", STANDSTILL, problem.precision, 0, 0.0, 0.0)
    write_program([ProgramFiles("", program, *titles)], file, folder)
