"""How long plans, programs and dry runs for up to 4096 devices take, in processor seconds, and that
they fit together.

    python benchmarks/scale.py [--case NUMBER] [FOLDER]

Models are written into FOLDER (default: a temporary one) without weights. Of each plan at most four
ranks are dry-run on device `meta`: the first ones of the first, second and middle stage, and the
last of the last stage. Their tasks have to be those of the plan, in order, and what the first two
send to one another has to be the same at both ends.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from command_line import autopipe, parse_arguments

from autopipe.api.plan_folder import open_prediction
from autopipe.ir.plan import Plan


class Case(NamedTuple):
    """A plan that is made. `batch` is in samples a step."""

    model: str
    size: str
    cluster: str
    devices: int
    batch: int
    settings: tuple[str, ...] = ()
    """Of the model, besides its size."""
    stages: int | None = None
    """As many as are fastest where there is none."""


CASES = (
    Case("llama", "7b", "h100-80gb", 8, 64),
    Case("llama", "70b", "h100-superpod", 64, 256),
    Case("llama", "70b", "h100-superpod", 512, 512),
    Case("llama", "70b", "h100-superpod", 4096, 4096),
    Case("gpt", "175b", "h100-superpod", 64, 256),
    Case("gpt", "175b", "h100-superpod", 512, 1536),
    Case("gpt", "175b", "h100-superpod", 4096, 4096),
)
TINY = Case("gpt", "125m", "1080ti-pcie", 4, 8, ("layers=2", "vocabulary=512"), stages=2)


def processor() -> float:
    """Seconds of the processor that this process and those that it waited for have taken."""
    return sum(os.times()[:4])


def run(*words: object) -> tuple[str, float]:
    """What a command prints, and its processor seconds."""
    begin = processor()
    return autopipe(*words), processor() - begin


def measure(folder: Path, case: Case) -> None:
    """Print the line of the plan, and those of its ranks."""
    file = folder / f"{case.model}-{case.size}.onnx"
    folder = folder / f"{case.model}-{case.size}-{case.devices}"
    if not file.exists():
        sizes = (f"size={case.size}", *case.settings, "weights=none", "loss=true")
        run(
            "zoo",
            "build",
            case.model,
            "-o",
            file,
            *(word for each in sizes for word in ("--set", each)),
        )
    flags = ["--cluster", case.cluster, "--gpus", case.devices, "--batch-size", case.batch]
    choices = [
        "--set",
        "recompute=auto",
        "--set",
        "precision=bf16",
        "--set",
        "optimizer.name=adamw",
    ]
    if case.stages:
        choices += ["--set", f"strategy.pipeline={case.stages}"]
    _, planning = run(
        "plan", file, *flags, "--strategy", "grid", "--schedule", "1f1b", *choices, "-o", folder
    )
    _, showing = run("show", folder)
    plan, _ = open_prediction(folder)
    ranks = ranks_of(plan)
    _, writing = run("codegen", folder, "--ranks", ",".join(map(str, ranks)))
    name = f"{case.model} {case.size}"
    print(
        (
            f"| {name} | {case.devices} | {case.batch} | {planning:.1f} | {showing:.1f} | "
            f"{writing:.1f} |"
        ),
        flush=True,
    )
    reports = [rehearse(folder, plan, rank) for rank in ranks]
    check_messages(reports[0], reports[1])


def ranks_of(plan: Plan) -> list[int]:
    """The ranks that are dry-run."""
    stages = plan.placement.stages
    found = [
        *(stages[number].devices[0] for number in (0, 1, len(stages) // 2)),
        stages[-1].devices[-1],
    ]
    return list(dict.fromkeys(found))


def rehearse(folder: Path, plan: Plan, rank: int) -> dict[str, Any]:
    """Dry-run a rank, print its line, and return its report. Raises AssertionError where it does
    other tasks.
    """
    text, seconds = run(
        "launch", folder / "program", "--dry-run", "--device", "meta", "--rank", rank, "--json"
    )
    report: dict[str, Any] = json.loads(text)
    assert report["tasks"] == [str(task) for task in plan.schedule.tasks[rank]]
    predicted = plan.summary.peak_memory_bytes[rank]
    counted = report["peak_memory_bytes"]
    print(
        f"| {rank} of {report['world_size']} | {', '.join(map(str, report['stages']))} | "
        f"{len(report['tasks'])} | "
        f"{gib(report['parameter_bytes'])} | {gib(counted)} ({gib(predicted)}) | {seconds:.0f} |",
        flush=True,
    )
    return report


def gib(size: int) -> str:
    """Bytes for a table."""
    return f"{size / 2**30:.1f} GiB"


def check_messages(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Raises AssertionError where two ranks have not the same messages for one another, or none."""
    pair = {one["rank"], other["rank"]}
    ends = [
        {
            json.dumps(each)
            for each in report["messages"]
            if {each["source"], each["target"]} == pair
        }
        for report in (one, other)
    ]
    assert ends[0] == ends[1] and ends[0], ends


def measure_all(folder: Path, cases: tuple[Case, ...]) -> None:
    """Print each plan's line (model, devices, samples; seconds of plan, show, codegen), and behind
    it those of ranks (rank, stages, tasks, parameters, peak memory counted and predicted, seconds).
    """
    for case in cases:
        measure(folder, case)
    taken = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"no dry run took more than {taken:.2f} GiB of memory")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", type=int, choices=range(len(CASES)))
    parser.add_argument("folder", type=Path, nargs="?")
    asked = parse_arguments(parser)
    chosen = (
        (TINY,)
        if asked.tiny
        else CASES
        if asked.case is None
        else CASES[asked.case : asked.case + 1]
    )
    if asked.folder is not None:
        measure_all(asked.folder, chosen)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            measure_all(Path(scratch), chosen)
