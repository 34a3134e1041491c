"""Duration of the schedule search on the five shapes: seconds until the period is proven, and until
the complete schedule is found.

    python benchmarks/tessel_search.py --devices 4 8 16 32 --micro-batches 64

A forward takes 1 and a backward 3, and devices have the memory that 1F1B would use. `period` is the
time for the minimum period with its proof. `all` includes the minimum latency of a micro-batch, the
minimum memory, warm-up, cool-down and the check. Imports are not counted. Seconds are those of the
clock; CPU seconds are in parentheses.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TypeVar

from command_line import parse_arguments
from ortools.sat.python import cp_model  # noqa: F401 - imported before anything is timed

from autopipe.ir.block_schedule import BlockGraph
from autopipe.passes.schedule.published.blocks import SHAPES, shape_blocks
from autopipe.passes.schedule.tessel.model import Budget, SearchOptions
from autopipe.passes.schedule.tessel.search import search, shortest_steady_state

Result = TypeVar("Result")
MEMORY = {"v": 4, "x": 4, "m": 6, "nn": 6, "k": 6}
"""Memory limit on 4 devices; proportional to the number of devices otherwise."""
COLUMNS = "{:>7}  {:<5} {:>15}  {:>15}  {:>6} {:>6} {:>7}  {:>8} {:>7}"


def timed(function: Callable[[], Result]) -> tuple[Result, str]:
    """Return the result, and the seconds that it took."""
    clock = time.perf_counter()
    processor = time.process_time()
    result = function()
    return result, f"{time.perf_counter() - clock:.2f} ({time.process_time() - processor:.2f})"


def row(graph: BlockGraph, micro_batches: int, options: SearchOptions) -> tuple[object, ...]:
    """Return the seconds for the period and for all, and the properties of the schedule."""
    (steady, bound), period_s = timed(
        lambda: shortest_steady_state(graph, micro_batches, Budget(options))
    )
    schedule, all_s = timed(lambda: search(graph, micro_batches, options))
    proven = "yes" if steady.period == bound else "no"
    return (
        period_s,
        all_s,
        steady.period,
        bound,
        proven,
        schedule.makespan,
        max(schedule.peak_memory),
    )


def main() -> None:
    """Print a line for each shape and number of devices."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[64])
    parser.add_argument("--time-limit", type=float, default=10.0)
    arguments = parse_arguments(parser, devices=[4], micro_batches=[8], time_limit=1.0)
    print(
        COLUMNS.format(
            "devices",
            "shape",
            "period s",
            "all s",
            "period",
            "bound",
            "proven",
            "makespan",
            "memory",
        )
    )
    for devices in arguments.devices:
        for name in SHAPES:
            graph = shape_blocks(name, devices, True, MEMORY[name] * devices // 4)
            for micro_batches in arguments.micro_batches:
                cells = row(graph, micro_batches, SearchOptions(arguments.time_limit))
                print(COLUMNS.format(devices, name, *cells), flush=True)


if __name__ == "__main__":
    main()
