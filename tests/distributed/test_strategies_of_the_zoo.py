"""What strategies choose for the models of the zoo computes what one device does, and exchanges
what is predicted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.ir.placement import Placement
from autopipe.passes.placement.grid import Grid
from autopipe.passes.placement.handcrafted import Handcrafted
from autopipe.passes.placement.pase.strategy import Pase
from autopipe.passes.placement.tepdist.strategy import TePDist
from autopipe.passes.registry import Strategy
from tests.distributed.support.pool import Pools
from tests.distributed.support.trained import Trained, check, problem_of
from tests.distributed.support.zoo import SAMPLES, SIZES, SmallModels

CHOOSING: dict[str, Strategy] = {
    "handcrafted": Handcrafted(),
    "grid": Grid(),
    "pase": Pase(),
    "tepdist": TePDist(),
    "tepdist in two stages": TePDist(stages=2),
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", SIZES)
def test_what_pase_finds_on_four_ranks(
    pools: Pools, small_models: SmallModels, tmp_path: Path, name: str
) -> None:
    model = small_models.of(name)
    check(pools, model, chosen(Pase(), model, 4), tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "stages"), [("gpt", 2), ("vgg19", None), ("two-branch", 2)])
def test_what_tepdist_finds_on_four_ranks(
    pools: Pools, small_models: SmallModels, tmp_path: Path, name: str, stages: int | None
) -> None:
    model = small_models.of(name)
    check(pools, model, chosen(TePDist(stages=stages), model, 4), tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("gpt", Grid(pipeline=2, data=2)),
        ("llama", Grid(pipeline=2, tensor=2)),
        ("moe", Grid(pipeline=1, data=2, tensor=2)),
        ("gpt", Grid(pipeline=2, tensor=2, stages_per_rank=2)),
        ("llama", Grid(pipeline=4, stages_per_rank=2, style="v")),
    ],
)
def test_what_grid_makes_on_four_ranks(
    pools: Pools, small_models: SmallModels, tmp_path: Path, name: str, strategy: Grid
) -> None:
    model = small_models.of(name)
    check(pools, model, chosen(strategy, model, 4), tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_grid_shards_the_embedding_of_one_sample(
    pools: Pools, small_models: SmallModels, tmp_path: Path, name: str
) -> None:
    """The head of gpt is tied to its embedding, that of llama is not."""
    model = small_models.of(name, samples=1)
    placement = chosen(Grid(pipeline=2, tensor=2), model, 4)
    table = next(node for node, each in enumerate(model.graph.nodes) if each.op == "Gather")
    assert [split.degree for split in placement.stages[0].splits_of(table)] == [2]
    check(pools, model, placement, tmp_path)


@pytest.mark.distributed
def test_what_grid_makes_on_eight_ranks(
    pools: Pools, small_models: SmallModels, tmp_path: Path
) -> None:
    model = small_models.of("gpt", 2 * SAMPLES)
    check(pools, model, chosen(Grid(pipeline=2, data=2, tensor=2), model, 8), tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("strategy", CHOOSING)
@pytest.mark.parametrize("name", SIZES)
def test_what_is_chosen(
    pools: Pools, small_models: SmallModels, tmp_path: Path, name: str, strategy: str, devices: int
) -> None:
    model = small_models.of(name, 2 * SAMPLES)  # Eight devices can share as many.
    check(pools, model, chosen(CHOOSING[strategy], model, devices), tmp_path)


def chosen(strategy: Strategy, model: Trained, devices: int) -> Placement:
    """What the strategy chooses for a model on so many devices."""
    problem = problem_of(model, devices)
    strategy.requires(problem)
    return strategy.run(problem)
