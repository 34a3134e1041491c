"""Steps of several generated programs, timed in turns in the same processes.

Machines are noisy: what is compared runs interleaved, and ratios of medians on rank 0 are the
figures. Other benchmarks build the programs and call `compare`.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Contestant:
    """A program and the options of its ranks."""

    name: str
    program: Path
    options: tuple[str, ...] = ()


def compare(contestants: Sequence[Contestant], ranks: int, rounds: int) -> dict[str, float]:
    """Median seconds of a step by contestant."""
    words = [json.dumps([each.name, str(each.program), *each.options]) for each in contestants]
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*start, __file__, "--rounds", str(rounds), *words],
        check=True,
        stdout=subprocess.PIPE,
        env=environment,
    )
    found: dict[str, float] = json.loads(done.stdout.decode().strip().splitlines()[-1])
    return found


def _load(program: Path, options: Sequence[str], number: int) -> Callable[[], None]:
    """A step of one program on this rank, set up."""
    for name in [name for name in sys.modules if name.startswith("stage_")]:
        del sys.modules[name]  # Programs have files of the same names.
    sys.path.insert(0, str(program))
    sys.argv = [f"rank_{number:03d}.py", "--device", "cpu", *options]
    names = runpy.run_path(str(program / f"rank_{number:03d}.py"))
    sys.path.remove(str(program))
    rank = names["rank"]
    step = names["step"]
    rank.set_up()
    return lambda: rank.run(step)


def _worker(contestants: Sequence[Sequence[str]], rounds: int) -> None:
    """Run all programs in turns on this rank; rank 0 prints the medians."""
    number = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps = {name: _load(Path(program), options, number) for name, program, *options in contestants}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + _WARM_UP):
        for name in sorted(steps, reverse=bool(turn % 2)):
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            dist.barrier()
            if turn >= _WARM_UP:
                times[name].append(time.perf_counter() - start)
    if number == 0:
        print(
            json.dumps({name: statistics.median(each) for name, each in times.items()}), flush=True
        )
    dist.barrier()
    os._exit(0)


def main() -> None:
    """The worker's own command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("contestants", nargs="+", type=json.loads)
    arguments = parser.parse_args()
    _worker(arguments.contestants, arguments.rounds)


if __name__ == "__main__":
    main()
