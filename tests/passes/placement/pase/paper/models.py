"""Problems of the zoo's models, the published ones at the sizes and batches of the paper, and costs
of strategies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from autopipe.configs.zoo import build, configure
from autopipe.ir.graph import Graph
from autopipe.ir.problem import Mode, Problem
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.frontend import read_model
from autopipe.passes.placement.pase.paper_costs import LayerGraph, transfer_cost
from benchmarks.pase import sample_axes
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
    return Problem(graph, roofline_costs(graph), links, batch, 1, Mode.TRAIN, "loss")


def cost_of(graph: LayerGraph, degrees: Sequence[tuple[int, ...]]) -> float:
    """Cost of a strategy, in the searched space or not."""
    rows = [np.array([each], dtype=np.int64) for each in degrees]
    layers = graph.layers
    total = sum(
        float(layer.cost.operations(layer.extents, row)[0])
        for layer, row in zip(layers, rows, strict=True)
    )
    for edge in graph.edges:
        written, read = graph.edge_tensors(edge)
        moved = transfer_cost(
            written.extents, written.degrees(rows[edge.source]), read.degrees(rows[edge.target])
        )
        total += float(moved[0, 0])
    return total


def data_parallel(graph: Graph, layers: LayerGraph, devices: int) -> tuple[tuple[int, ...], ...]:
    """Degrees of every layer's axes when as many as possible of `devices` share the samples."""
    return tuple(
        tuple(
            max(degree for degree in range(1, devices + 1) if axis.size % degree == 0)
            if position == counted
            else 1
            for position, axis in enumerate(placed.axes)
        )
        for placed, counted in zip(layers.layers, sample_axes(graph, layers), strict=True)
    )
