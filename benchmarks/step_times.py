"""Predicted against measured step time, with costs measured on this machine: the zoo's models on
one and two ranks.

In each round, every model is profiled, planned with the measured costs, and run immediately
afterwards. The page reports the round whose prediction error is the median, because the speed of a
machine may change between the profile and the run. A round takes about 20 minutes on two idle cores. Each row
is appended to the log; the page is written from all rows of the log, so rounds may run at
different hours.

    OMP_NUM_THREADS=1 python benchmarks/step_times.py --log /tmp/rows.jsonl --write /tmp/rows.md
    OMP_NUM_THREADS=1 python benchmarks/step_times.py --log /tmp/rows.jsonl --only gpt --only dlrm
    python benchmarks/step_times.py --log /tmp/rows.jsonl --rounds 0 --write /tmp/rows.md
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from command_line import autopipe, parse_arguments

from autopipe.backends.torch.runtime.data.sources import save_samples
from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.configs.zoo import MODELS

WARM_UP = 4
_PIPEDREAM = ("--strategy", "pipedream")
_STAGES = (*_PIPEDREAM, "--set", "strategy.replicate=false", "--schedule")
LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"one rank": _PIPEDREAM},
    2: {"two stages": (*_STAGES, "1f1b"), "two stages, searched": (*_STAGES, "tessel")},
}
"""By ranks: what the table calls them, and the options that make the plans so."""
TEXT = """# Predicted and measured step times

Made by `OMP_NUM_THREADS=1 python benchmarks/step_times.py --log /tmp/step-times.jsonl --write /tmp/step-times.md` from
{first} to {last} (UTC) on {cores} cores ({processor}), one thread a rank, ranks not more than cores.

Every model of the zoo, as `autopipe zoo build` makes it, trains on {micro_batches} micro-batches of {size} samples.
`autopipe profile` measured its operators and tasks for {seconds:g} s, for two ranks
(`--ranks 2`) with messages: what their ends take comes from a run of the model in two stages of 8 micro-batches.
`plan --costs` predicted the step from that, and the generated program was launched {launches} times right afterwards:
the median of {steps} steps each, and of the launches the middle one. Two ranks have a stage each (`pipedream`, no
replicas), under 1F1B and under the searched schedule.

{layouts}

All of that was done in {rounds} rounds over the models. Of each row, the round whose prediction is off by the median is
here, with how far it was off in all of them.

