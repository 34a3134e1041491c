"""Models of the paper at its sizes and batches, on Summit."""

from __future__ import annotations

from functools import cache

from autopipe.cli.bench.zoo_graph import Settings, zoo_graph
from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.ir.problem import Mode, Problem
from autopipe.passes.cost.roofline import annotate

CLUSTER = "summit"

PAPER: Settings = (("size", "paper"),)


@cache
def problem_of(model: str, devices: int, batch: int, settings: Settings = PAPER) -> Problem:
    """Training a model with its loss, in fp32 with SGD; a strategy chooses the size of micro-batches."""
    graph = zoo_graph(model, settings, batch)
    sizes = tuple(size for size in range(1, batch + 1) if batch % size == 0)
    return Problem(
        graph,
        annotate(graph),
        build_cluster(cluster_preset(CLUSTER), devices, None, None),
        batch,
        1,
        Mode.TRAIN,
        "loss",
        micro_batch_sizes=sizes,
    )
