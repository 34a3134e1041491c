"""Figure 6: throughput of GraphPipe against the sequential pipelines of PipeDream and Piper, in the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from autopipe.cli.bench.graphpipe.planned import AS_PUBLISHED, decision, step_of
from autopipe.cli.bench.graphpipe.published import BATCH, DEVICES, LARGEST_SPEEDUP, MODELS
from autopipe.cli.bench.graphpipe.steps import Step
from autopipe.cli.bench.row import Case, Row

SEQUENTIAL = ("pipedream", "pipedream" + AS_PUBLISHED, "piper")

ASSUMPTIONS = (
    "simulated: V100 by data sheet (fp32, 75% of the peak in products), NVLink 50 GB/s in a node of four, 12.5 GB/s "
    "between nodes; a sequential pipeline's stage also waits for the one before it"
)


def throughputs() -> list[Case]:
    """One case a model and number of devices, then one for the largest gain."""
    cases = [
        Case(f"{model}/p={devices}", "Figure 6", partial(_rows, model, devices, batch))
        for model in MODELS
        for devices, batch in zip(DEVICES, BATCH[model], strict=True)
    ]
    return [*cases, Case("all/p=32", "Figure 6", _largest)]


def _rows(model: str, devices: int, batch: int) -> Iterator[Row]:
    case, steps = f"{model}/p={devices}", _steps(model, devices, batch)
    ours = steps["graphpipe"]
    for strategy, step in steps.items():
        if isinstance(step, str):
            yield Row(case, "throughput", None, None, "samples/s", strategy, step)
            continue
        yield Row(case, "throughput", None, step.throughput, "samples/s", strategy, ASSUMPTIONS)
        yield Row(case, "depth", None, step.depth, "stages", strategy, decision(step))
        if strategy != "graphpipe" and isinstance(ours, Step):
            gain = ours.throughput / step.throughput
            yield Row(case, "speedup", None, gain, "times", f"graphpipe over {strategy}", ASSUMPTIONS)


def _largest() -> Iterator[Row]:
    """The largest gain over the best of the sequential pipelines."""
    gains = []
    for model in MODELS:
        steps = _steps(model, DEVICES[-1], BATCH[model][-1])
        ours = steps["graphpipe"]
        rivals = [step.throughput for name in SEQUENTIAL if isinstance(step := steps[name], Step)]
        if rivals and isinstance(ours, Step):
            gains.append(ours.throughput / max(rivals))
    variant = "graphpipe over the best sequential pipeline"
    yield Row("all/p=32", "speedup", LARGEST_SPEEDUP, max(gains), "times", variant, f"up to; {ASSUMPTIONS}")


def _steps(model: str, devices: int, batch: int) -> dict[str, Step | str]:
    return {strategy: step_of(strategy, model, devices, batch) for strategy in ("graphpipe", *SEQUENTIAL)}
