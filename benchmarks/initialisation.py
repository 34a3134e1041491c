"""Rates at which this machine draws random numbers, and whether its GPU draws the bits of its CPU.

Blocks of a large matrix: all of it, an eighth of its rows and an eighth of its columns. A line
gives normal numbers per second of processor time and of elapsed time, each the best of several
rounds. Elapsed time is meaningful on an idle machine only.

    python benchmarks/initialisation.py --threads 1 2
"""

from __future__ import annotations

import argparse
import time

import torch
from command_line import parse_arguments

from autopipe.backends.torch.random_comparison import compare_random_numbers
from autopipe.backends.torch.runtime.host import keep_freed_memory
from autopipe.backends.torch.runtime.state.parameters import init_shard
from autopipe.ir.graph import DType, Initializer, Parameter, Value
from autopipe.ir.layout import TensorSlice


def main() -> None:
    """Print a line for each block and number of threads, and on a machine with a GPU its rates and
    the comparison.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", type=int, default=8192, help="of the matrix")
    arguments = parse_arguments(parser, side=64, threads=[1], rounds=1)
    keep_freed_memory()  # as ranks do
    side = arguments.side
    blocks = {
        "all": TensorSlice((0, 0), (side, side)),
        "an eighth of the rows": TensorSlice((side // 8, 0), (side // 4, side)),
        "an eighth of the columns": TensorSlice((0, side // 8), (side, side // 4)),
    }
    weight = Parameter(Value("w", DType.FLOAT32, (side, side)), Initializer("normal", 0.02))
    for name, box in blocks.items():
        for threads in arguments.threads:
            _print_rates(
                f"{name}, {threads} threads",
                weight,
                box,
                threads,
                torch.device("cpu"),
                arguments.rounds,
            )
        if torch.cuda.is_available():
            _print_rates(f"{name}, GPU", weight, box, 1, torch.device("cuda"), arguments.rounds)
    if torch.cuda.is_available():
        for name, equal in compare_random_numbers(torch.device("cuda"), compiled=True).items():
            print(f"{name:40} {'equal' if equal else 'DIFFERENT'}")


def _print_rates(
    name: str, weight: Parameter, box: TensorSlice, threads: int, device: torch.device, rounds: int
) -> None:
    cpu = []
    elapsed = []
    for _ in range(rounds):
        began = time.process_time(), time.perf_counter()
        init_shard(weight, box, 0, threads, device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        cpu.append(time.process_time() - began[0])
        elapsed.append(time.perf_counter() - began[1])
    elements = box.shape[0] * box.shape[1]
    rate_cpu = elements / min(cpu) / 1e6
    rate = elements / min(elapsed) / 1e6
    print(f"{name:40} {rate_cpu:8.1f} million/s of processor time  {rate:8.1f} million/s elapsed")


if __name__ == "__main__":
    main()
