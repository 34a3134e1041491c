"""A step of many micro-batches on many devices: how long its search and its simulation take.

A chain of equal stages, one a device, in training with split backwards. Processor time, the best of
`--rounds`.

    python benchmarks/many_micro_batches.py --devices 32 --micro-batches 512
"""

from __future__ import annotations

import argparse
import json
import time

from command_line import parse_arguments

from autopipe.ir.schedule import StageGraph
from autopipe.ir.timeline import Message, Prediction, StagePrediction
from autopipe.passes.schedule.simulate import simulate
from autopipe.passes.schedule.tessel.model import SearchOptions
from autopipe.passes.schedule.tessel.search import search
from autopipe.passes.schedule.tessel.stage_blocks import (
    busiest_seconds,
    stage_blocks,
    stage_schedule,
)


def measure(devices: int, micro_batches: int, rounds: int) -> dict[str, float]:
    """Seconds and sizes."""
    edges = tuple((stage, stage + 1) for stage in range(devices - 1))
    graph = StageGraph(devices, tuple((stage,) for stage in range(devices)), edges)
    sent = tuple(
        Message(source, target, source, target, 1, 1, 0.01, 0.01) for source, target in edges
    )
    prediction = Prediction((StagePrediction(1.0, 2.0, 1.0, 1.0, kept_bytes=1),) * devices, sent)
    start = time.perf_counter()
    blocks = stage_blocks(
        graph, prediction, True, busiest_seconds(graph, prediction) / 1000, split=True
    )
    found = search(blocks.graph, micro_batches, SearchOptions(2.0))
    searched = time.perf_counter() - start
    schedule = stage_schedule(blocks, found, graph, micro_batches)
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        step = simulate(schedule, graph.stage_devices, prediction)
        seconds.append(time.process_time() - start)
    return {
        "search_s": searched,
        "simulate_s": min(seconds),
        "tasks": len(step.spans),
        "step": step.end,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("devices", 32), ("micro-batches", 512), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parse_arguments(parser, devices=4, micro_batches=8, rounds=1)
    print(json.dumps(measure(arguments.devices, arguments.micro_batches, arguments.rounds)))


if __name__ == "__main__":
    main()
