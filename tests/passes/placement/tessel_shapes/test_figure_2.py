"""Lin et al., "Tessel" (HPCA 2024), Figure 2: what a table of 768,000 rows does to the balance of a
chain of stages.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.configs.zoo import build, configure
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.chain import make_chain
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.frontend import read_model
from autopipe.passes.placement.tessel_shapes import (
    chain_parts,
    costed_model,
    large_tables,
    make_split_stage,
    make_unsplit_stage,
    node_chain,
    shared_table_nodes,
)


def device_seconds(folder: Path, layers: int) -> list[float]:
    """Seconds of a micro-batch of one sample on each of four V100: table and head on two, the
    layers on two.

    In fp16, layers recomputed, as in the paper. The zoo's head is the table, so that both are on
    the same devices.
    """
    path = folder / "model.onnx"
    settings = {"size": "tessel-figure-2", "layers": layers, "loss": True, "weights": "none"}
    build(configure("gpt", settings)).save(path)
    read = read_model(path, dims={}, batch=1, batch_axes={}, loss=None, scores="keep")
    links = build_cluster(cluster_preset("v100-32gb"), 4)
    work = roofline_costs(read.graph, "fp16")
    problem = Problem(read.graph, work, links, 128, 128, read.mode, read.loss, precision="fp16")
    model = costed_model(problem)
    tables = large_tables(model, at_least_one=False)
    wide = shared_table_nodes(model, tables, 2)
    line = make_chain(model.graph, model.seconds, 224, tuple(tuple(each.nodes) for each in wide))
    first, chain, last = chain_parts(model, line, wide)
    second, third = node_chain(model, line, chain.nodes).partition_evenly([None] * 2)
    stages = (
        make_split_stage(problem, model, first.nodes, (0, 1), tables),
        replace(make_unsplit_stage(problem, second, (2,)), recompute=True),
        replace(make_unsplit_stage(problem, third, (3,)), recompute=True),
        make_split_stage(problem, model, last.nodes, (0, 1), tables),
    )
    seconds = [0.0] * 4
    for stage, cost in zip(stages, stage_costs(problem, Placement(stages)), strict=True):
        for device in stage.devices:
            seconds[device] += cost.forward_s + cost.backward_s
    return seconds


def test_the_slowest_takes_as_much_longer_as_in_the_figure(tmp_path: Path) -> None:
    few, many = (device_seconds(tmp_path, layers) for layers in (24, 40))
    assert many[0] == many[1] < many[2] == pytest.approx(many[3], rel=0.02)
    assert max(many) / min(many) == pytest.approx(3.4, rel=0.05), "published: 3.4 at 40 layers"
    assert max(few) / min(few) < 2.2, "it grows with the layers"
