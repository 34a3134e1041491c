"""What strategies answer for the paper's models, each asked once, and the steps of their answers."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cache

from autopipe.cli.bench.graphpipe.models import PAPER, problem_of
from autopipe.cli.bench.graphpipe.steps import Step, graph_step, sequential_step
from autopipe.cli.bench.zoo_graph import Settings
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.passes.cost.measured import resized
from autopipe.passes.registry import strategy_class

AS_PUBLISHED = ", slowest stage"
"""After a strategy's name: its objective is the slowest stage's time alone, as in its paper."""

_OPTIONS: dict[str, dict[str, object]] = {
    "graphpipe": {},
    "pipedream": {"sweep": True},
    "pipedream" + AS_PUBLISHED: {"sweep": True, "objective": "slowest_stage"},
    "piper": {},
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A strategy's placement and how long the search took; without one why there is none."""

    seconds: float
    placement: Placement | None = None
    refusal: str = ""


@cache
def answer_of(
    strategy: str, model: str, devices: int, batch: int, settings: Settings = PAPER, size: int | None = None
) -> Answer:
    """The answer to a problem; with `size` micro-batches of that many samples."""
    problem = problem_of(model, devices, batch, settings)
    if size is not None:
        problem = replace(resized(problem, size), micro_batch_sizes=())
    chosen = strategy_class(strategy.partition(",")[0])(**_OPTIONS[strategy])
    start = time.perf_counter()
    try:
        chosen.requires(problem)
        placement = chosen.run(problem)
    except InfeasibleError as error:
        return Answer(time.perf_counter() - start, refusal=error.message)
    return Answer(time.perf_counter() - start, placement)


@cache
def step_of(
    strategy: str, model: str, devices: int, batch: int, settings: Settings = PAPER, size: int | None = None
) -> Step | str:
    """The step of a strategy's answer: GraphPipe's as a graph of stages, others' as a chain; or why there is none."""
    answer = answer_of(strategy, model, devices, batch, settings, size)
    if answer.placement is None:
        return answer.refusal
    run = graph_step if strategy == "graphpipe" else sequential_step
    try:
        return run(problem_of(model, devices, batch, settings), answer.placement)
    except InfeasibleError as error:
        return error.message


def best_pipedream(
    model: str, devices: int, batch: int, settings: Settings = PAPER, size: int | None = None
) -> Step | str:
    """The step of PipeDream's answers that is shorter in the simulator: by either objective."""
    names = ("pipedream", "pipedream" + AS_PUBLISHED)
    found = [step_of(name, model, devices, batch, settings, size) for name in names]
    steps = [step for step in found if isinstance(step, Step)]
    return max(steps, key=lambda step: step.throughput) if steps else found[0]


def decision(step: Step) -> str:
    """A step's placement in a few words."""
    stages, size = len(step.placement.stages), step.micro_batch_size
    groups = sorted({len(stage.devices) for stage in step.placement.stages})
    shared = "" if groups == [1] else f" of {groups[0]}" + (f" to {groups[-1]}" if len(groups) > 1 else "") + " devices"
    return f"{stages} stages{shared}, depth {step.depth}, micro-batches of {size}"
