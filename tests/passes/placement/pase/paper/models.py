"""Problems of the zoo's models on so many devices, the published ones at the sizes and batches of the paper."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from autopipe.configs.zoo import build, configure
from autopipe.ir.graph import Graph
from autopipe.ir.problem import Mode, Problem
from autopipe.passes.cost.roofline import annotate
from autopipe.passes.frontend import read_model
from tests.passes.cost.graphs import cluster

PAPER = {"alexnet": 128, "inceptionv3": 128, "rnnlm": 64, "transformer": 64}
"""The paper's models and their batches."""


@cache
def model_graph(name: str, batch: int, size: str | None = None) -> Graph:
    """Training of a model of the zoo on `batch` samples."""
    settings = {"loss": True, "weights": "none"} | ({} if size is None else {"size": size})
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        build(configure(name, settings)).save(path)
        return read_model(path, batch=batch).graph


def paper_graph(name: str) -> Graph:
    """One of the paper's models at its size."""
    return model_graph(name, PAPER[name], "paper")


def problem_of(graph: Graph, devices: int) -> Problem:
    """Training of `graph` in one micro-batch on a cluster with room for everything."""
    batch = graph.inputs[0].shape[0]
    links = cluster(devices, memory=10**13, latency=1e-9)
    return Problem(graph, annotate(graph), links, batch, 1, Mode.TRAIN, "loss")
