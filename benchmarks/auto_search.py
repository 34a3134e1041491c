"""How long `autopipe plan` takes to choose: the first plan, the last, and all of it again from the
cache.

    python benchmarks/auto_search.py
    python benchmarks/auto_search.py --cases 7b 7b-plain

Seconds are those of the whole command, from its start on, on an idle machine; processor seconds are
those of all its processes. Python has compiled its modules before, as it has where autopipe is
installed. What is asked for: a first plan within 1 s, and the last one within 30 s for 7B on 8
devices and 60 s for 175B on 512; a second run in a tenth of that.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from command_line import parse_arguments

from autopipe.configs.zoo import build, configure

_7B = {"size": "7b", "sequence": "2048"}
_175B = {"size": "175b", "sequence": "2048"}
_SMALL = {"layers": "2", "hidden": "64", "heads": "4", "sequence": "32", "vocabulary": "512"}
_TRAINED = ("--set", "precision=bf16", "--set", "optimizer.name=adamw")

CASES = {
    "small": ("gpt", _SMALL, ("--gpus", "1", "--batch-size", "4")),
    "7b": (
        "llama",
        _7B,
        ("--gpus", "8", "--cluster", "a100-80gb", "--batch-size", "64", *_TRAINED),
    ),
    "7b-plain": ("llama", _7B, ("--gpus", "8", "--cluster", "a100-80gb", "--batch-size", "64")),
    "175b-h100": (
        "gpt",
        _175B,
        ("--gpus", "512", "--cluster", "h100-80gb", "--batch-size", "1536", *_TRAINED),
    ),
    "175b-a100": (
        "gpt",
        _175B,
        ("--gpus", "512", "--cluster", "a100-80gb", "--batch-size", "1536", *_TRAINED),
    ),
    "175b-plain": (
        "gpt",
        _175B,
        ("--gpus", "512", "--cluster", "h100-80gb", "--batch-size", "1536"),
    ),
}


def main() -> None:
    """Run the cases that are asked for, each with a cache of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", choices=sorted(CASES), default=list(CASES)[1:])
    arguments = parse_arguments(parser, cases=["small"])
    print(
        f"{'case':12s} {'first plan':>10s} {'last':>8s} {'cpu':>8s} {'again':>8s} {'cpu':>8s}  plan"
    )
    with tempfile.TemporaryDirectory() as folder:
        _planned(
            _built("gpt", _SMALL, Path(folder) / "small.onnx"),
            ("--gpus", "1" if arguments.tiny else "2"),
            Path(folder),
        )
        for case in arguments.cases:
            _run(case, Path(folder))


def _run(case: str, folder: Path) -> None:
    name, sizes, flags = CASES[case]
    model = _built(name, sizes, folder / f"{case}.onnx")
    first, last, cpu, plan = _planned(model, flags, folder)
    _, again, again_cpu, same = _planned(model, flags, folder)
    assert plan == same, f"{plan} is not {same}"
    print(
        (
            f"{case:12s} {first:8.2f} s {last:6.1f} s {cpu:6.1f} s {again:6.2f} s {again_cpu:6.2f} "
            f"s  {plan}"
        ),
        flush=True,
    )


def _built(name: str, sizes: Mapping[str, str], path: Path) -> Path:
    build(configure(name, {"loss": "true", "weights": "none", **sizes})).save(path)
    return path


def _planned(model: Path, flags: tuple[str, ...], folder: Path) -> tuple[float, float, float, str]:
    """Seconds to the first plan and to the end, processor seconds, and the line that says what was
    chosen.
    """
    command = [
        sys.executable,
        "-m",
        "autopipe",
        "plan",
        str(model),
        *flags,
        "-v",
        "-o",
        str(folder / "plan"),
    ]
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "compiled")}
    environment = {**os.environ, **compiled, "AUTOPIPE_CACHE": str(folder / "cache")}
    before = _children_s()
    start = time.perf_counter()
    first = math.nan
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        for line in process.stderr:
            if line.startswith("best so far") and math.isnan(first):
                first = time.perf_counter() - start
        shown = process.stdout.read().splitlines()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return (
        first,
        time.perf_counter() - start,
        _children_s() - before,
        next((line for line in shown if line), ""),
    )


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
