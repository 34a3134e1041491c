"""Models of the paper at its sizes and batches, on its machines."""

from __future__ import annotations

from autopipe.cli.bench.pase.published import BATCH
from autopipe.cli.bench.zoo_graph import zoo_graph
from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.ir.problem import Mode, Problem
from autopipe.passes.cost.roofline import annotate

CLUSTERS = ("1080ti-pcie", "2080ti-pcie")
"""Presets: servers of eight devices on PCIe, InfiniBand between them."""


def paper_problem(model: str, devices: int, cluster: str = CLUSTERS[0], micro_batches: int = 1) -> Problem:
    """Training a model of the zoo, with its loss, in fp32 with SGD."""
    batch = BATCH[model]
    graph = zoo_graph(model, (("size", "paper"),), batch // micro_batches)
    links = build_cluster(cluster_preset(cluster), devices, None, None)
    return Problem(graph, annotate(graph), links, batch, micro_batches, Mode.TRAIN, "loss")
