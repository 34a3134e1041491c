"""Figure 6 at 32 devices once more, where backward hides the exchange of gradients: data parallelism gains most."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from autopipe.cli.bench.pase.models import CLUSTERS, paper_problem
from autopipe.cli.bench.pase.published import MODELS, SPEEDUP_AT_32
from autopipe.cli.bench.row import Case, Row
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.problem import Problem
from autopipe.passes.cost.stages import stage_costs, step_seconds
from autopipe.passes.placement.data_parallel import DataParallel
from autopipe.passes.placement.pase.strategy import Pase
from autopipe.passes.registry import Strategy

_DEVICES = 32

_NOTE = (
    "by the cost model: gradients are exchanged during backward, at most all of it, in both; links and devices as in "
    "the other speed-ups"
)


def overlapped() -> list[Case]:
    """One case a model."""
    return [Case(f"{model}/p={_DEVICES}", "Figure 6", partial(_rows, model)) for model in MODELS]


def _rows(model: str) -> Iterator[Row]:
    case = f"{model}/p={_DEVICES}"
    for cluster in CLUSTERS:
        problem = paper_problem(model, _DEVICES, cluster)
        theirs = SPEEDUP_AT_32[model] if cluster == CLUSTERS[0] else None
        try:
            figure = _seconds(problem, DataParallel()) / _seconds(problem, Pase(overlap=True))
        except InfeasibleError as error:
            yield Row(case, "speedup_overlapped", theirs, None, "times", f"pase, {cluster}", error.message)
            continue
        yield Row(case, "speedup_overlapped", theirs, figure, "times", f"pase, {cluster}", _NOTE)


def _seconds(problem: Problem, strategy: Strategy) -> float:
    """Seconds of a step whose backward hides the exchange of gradients."""
    (cost,) = stage_costs(problem, strategy.run(problem))
    return step_seconds(cost, problem.micro_batches, overlap=True)
