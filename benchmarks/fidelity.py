"""Predicted against measured step time, with costs measured on this machine: the zoo's models on one and two ranks.

Each model is profiled, planned with what that gave, and run right afterwards; messages of ranks are measured once. A
piece of work that is always the same is timed before, between and after: where the machine was faster or slower while
the program ran than while it was profiled, both are done again. About thirteen minutes on two quiet cores:

    OMP_NUM_THREADS=1 python benchmarks/fidelity.py --write docs/fidelity.md
    OMP_NUM_THREADS=1 python benchmarks/fidelity.py --only gpt --only dlrm
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autopipe.backends.torch.runtime.data import save_samples
from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.cli.main import main as autopipe
from autopipe.configs.zoo import MODELS

WARM_UP = 4
MOST_DRIFT = 0.05
ROUNDS = 3
_PIPEDREAM = ("--strategy", "pipedream")
_STAGES = (*_PIPEDREAM, "--set", "strategy.replicate=false", "--schedule")
LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"one rank": _PIPEDREAM},
    2: {"two stages": (*_STAGES, "1f1b"), "two stages, searched": (*_STAGES, "tessel")},
}
"""By ranks: what the table calls them, and the options that make the plans so."""
TEXT = """# Predicted and measured step times

Made by `OMP_NUM_THREADS=1 python benchmarks/fidelity.py --write docs/fidelity.md` on {day}, {cores} cores
({processor}), one thread a rank, ranks not more than cores.

Every model of the zoo, as `autopipe zoo build` makes it, trains on {micro_batches} micro-batches of {size} samples.
`autopipe profile` measured its operators for {seconds:g} s, for two ranks with the other core busy; `plan --costs`
predicted the step from that, and the generated program was run right afterwards: the median of {steps} steps. Messages
between two ranks were measured once. Two ranks have a stage each (`pipedream`, no replicas), under 1F1B and under the
searched schedule.

{layouts}

*Drift* is how much longer the same work took while the program ran than while it was profiled. Where that was more
than {most:.0%}, both were done again, up to {rounds} times in all while there was time; the round that drifted least
counts.

| model | layout | predicted | measured | off | drift | quartiles of the steps | nodes measured |
|---|---|---:|---:|---:|---:|---|---|
{rows}
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One model in one layout."""

    model: str
    layout: str
    predicted_s: float
    steps_s: tuple[float, ...]
    nodes: tuple[int, int]
    """Measured, and judged by the roofline."""
    drift: float
    """How much longer the same work took while it ran than while it was profiled, as a share."""

    @property
    def measured_s(self) -> float:
        """The median."""
        return statistics.median(self.steps_s)

    @property
    def off(self) -> float:
        """How far the prediction is off, as a share of what was measured."""
        return self.predicted_s / self.measured_s - 1

    def line(self) -> str:
        """A row of the table."""
        low, _, high = (1e3 * each for each in statistics.quantiles(self.steps_s, n=4))
        known, judged = self.nodes
        times = (
            f"{self.predicted_s * 1e3:.1f} ms | {self.measured_s * 1e3:.1f} ms | {self.off:+.1%} | {self.drift:+.0%}"
        )
        steps = f"{low:.1f} to {high:.1f} ms"
        return f"| {self.model} | {self.layout} | {times} | {steps} | {known} of {known + judged} |"


def rows_of(name: str, exchanges: Path, arguments: argparse.Namespace, folder: Path, until: float) -> list[Row]:
    """Profile a model, and predict and run it on each number of ranks; again where the machine's speed moved."""
    model = folder / f"{name}.onnx"
    _run("zoo", "build", name, "-o", model, "--set", "loss=true", "--set", "weights=random")
    found: list[Row] = []
    for ranks in LAYOUTS:
        rounds: list[list[Row]] = []
        while not rounds or (abs(rounds[-1][0].drift) > MOST_DRIFT and len(rounds) < ROUNDS and time.time() < until):
            rounds.append(_round(name, ranks, exchanges, arguments, folder))
        steadiest: list[Row] = min(rounds, key=lambda rows: abs(rows[0].drift))
        found += steadiest
    return found


