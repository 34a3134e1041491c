"""Peak memory that plans predict against what their ranks allocate: two stages on two ranks, run
dry on the CPU.

OMP_NUM_THREADS=1 python benchmarks/memory.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from command_line import autopipe, parse_arguments

from autopipe.api.plan_folder import open_prediction
from tests.distributed.support.allocations import peak_of_rank

MODELS = {
    "gpt": ("layers=4", "hidden=128", "heads=4", "sequence=128", "vocabulary=512"),
    "unet": ("width=8", "image=64"),
}
RUNS = (("1f1b", "none"), ("1f1b", "full"), ("gpipe", "none"), ("kfkb", "none"))
"""Schedules, and whether stages recompute."""
BATCH = ("--batch-size", "16", "--micro-batches", "8")


def rows(folder: Path, models: Sequence[str], schedules: Sequence[str]) -> None:
    """Print a line a rank: predicted and allocated bytes, and their ratio."""
    for name in models:
        sizes = MODELS[name]
        model = folder / f"{name}.onnx"
        autopipe(
            "zoo",
            "build",
            name,
            "-o",
            model,
            *(word for size in (*sizes, "loss=true") for word in ("--set", size)),
        )
        for schedule, recompute in RUNS:
            if schedule not in schedules:
                continue
            plan = folder / f"{name}-{schedule}-{recompute}"
            settings = (
                "strategy.replicate=false",
                "optimizer.name=adamw",
                f"recompute={recompute}",
            )
            options = (
                "--strategy",
                "pipedream",
                "--schedule",
                schedule,
                *(w for s in settings for w in ("--set", s)),
            )
            autopipe(
                "plan", model, "--gpus", 2, "--cluster", "cpu-local", *BATCH, *options, "-o", plan
            )
            autopipe("codegen", plan)
            _, timeline = open_prediction(plan)
            for rank, predicted in enumerate(timeline.peak_memory):
                # A process of its own, so that nothing of another rank is counted.
                command = [
                    sys.executable,
                    __file__,
                    "--program",
                    str(plan / "program"),
                    "--rank",
                    str(rank),
                ]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found = int(done.stdout.split()[-1])
                what = f"{name} {schedule}, recompute {recompute}, rank {rank}"
                print(
                    f"{what}: {predicted:,} predicted, {found:,} allocated, {found / predicted:.3f}"
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "gpipe", "kfkb"])
    given = parse_arguments(parser, models=["gpt"], schedules=["gpipe"])
    if given.program is not None:
        print(peak_of_rank(given.program, given.rank))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            rows(Path(scratch), given.models, given.schedules)
