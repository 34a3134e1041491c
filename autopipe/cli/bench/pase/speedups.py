"""Figure 6: training steps of several strategies against data parallelism's, in the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

from autopipe.cli.bench.pase.models import CLUSTERS, paper_problem
from autopipe.cli.bench.pase.published import DEVICES, LARGEST_SPEEDUP, MODELS, SPEEDUP_AT_32
from autopipe.cli.bench.row import Case, Row
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import StageGraph
from autopipe.passes.registry import strategy_class
from autopipe.passes.schedule.limits import check_memory
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.published.one_f_one_b import OneForwardOneBackward
from autopipe.passes.schedule.simulate import simulate

_STRATEGIES = ("pase", "expert", "mcmc")
_MICRO_BATCHES = (1, 2, 4, 8)

_ASSUMPTIONS = {
    "1080ti-pcie": "simulated: GTX 1080 Ti by data sheet (fp32), eight a server, 12 GB/s a device in it over PCIe 3.0, "
    "6.25 GB/s a device between servers; gradients are exchanged after backward, and nothing else overlaps either",
    "2080ti-pcie": "simulated: RTX 2080 Ti by data sheet (fp32), eight a server, 6 GB/s a device through the host's "
    "memory, 6 GB/s between servers; gradients are exchanged after backward, and nothing else overlaps either",
}


def speedups() -> list[Case]:
    """One case a model and number of devices, then one for the largest of all."""
    cases = [
        Case(f"{model}/p={devices}", "Figure 6", partial(_rows, model, devices))
        for model in MODELS
        for devices in DEVICES
    ]
    return [*cases, Case("all", "Figure 6", _largest)]


@cache
def placed(model: str, devices: int, cluster: str, strategy: str, micro_batches: int = 1) -> Placement:
    """What a strategy with its defaults makes of a model. Raises InfeasibleError where it is refused."""
    problem = paper_problem(model, devices, cluster, micro_batches)
    chosen = strategy_class(strategy)()
    chosen.requires(problem)
    placement: Placement = chosen.run(problem)
    return placement


def _rows(model: str, devices: int) -> Iterator[Row]:
    case = f"{model}/p={devices}"
    for cluster in CLUSTERS:
        note = _ASSUMPTIONS[cluster]
        base, base_note = step_of_strategy(model, devices, cluster, "data_parallel")
        yield Row(case, "step_time_s", None, base, "s", f"data_parallel, {cluster}", base_note or note)
        for strategy in _STRATEGIES:
            step, why = step_of_strategy(model, devices, cluster, strategy)
            figure = base / step if base and step else None
            at_32 = strategy == "pase" and devices == 32 and cluster == CLUSTERS[0]
            theirs = SPEEDUP_AT_32[model] if at_32 else None
            yield Row(case, "step_time_s", None, step, "s", f"{strategy}, {cluster}", why or note)
            yield Row(case, "speedup", theirs, figure, "times", f"{strategy}, {cluster}", why or base_note or note)


def _largest() -> Iterator[Row]:
    for cluster in CLUSTERS:
        found = []
        for model in MODELS:
            for devices in DEVICES:
                base, _ = step_of_strategy(model, devices, cluster, "data_parallel")
                step, _ = step_of_strategy(model, devices, cluster, "pase")
                found += [base / step] if base and step else []
        note = f"up to, over four models on 4 to 64 devices; {_ASSUMPTIONS[cluster]}"
        yield Row("all", "speedup", LARGEST_SPEEDUP[cluster], max(found), "times", f"pase, {cluster}", note)


@cache
def step_of_strategy(model: str, devices: int, cluster: str, strategy: str) -> tuple[float | None, str]:
    """Seconds of a step, None where the strategy is refused; and why, or what else is to be said.

    One stage takes as few micro-batches as memory allows, a pipeline the best number of several.
    """
    found: list[tuple[float, int]] = []
    refusal = ""
    for micro_batches in _MICRO_BATCHES:
        problem = paper_problem(model, devices, cluster, micro_batches)
        try:
            placement = placed(model, devices, cluster, strategy, micro_batches)
            found.append((_simulated(problem, placement), micro_batches))
        except InfeasibleError as error:
            refusal = refusal or error.message
            continue
        if len(placement.stages) == 1:
            break
    if not found:
        return None, refusal
    step, chosen = min(found)
    return step, f"{_ASSUMPTIONS[cluster]}; {chosen} micro-batches" if chosen > 1 else ""


def _simulated(problem: Problem, placement: Placement) -> float:
    """Seconds of a step. Raises InfeasibleError where memory does not hold it."""
    schedule = OneForwardOneBackward().run(problem, placement)
    step = simulate(schedule, StageGraph.of(problem, placement).stage_devices, predict(problem, placement))
    check_memory(problem, placement, step)
    return step.end