def _round(name: str, ranks: int, exchanges: Path, arguments: argparse.Namespace, folder: Path) -> list[Row]:
    model, measured, costs = (folder / f"{name}.{end}" for end in ("onnx", "measured", "costs"))
    batch = ("--batch-size", arguments.size * arguments.micro_batches, "--micro-batches", arguments.micro_batches)
    sizes = ("--micro-batch-sizes", arguments.size, "--degrees", "", "--device", "cpu", "--seconds", arguments.seconds)
    speeds = [_reference_s()]
    _run("profile", model, *sizes, "--company", ranks - 1, "-o", measured)
    speeds.append(_reference_s())
    _run("profile", "--merge", exchanges, measured, "-o", costs)
    cluster = ("--gpus", ranks, "--cluster", "cpu-local", "--costs", costs)
    found: list[Row] = []
    for number, (layout, options) in enumerate(LAYOUTS[ranks].items()):
        plan = folder / f"{name}.{ranks}.{number}.plan"
        summary = _run("plan", model, *cluster, *batch, *options, "-o", plan)["summary"]
        _run("codegen", plan)
        data = folder / f"{name}.npz"
        save_samples(read_manifest(plan / "program"), data)
        steps = ("--steps", arguments.steps + WARM_UP, "--device", "cpu", "--data", data)
        reports = _run("launch", plan / "program", *steps)["steps"]
        seconds = tuple(float(each["step_time_s"]) for each in reports[WARM_UP:])
        found.append(Row(name, layout, summary["step_time_s"], seconds, tuple(summary["costs"].values()), 0.0))
    speeds.append(_reference_s())
    drift = (speeds[1] + speeds[2]) / (speeds[0] + speeds[1]) - 1
    return [replace(each, drift=drift) for each in found]


def _reference_s() -> float:
    """What a piece of work takes that is always the same: small operators, and larger products."""
    torch.set_num_threads(1)
    small, large = torch.ones(64, 64), torch.full((384, 384), 1e-3)
    times = []
    for _ in range(15):
        start = time.perf_counter()
        for _ in range(100):
            torch.relu(small + small)
        for _ in range(4):
            large @ large
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _run(*words: object) -> dict[str, Any]:
    """What a command of autopipe says, in this process."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = autopipe([*map(str, words), "--json", "-q"])
    if code:
        raise SystemExit(f"autopipe {' '.join(map(str, words))}: exit code {code}")
    found: dict[str, Any] = json.loads(said.getvalue() or "{}")
    return found


def page(rows: Sequence[Row], arguments: argparse.Namespace, processor: str) -> str:
    """The documentation's page."""
    return TEXT.format(
        day=datetime.datetime.now(datetime.UTC).date(),
        cores=os.cpu_count(),
        processor=processor,
        micro_batches=arguments.micro_batches,
        size=arguments.size,
        seconds=arguments.seconds,
        steps=arguments.steps,
        layouts="\n".join(_layout_line(layout, rows) for layouts in LAYOUTS.values() for layout in layouts),
        most=MOST_DRIFT,
        rounds=ROUNDS,
        rows="\n".join(row.line() for row in rows),
    )


def _layout_line(layout: str, rows: Sequence[Row]) -> str:
    offs = [row.off for row in rows if row.layout == layout]
    within = sum(abs(off) <= 0.15 for off in offs)
    spread = f"the median {statistics.median(offs):+.0%}, from {min(offs):+.0%} to {max(offs):+.0%}"
    return f"- {layout}: {within} of {len(offs)} within 15%, {spread}"


def main() -> None:
    """Measure and print, model by model; write the page where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="MODEL", choices=sorted(MODELS), help="repeatable")
    parser.add_argument("--write", type=Path, metavar="FILE")
    for name, default in (("size", 4), ("micro-batches", 4), ("steps", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=3.0, help="of profiling, a model and a number of ranks")
    parser.add_argument(
        "--minutes", type=float, default=13.0, help="what all models may take where some are measured again"
    )
    arguments = parser.parse_args()
    rows: list[Row] = []
    names = arguments.only or sorted(MODELS)
    started = time.time()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        first = folder / "first.onnx"
        _run("zoo", "build", "rnnlm", "-o", first, "--set", "loss=true")
        exchanges = folder / "exchanges.costs"
        _run("profile", first, "--ranks", 2, "--seconds", 15, "--device", "cpu", "-o", exchanges)
        for done, name in enumerate(names, 1):
            until = started + 60 * arguments.minutes * done / len(names)
            for row in rows_of(name, exchanges, arguments, folder, until):
                rows.append(row)
                print(row.line(), file=sys.stderr, flush=True)
        processor = json.loads(exchanges.read_text())["devices"][0]["device"]
    text = page(rows, arguments, processor)
    if arguments.write is not None:
        arguments.write.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
