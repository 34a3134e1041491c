"""Partition into stages by integer program, compared with the best contiguous partition, on models
of the zoo.

    python benchmarks/tepdist_division.py --models gpt-175b flava --output division.csv

Operators are those of the file, without fusion. `seconds` is CPU time without reading the model;
`wall` is elapsed time. Bytes are those of a micro-batch of one sample, forward and backward.
`bound` is the lower bound on the bytes of all partitions of the groups. If no partition satisfies
the tolerance, the smallest one that has a partition is used.
"""

from __future__ import annotations

import argparse
import csv
import re
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from command_line import parse_arguments

from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.configs.zoo import build, configure
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.problem import Problem
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.frontend import read, read_model
from autopipe.passes.partition.min_cut_ilp import partition_nodes

MODELS = {
    "gpt-175b": ("gpt", {"size": "175b"}, (8, 16, 64)),
    # Deep enough for ten thousand operators.
    "gpt-350-layers": ("gpt", {"size": "175b", "layers": "350"}, (8, 16, 64)),
    "two-branch": ("two-branch", {}, (2, 4, 8)),
    "mmt": ("mmt", {"size": "paper"}, (2, 4, 8)),
    "flava": ("flava", {"size": "base"}, (2, 4, 8)),
    "mt5": ("mt5", {}, (2, 4, 8)),
    "inceptionv3": ("inceptionv3", {}, (2, 4, 8)),
    "unet": ("unet", {}, (2, 4, 8)),
}
HEADER = (
    "model",
    "operators",
    "groups",
    "stages",
    "unbalance",
    "seconds",
    "wall",
    "bytes",
    "line",
    "bound",
    "largest",
)


def problem_of(name: str, settings: dict[str, str]) -> Problem:
    """Return the training of a model with one sample per micro-batch, without fusion."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(read, "fuse_operators", lambda graph: graph),
    ):
        path = Path(folder) / "model.onnx"
        build(configure(name, {**settings, "loss": "true", "weights": "none"})).save(path)
        model = read_model(path, batch=1)
    links = build_cluster(cluster_preset("v100-32gb"), 64, None, None)
    return Problem(model.graph, roofline_costs(model.graph), links, 1, 1, model.mode, model.loss)


def processor_seconds() -> float:
    """Return the CPU seconds of this process and of the solvers that it started."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def rows(name: str, unbalance: float, time_limit: float) -> Iterator[tuple[object, ...]]:
    """Yield one row per number of stages."""
    kind, settings, counts = MODELS[name]
    problem = problem_of(kind, settings)
    for stages in counts:
        allowed = unbalance
        processor = processor_seconds()
        wall = time.monotonic()
        try:
            found = partition_nodes(problem, stages, allowed, time_limit=time_limit)
        except InfeasibleError as error:
            print(f"{name}, {stages} stages: {error}")
            told = re.search(r"minimum imbalance.* is ([\d.]+)%", str(error))
            if told is None:
                continue
            allowed = float(told[1]) / 100
            processor = processor_seconds()
            wall = time.monotonic()
            found = partition_nodes(problem, stages, allowed, time_limit=time_limit)
        seconds = processor_seconds() - processor
        elapsed = time.monotonic() - wall
        figures = (
            f"{seconds:.2f}",
            f"{elapsed:.2f}",
            *(f"{each:.0f}" for each in (found.crossing_bytes, found.contiguous_bytes)),
        )
        bound = f"{found.bound:.0f}" if found.bound else ""
        yield (
            name,
            len(problem.graph.nodes),
            found.groups,
            stages,
            f"{allowed:.3f}",
            *figures,
            bound,
            f"{found.imbalance:.3f}",
        )


def main() -> None:
    """Partition the models, print the table, and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--unbalance", type=float, default=0.08)
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--output", type=Path)
    arguments = parse_arguments(parser, models=["two-branch"], time_limit=5.0)
    table: list[tuple[object, ...]] = [HEADER]
    print(*HEADER, sep="  ")
    for name in arguments.models:
        for row in rows(name, arguments.unbalance, arguments.time_limit):
            print(*row, sep="  ", flush=True)
            table.append(row)
    if arguments.output:
        with arguments.output.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(table)


if __name__ == "__main__":
    main()
