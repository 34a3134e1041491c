"""Tensor and data parallelism inside of pipeline stages, on eight ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.ir.placement import Placement, Stage
from autopipe.passes.placement.expert.strategy import Expert
from tests.distributed.pool import Pools
from tests.distributed.trained import Trained, check, problem_of
from tests.distributed.zoo import SmallModels

pytestmark = pytest.mark.distributed


def two_stages(model: Trained, groups: tuple[tuple[int, ...], tuple[int, ...]], recompute: bool) -> Placement:
    """Halves of the model, each split as an expert splits the whole of it over four devices, two a layer."""
    (whole,) = Expert(tensor=2).run(problem_of(model, 4)).stages
    half = len(whole.nodes) // 2
    return Placement(
        tuple(
            Stage(nodes, group, model.samples, tuple(each for each in whole.splits if each[0] in nodes), recompute)
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
    products = [node for node, each in enumerate(model.graph.nodes) if each.op in ("MatMul", "Gemm")]
    split_both_ways = [stage.splits_of(node) for stage in placement.stages for node in stage.nodes if node in products]
    assert all([split.degree for split in splits] == [2, 2] for splits in split_both_ways)
    moved = check(pools, model, placement, tmp_path).moved
    assert moved and moved["all_reduce"] and moved["send"] and moved["gradient"]
