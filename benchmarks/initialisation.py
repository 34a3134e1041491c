"""Drawing blocks of a large matrix: all of it, an eighth of its rows or columns, by one thread and by more.

The figures are the least of several rounds: processor time, and time on the clock, which tells something on an idle
machine alone.

    python benchmarks/initialisation.py --threads 1 2
"""

from __future__ import annotations

import argparse
import time

from command_line import parse_arguments

from autopipe.backends.torch.runtime.parameters import init_shard
from autopipe.ir.graph import DType, Initializer, Parameter, Value
from autopipe.ir.layout import Box


def main() -> None:
    """Print a line for each block and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", type=int, default=8192, help="of the matrix")
    arguments = parse_arguments(parser, side=64, threads=[1], rounds=1)
    side = arguments.side
    blocks = {
        "all": ((0, 0), (side, side)),
        "an eighth of the rows": ((side // 8, 0), (side // 4, side)),
        "an eighth of the columns": ((0, side // 8), (side, side // 4)),
    }
    weight = Parameter(Value("w", DType.FLOAT32, (side, side)), Initializer("normal", 0.02))
    for name, (starts, stops) in blocks.items():
        for threads in arguments.threads:
            cpu, clock = [], []
            for _ in range(arguments.rounds):
                began = time.process_time(), time.perf_counter()
                init_shard(weight, Box(starts, stops), 0, threads)
                cpu.append(time.process_time() - began[0])
                clock.append(time.perf_counter() - began[1])
            print(f"{name:25} {threads} threads  {min(cpu):.3f} s processor time  {min(clock):.3f} s on the clock")


if __name__ == "__main__":
    main()