| model | layout | predicted | measured | off | of all rounds | launches | nodes measured |
|---|---|---:|---:|---:|---|---|---|
{rows}
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One model in one layout, in one round."""

    model: str
    layout: str
    predicted_s: float
    launches_s: tuple[float, ...]
    """Medians of steps."""
    nodes: tuple[int, int]
    """Measured, and judged by the roofline."""
    processor: str
    cores: int
    time: str
    """When it had run: the day and the minute, UTC."""

    @property
    def measured_s(self) -> float:
        """Of the launch in the middle: the same program is faster in one process than in
        another.
        """
        return statistics.median(self.launches_s)

    @property
    def off(self) -> float:
        """How far the prediction is off, as a share of what was measured."""
        return self.predicted_s / self.measured_s - 1

    @classmethod
    def parse(cls, line: str) -> Row:
        """That of a line of the log."""
        found = json.loads(line)
        return cls(
            **{
                name: tuple(value) if isinstance(value, list) else value
                for name, value in found.items()
            }
        )

    def line(self, others: str) -> str:
        """A row of the table; `others` says how far predictions were off in all rounds."""
        known, judged = self.nodes
        times = (
            f"{self.predicted_s * 1e3:.1f} ms | {self.measured_s * 1e3:.1f} ms | {self.off:+.1%} | "
            f"{others}"
        )
        launches = f"{1e3 * min(self.launches_s):.1f} to {1e3 * max(self.launches_s):.1f} ms"
        return (
            f"| {self.model} | {self.layout} | {times} | {launches} | {known} of {known + judged} |"
        )


@dataclass(frozen=True, slots=True)
class Rounds:
    """One model in one layout, in all rounds."""

    rows: Sequence[Row]

    @property
    def middle(self) -> Row:
        """The round whose prediction is off by the median; of an even number, by the lower of the
        two.
        """
        return sorted(self.rows, key=lambda row: row.off)[(len(self.rows) - 1) // 2]

    def line(self) -> str:
        """A row of the table."""
        offs = [row.off for row in self.rows]
        return self.middle.line(f"{min(offs):+.0%} to {max(offs):+.0%}")


def rows_of(model: Path, ranks: int, arguments: argparse.Namespace, folder: Path) -> list[Row]:
    """Profile a model, and predict and run it on a number of ranks."""
    name = model.stem
    folder.mkdir(exist_ok=True)
    costs = folder / f"{name}.costs"
    batch = (
        "--batch-size",
        arguments.size * arguments.micro_batches,
        "--micro-batches",
        arguments.micro_batches,
    )
    sizes = (
        "--micro-batch-sizes",
        arguments.size,
        "--degrees",
        "",
        "--device",
        "cpu",
        "--seconds",
        arguments.seconds,
    )
    others = ("--ranks", ranks) if ranks > 1 else ()
    _run("profile", model, *sizes, *others, "-o", costs)
    cluster = ("--gpus", ranks, "--cluster", "cpu-local", "--costs", costs)
    plans = {
        layout: folder / f"{name}.{ranks}.{number}.plan"
        for number, layout in enumerate(LAYOUTS[ranks])
    }
    summaries: dict[str, dict[str, Any]] = {}
    for layout, plan in plans.items():
        options = LAYOUTS[ranks][layout]
        summaries[layout] = _run("plan", model, *cluster, *batch, *options, "-o", plan)["summary"]
        _run("codegen", plan)
    launches: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(arguments.launches):
        for layout, plan in plans.items():
            launches[layout].append(_step_seconds(plan / "program", arguments.steps))
    where = (
        json.loads(costs.read_text())["devices"][0]["device"],
        os.cpu_count() or 1,
        f"{_now():%Y-%m-%d %H:%M}",
    )
    return [
        Row(
            name,
            layout,
            summary["step_time_s"],
            tuple(launches[layout]),
            tuple(summary["costs"].values()),
            *where,
        )
        for layout, summary in summaries.items()
    ]


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _step_seconds(program: Path, steps: int) -> float:
    """The median step of a launch. One step's samples are drawn before: that is no part of a
    step.
    """
    data = program / "samples.npz"
    if not data.exists():
        save_samples(read_manifest(program), data)
    words = ("--steps", steps + WARM_UP, "--device", "cpu", "--data", data)
    reports = _run("launch", program, *words)["steps"]
    return statistics.median(float(each["step_time_s"]) for each in reports[WARM_UP:])


def _run(*words: object) -> dict[str, Any]:
    """What a command of autopipe says at its end."""
    found: dict[str, Any] = json.loads(autopipe(*words, "--json").splitlines()[-1])
    return found


def page(rows: Sequence[Row], arguments: argparse.Namespace) -> str:
    """The documentation's page."""
    grouped: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row.model, row.layout].append(row)
    found = [Rounds(each) for each in grouped.values()]
    return TEXT.format(
        first=min(row.time for row in rows),
        last=max(row.time for row in rows),
        cores=rows[0].cores,
        processor=rows[0].processor,
        micro_batches=arguments.micro_batches,
        size=arguments.size,
        seconds=arguments.seconds,
        launches=arguments.launches,
        steps=arguments.steps,
        layouts="\n".join(
            _layout_line(layout, found) for layouts in LAYOUTS.values() for layout in layouts
        ),
        rounds=len(found[0].rows),
        rows="\n".join(each.line() for each in found),
    )


def _layout_line(layout: str, found: Sequence[Rounds]) -> str:
    offs = [each.middle.off for each in found if each.middle.layout == layout]
    within = sum(abs(off) <= 0.15 for off in offs)
    spread = f"the median {statistics.median(offs):+.0%}, from {min(offs):+.0%} to {max(offs):+.0%}"
    return f"- {layout}: {within} of {len(offs)} within 15%, {spread}"


def main() -> None:
    """Measure and print, model by model; write the page where asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--log", type=Path, required=True, metavar="FILE", help="a JSON object a line"
    )
    parser.add_argument(
        "--only", action="append", metavar="MODEL", choices=sorted(MODELS), help="repeatable"
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="the page of all that the log has"
    )
    for name, default in (("size", 4), ("micro-batches", 4), ("steps", 16), ("launches", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="of profiling, a model and a number of ranks"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="to be run now over all models; 0: write the page alone",
    )
    arguments = parse_arguments(
        parser, only=["dlrm"], micro_batches=2, size=1, steps=1, launches=1, rounds=1, seconds=0.1
    )
    _measure(arguments)
    text = page([Row.parse(line) for line in arguments.log.read_text().splitlines()], arguments)
    if arguments.write is not None:
        arguments.write.write_text(text, encoding="utf-8")
    print(text)


def _measure(arguments: argparse.Namespace) -> None:
    names = arguments.only or sorted(MODELS)
    with tempfile.TemporaryDirectory() as scratch, arguments.log.open("a") as log:
        folder = Path(scratch)
        for name in names:
            _run(
                "zoo",
                "build",
                name,
                "-o",
                folder / f"{name}.onnx",
                "--set",
                "loss=true",
                "--set",
                "weights=random",
            )
        for turn, name, ranks in itertools.product(range(arguments.rounds), names, LAYOUTS):
            for row in rows_of(folder / f"{name}.onnx", ranks, arguments, folder / f"{turn}"):
                print(json.dumps(asdict(row)), file=log, flush=True)
                print(row.line(f"round {turn + 1}"), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
