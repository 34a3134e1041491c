"""What the strategy answers for a problem, and its step in the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from autopipe.cli.bench.tepdist.models import Training, step_flops
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import StageGraph
from autopipe.passes.cost.measured import resized
from autopipe.passes.placement.tepdist.strategy import TePDist
from autopipe.passes.schedule.limits import check_memory
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.published.one_f_one_b import OneForwardOneBackward
from autopipe.passes.schedule.simulate import simulate


@dataclass(frozen=True, slots=True)
class Planned:
    """A placement, on micro-batches of its size, and the step that it makes."""

    problem: Problem
    placement: Placement
    step_s: float

    @property
    def throughput(self) -> float:
        """Samples a second."""
        return self.problem.batch_size / self.step_s

    @property
    def flops(self) -> float:
        """Operations a second and device."""
        return step_flops(self.problem) / self.step_s / self.problem.cluster.size

    @property
    def decision(self) -> str:
        """The placement in a few words."""
        stages = self.placement.stages
        again = sum(stage.recompute for stage in stages)
        words = [
            f"{_counted(len(stages), 'stage')} of {_counted(max(len(stage.devices) for stage in stages), 'device')}",
            f"{_counted(self.problem.micro_batches, 'micro-batch', 'es')} of {self.problem.micro_batch_size}",
        ]
        return ", ".join([*words, f"{again} with recomputation"] if again else words)


@cache
def planned(training: Training) -> Planned | str:
    """The strategy's answer, by its defaults, under 1F1B; or why there is none."""
    problem = training.free
    try:
        placement = TePDist().run(problem)
        own = resized(problem, placement.stages[0].micro_batch_size)
        schedule = OneForwardOneBackward().run(own, placement)
        timeline = simulate(schedule, StageGraph.of(own, placement).stage_devices, predict(own, placement))
        check_memory(own, placement, timeline)
    except InfeasibleError as error:
        return error.message
    return Planned(own, placement, timeline.end)


def _counted(count: int, word: str, plural: str = "s") -> str:
    return f"{count} {word}{plural if count > 1 else ''}"
