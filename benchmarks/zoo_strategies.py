"""GraphPipe against PipeDream and Piper on every model of the zoo, small, in the simulator: samples
a second.

    python -m benchmarks.zoo_strategies
    python -m benchmarks.zoo_strategies --only mt5 --as-graphs

Others' placements run as sequential pipelines, or with `--as-graphs` like GraphPipe's, where a
stage waits for what it reads alone. Training, on 4 and 8 V100 of Summit, 32 samples a step,
micro-batches as each strategy chooses them.
"""

from __future__ import annotations

import argparse

from autopipe.configs.zoo import MODELS
from benchmarks.command_line import parse_arguments
from benchmarks.graphpipe import (
    AS_PUBLISHED,
    graph_step,
    problem_of,
    search_result,
    sequential_step,
)

SAMPLES = 32
STRATEGIES = ("graphpipe", "pipedream", "pipedream" + AS_PUBLISHED, "piper")


def throughput(strategy: str, model: str, devices: int, as_graph: bool) -> float | None:
    """Samples a second of a strategy's placement; None where it has none."""
    placement = search_result(strategy, model, devices, SAMPLES, ()).placement
    if placement is None:
        return None
    step = graph_step if as_graph or strategy == "graphpipe" else sequential_step
    return step(problem_of(model, devices, SAMPLES, ()), placement).throughput


def main() -> None:
    """Print a row a model and number of devices."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", metavar="MODEL", choices=sorted(MODELS), help="repeatable"
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--as-graphs", action="store_true")
    arguments = parse_arguments(parser, only=["two-branch"], devices=[4])
    print(f"| model | devices | {' | '.join(STRATEGIES)} | gain |")
    print(f"|{'---|' * (3 + len(STRATEGIES))}")
    for model in arguments.only or sorted(MODELS):
        for devices in arguments.devices:
            found = [throughput(each, model, devices, arguments.as_graphs) for each in STRATEGIES]
            ours = found[0] or 0.0
            best = max(each for each in found[1:] if each is not None)
            cells = ("refused" if each is None else f"{each:,.0f}" for each in found)
            print(f"| {model} | {devices} | {' | '.join(cells)} | {ours / best:.2f} |", flush=True)


if __name__ == "__main__":
    main()
