"""Compare the two forms of generated code: one function per class of repeated layers, and one
statement per operator (`codegen --style flat`).

For each model and number of ranks, this script prints the ratio (layers / flat) of the peak memory
of the ranks, and the quartiles of the ratios of step times. The programs of both forms are launched
in turns. With `--compile`, it prints the processor seconds of a launch that compiles.

OMP_NUM_THREADS=1 python benchmarks/code_forms.py
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from command_line import autopipe, parse_arguments

from autopipe.api.plan_folder import open_prediction
from tests.distributed.support.allocations import peak_of_rank

FORMS = ("flat", "layers")
SKIPPED_STEPS = 2
"""Number of first steps of a launch whose times do not count."""


def write_programs(folder: Path, model: str, sizes: list[str], ranks: int, mode: str) -> Path:
    """Plan a model and write its program in both forms. Return the folder of the plan."""
    file = folder / f"{model}.onnx"
    if not file.exists():
        settings = [word for size in (*sizes, "loss=true") for word in ("--set", size)]
        autopipe("zoo", "build", model, "-o", file, *settings)
    plan = folder / f"{model}-{ranks}-{mode}"
    options = ("--strategy", "pipedream", "--schedule", "1f1b" if mode == "train" else "kfkb")
    batch = ("--batch-size", 8, "--micro-batches", 4, "--mode", mode)
    autopipe("plan", file, "--gpus", ranks, "--cluster", "cpu-local", *batch, *options, "-o", plan)
    for form in FORMS:
        autopipe("codegen", plan, "--style", form, "-o", plan / form)
    return plan


def print_memory(plan: Path) -> None:
    """Print the ratio of the peak memory of each rank."""
    ranks = len(open_prediction(plan)[1].peak_memory)
    ratios = []
    for rank in range(ranks):
        flat, layered = (peak_of_rank(plan / form, rank) for form in FORMS)
        ratios.append(f"{layered / flat:.4f}")
    print(f"{plan.name} peak memory: {' '.join(ratios)}", flush=True)


def launch(program: Path, steps: int, *options: str) -> tuple[float, float]:
    """Run a program. Return (median step time, processor time of all processes), in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "autopipe", "launch", str(program), "--device", "cpu"]
    command += ["--steps", str(steps), "--json", *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(done.stdout.splitlines()[-1])["steps"]
    times = [each["step_time_s"] for each in found[SKIPPED_STEPS:]]
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return statistics.median(times), used


def print_step_times(plan: Path, steps: int, rounds: int) -> None:
    """Print the quartiles of the ratios of step times."""
    ratios = []
    for number in range(rounds):
        seconds = {}
        for form in FORMS if number % 2 else reversed(FORMS):
            seconds[form], _ = launch(plan / form, steps)
        ratios.append(seconds["layers"] / seconds["flat"])
    quartiles = " ".join(f"{each:.3f}" for each in statistics.quantiles(ratios, n=4))
    print(f"{plan.name} step time, {rounds} rounds: {quartiles}", flush=True)


def print_compile_times(plan: Path, steps: int) -> None:
    """Print the processor time of a launch with an empty cache of compiled kernels, per form."""
    for form in FORMS:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
            _, used = launch(plan / form, steps, "--compile")
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        print(f"{plan.name} {form} compiled: {used:.1f} s", flush=True)


def main() -> None:
    """Write and compare the programs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["gpt", "llama"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--compile", action="store_true", help="also compile, on one rank")
    given = parse_arguments(
        parser, models=["gpt"], layers=2, hidden=16, ranks=[1], steps=4, rounds=2
    )
    sizes = [f"layers={given.layers}", f"hidden={given.hidden}", "heads=4", "sequence=64"]
    sizes.append("vocabulary=1000")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for model in given.models:
            for ranks in given.ranks:
                print_memory(write_programs(folder, model, sizes, ranks, "infer"))
                plan = write_programs(folder, model, sizes, ranks, "train")
                print_memory(plan)
                print_step_times(plan, given.steps, given.rounds)
                if given.compile and ranks == 1:
                    print_compile_times(plan, given.steps)


if __name__ == "__main__":
    main()
