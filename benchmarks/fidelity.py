"""Predicted against measured step time, with costs measured on this machine: the zoo's models on one and two ranks.

Each model is profiled, planned with what that gave, and run right afterwards; messages of ranks are measured once.
About seven minutes on two quiet cores:

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autopipe.backends.torch.runtime.data import RandomSource
from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.cli.main import main as autopipe
from autopipe.configs.zoo import MODELS

WARM_UP = 4
_STAGES = ("--set", "strategy.replicate=false", "--schedule")
LAYOUTS = {
    1: {"one rank": ()},
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
searched schedule, which mostly splits backwards in halves.

{within} of {count} predictions lie within 15% of what was measured; the median is {median:.1%} off, the worst
{worst:.1%}.

| model | layout | predicted | measured | off | quartiles of the steps | nodes measured |
|---|---|---:|---:|---:|---|---|
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
        times = f"{self.predicted_s * 1e3:.1f} ms | {self.measured_s * 1e3:.1f} ms | {self.off:+.1%}"
        steps = f"{low:.1f} to {high:.1f} ms"
        return f"| {self.model} | {self.layout} | {times} | {steps} | {known} of {known + judged} |"


def rows_of(name: str, exchanges: Path, arguments: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Profile a model, and predict and run it on each number of ranks."""
    model, measured, costs = (folder / f"{name}.{end}" for end in ("onnx", "measured", "costs"))
    batch = ("--batch-size", arguments.size * arguments.micro_batches, "--micro-batches", arguments.micro_batches)
    sizes = ("--micro-batch-sizes", arguments.size, "--degrees", "", "--device", "cpu", "--seconds", arguments.seconds)
    _run("zoo", "build", name, "-o", model, "--set", "loss=true", "--set", "weights=random")
    for ranks, layouts in LAYOUTS.items():
        _run("profile", model, *sizes, "--company", ranks - 1, "-o", measured)
        _run("profile", "--merge", exchanges, measured, "-o", costs)
        cluster = ("--gpus", ranks, "--cluster", "cpu-local", "--costs", costs)
        for number, (layout, options) in enumerate(layouts.items()):
            plan = folder / f"{name}.{ranks}.{number}.plan"
            summary = _run("plan", model, *cluster, *batch, *options, "-o", plan)["summary"]
            _run("codegen", plan)
            data = _batch(plan / "program", folder / f"{name}.npz")
            steps = ("--steps", arguments.steps + WARM_UP, "--device", "cpu", "--data", data)
            reports = _run("launch", plan / "program", *steps)["steps"]
            seconds = tuple(float(each["step_time_s"]) for each in reports[WARM_UP:])
            yield Row(name, layout, summary["step_time_s"], seconds, tuple(summary["costs"].values()))


def _batch(program: Path, target: Path) -> Path:
    """One step's samples in a file, so that drawing them is no part of a step."""
    manifest = read_manifest(program)
    source = RandomSource(manifest, 0)
    np.savez(target, **{each.name: source.rows(each, 0, manifest.batch_size) for each in manifest.inputs})
    return target


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
    offs = [abs(row.off) for row in rows]
    return TEXT.format(
        day=datetime.datetime.now(datetime.UTC).date(),
        cores=os.cpu_count(),
        processor=processor,
        micro_batches=arguments.micro_batches,
        size=arguments.size,
        seconds=arguments.seconds,
        steps=arguments.steps,
        within=sum(off <= 0.15 for off in offs),
        count=len(rows),
        median=statistics.median(offs),
        worst=max(offs),
        rows="\n".join(row.line() for row in rows),
    )


def main() -> None:
    """Measure and print, model by model; write the page where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="MODEL", choices=sorted(MODELS), help="repeatable")
    parser.add_argument("--write", type=Path, metavar="FILE")
    for name, default in (("size", 4), ("micro-batches", 4), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=2.5, help="of profiling, a model and a number of ranks")
    arguments = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        first = folder / "first.onnx"
        _run("zoo", "build", "rnnlm", "-o", first, "--set", "loss=true")
        exchanges = folder / "exchanges.costs"
        _run("profile", first, "--ranks", 2, "--seconds", 20, "--device", "cpu", "-o", exchanges)
        for name in arguments.only or sorted(MODELS):
            for row in rows_of(name, exchanges, arguments, folder):
                rows.append(row)
                print(row.line(), file=sys.stderr, flush=True)
        processor = json.loads(exchanges.read_text())["devices"][0]["device"]
    text = page(rows, arguments, processor)
    if arguments.write is not None:
        arguments.write.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
