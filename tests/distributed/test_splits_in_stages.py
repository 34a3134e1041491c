"""Tensor and data parallelism inside of pipeline stages, on eight ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure
from autopipe.ir.placement import Placement, Stage
from autopipe.passes.placement.handcrafted import Handcrafted
from tests.distributed.support.pool import Pools
from tests.distributed.support.trained import Trained, check, problem_of
from tests.distributed.support.zoo import SmallModels
from tests.distributed.test_verify import SETTINGS, verified

pytestmark = pytest.mark.distributed


def two_stages(
    model: Trained, groups: tuple[tuple[int, ...], tuple[int, ...]], recompute: bool
) -> Placement:
    """Halves of the model, each split as an expert splits the whole of it over four devices, two a
    layer.
    """
    (whole,) = Handcrafted(tensor=2).run(problem_of(model, 4)).stages
    half = len(whole.nodes) // 2
    return Placement(
        tuple(
            Stage(
                nodes,
                group,
                model.samples,
                tuple(each for each in whole.splits if each[0] in nodes),
                recompute,
            )
            for nodes, group in zip((whole.nodes[:half], whole.nodes[half:]), groups, strict=True)
        )
    )


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize(
    ("groups", "recompute"),
    [(((0, 1, 2, 3), (4, 5, 6, 7)), False), (((6, 1, 4, 3), (2, 0, 5, 7)), True)],
)
def test_two_stages_of_two_by_two(
    pools: Pools,
    small_models: SmallModels,
    tmp_path: Path,
    name: str,
    groups: tuple[tuple[int, ...], tuple[int, ...]],
    recompute: bool,
) -> None:
    model = small_models.of(name)
    placement = two_stages(model, groups, recompute)
    products = [
        node for node, each in enumerate(model.graph.nodes) if each.op in ("MatMul", "Gemm")
    ]
    split_both_ways = [
        stage.splits_of(node)
        for stage in placement.stages
        for node in stage.nodes
        if node in products
    ]
    assert all([split.degree for split in splits] == [2, 2] for splits in split_both_ways)
    moved = check(pools, model, placement, tmp_path).moved
    assert moved and moved["all_reduce"] and moved["send"] and moved["gradient"]


CONSTRAINTS = """
strategy: {name: manual}
constraints:
  - {match: 're:.*(embedding|layers.0).*', stage: 0, devices: [0, 1, 2, 3]}
  - {match: 're:.(layers.1|norm|head|loss)/.*', stage: 1, devices: [4, 5, 6, 7]}
  - {match: 're:.*(query|key|value|up|head)/MatMul', split: {b: 2, n: 2}}
  - {match: 're:.*(output|down)/MatMul', split: {b: 2, k: 2}}
  - {match: 're:.*(query|key|value|up)/Add', split: {b: 2, x2: 2}}
  - {match: 're:.*Gelu', split: {b: 2, x2: 2}}
"""


def test_by_hand_from_a_configuration_to_verified_ranks(
    here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "gpt.onnx"
    config = tmp_path / "placed.yaml"
    plan = tmp_path / "plan"
    build(configure("gpt", SETTINGS | {"loss": "true"})).save(model)
    config.write_text(CONSTRAINTS, encoding="utf-8")
    flags = ["--config", str(config), "--gpus", "8", "--batch-size", "16", "--micro-batches", "4"]
    assert main(["plan", str(model), *flags, "-o", str(plan), "-q"]) == 0
    stages = json.loads((plan / "plan.json").read_text(encoding="utf-8"))["placement"]["stages"]
    assert [stage["devices"] for stage in stages] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for stage in stages:
        assert (2, 2) in {tuple(degree for _, degree in each["split"]) for each in stage["splits"]}
    assert main(["codegen", str(plan), "-q"]) == 0
    code, checks = verified(plan / "program", capsys)
    assert code == 0
    assert float(str(checks["loss of the ranks"]["relative_difference"])) < 1e-5
    assert float(str(checks["gradients of the ranks"]["relative_difference"])) < 1e-5
