"""Models of the paper at its sizes and batches, on Summit."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from autopipe.configs import zoo
from autopipe.configs.cluster_file import build_cluster
from autopipe.configs.presets import cluster_preset
from autopipe.ir.graph import Graph
from autopipe.ir.problem import Mode, Problem
from autopipe.passes.cost.work import annotate
from autopipe.passes.frontend import read_model

CLUSTER = "summit"

Settings = tuple[tuple[str, int | str], ...]
"""Sizes of a model of the zoo."""

PAPER: Settings = (("size", "paper"),)


@cache
def problem_of(model: str, devices: int, batch: int, settings: Settings = PAPER) -> Problem:
    """Training a model with its loss, in fp32 with SGD; a strategy chooses the size of micro-batches."""
    graph = _graph(model, batch, settings)
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


@cache
def _graph(model: str, samples: int, settings: Settings) -> Graph:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        zoo.build(zoo.configure(model, {**dict(settings), "loss": True, "weights": "none"})).save(path)
        return read_model(path, batch=samples).graph
