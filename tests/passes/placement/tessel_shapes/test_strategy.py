"""The shapes on models of the zoo: which nodes stand where, what is split, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from autopipe.configs.zoo import build, configure
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.placement import Placement, stage_edges
from autopipe.ir.problem import Constraint, Problem
from autopipe.passes.cost.memory_check import device_memory
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.frontend import read_model
from autopipe.passes.placement.tessel_shapes import TesselShapes
from tests.passes.cost.graphs import cluster

GPT = (("layers", "4"), ("vocabulary", "1024"), ("sequence", "16"))
MT5 = (("layers", "2"), ("vocabulary", "2048"))
FLAVA = (("text_layers", "4"), ("image_layers", "4"))
"""Models of the zoo as (name, settings)."""


@cache
def model_problem(
    name: str, settings: tuple[tuple[str, str], ...], devices: int = 4, loss: bool = True
) -> Problem:
    """Training of a model on micro-batches of two samples; inference without a loss."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        build(configure(name, dict(settings) | {"loss": str(loss).lower()})).save(path)
        model = read_model(path, dims={}, batch=2, batch_axes={}, loss=None, mode=None, frozen=())
    links = cluster(devices, memory=10**11, latency=1e-9)
    return Problem(
        model.graph, roofline_costs(model.graph), links, 8, 4, model.mode, model.loss or None
    )


def placed(problem: Problem, **options: Any) -> Placement:
    strategy = TesselShapes(**options)
    strategy.requires(problem)
    placement = strategy.run(problem)
    placement.verify(problem.graph)
    return placement


def ops(problem: Problem, placement: Placement, stage: int) -> list[str]:
    return [problem.graph.nodes[node].op for node in placement.stages[stage].nodes]


def axes(problem: Problem, placement: Placement, stage: int) -> Mapping[str, str]:
    """The split of each node of a stage, by the node's name."""
    splits = placement.stages[stage].splits
    return {problem.graph.nodes[node].name: " ".join(map(str, cuts)) for node, cuts in splits}


def groups(placement: Placement) -> list[tuple[int, ...]]:
    return [stage.devices for stage in placement.stages]


ALL = (0, 1, 2, 3)


@pytest.mark.parametrize("shape", ["m", "auto"])
def test_gpt_is_an_m(shape: str) -> None:
    problem = model_problem("gpt", GPT)
    placement = placed(problem, shape=shape)
    assert groups(placement) == [ALL, (0,), (1,), (2,), (3,), ALL]
    assert stage_edges(problem.graph, placement) == ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))
    assert axes(problem, placement, 0) == {"/token_embedding/Gather": "d0:4"}
    assert axes(problem, placement, 5) == {
        "/head/Transpose": "d0:4",
        "/head/MatMul": "n:4",
        "/loss/Reshape": "a2:4",
        "/loss/SoftmaxCrossEntropyLoss": "c:4",
    }
    costs = stage_costs(problem, placement)
    assert costs[0].parameter_bytes == 1024 * 64 * 4 / 4, "a quarter of the table on each device"
    chain = [cost.forward_s + cost.backward_s for cost in costs[1:5]]
    assert max(chain) < 1.1 * min(chain)


def test_an_embedding_and_a_head_of_its_own_are_both_shared() -> None:
    problem = model_problem("mt5", (*MT5, ("tied", "false")))
    placement = placed(problem, shape="m")
    assert groups(placement) == [ALL, (0,), (1,), (2,), (3,), ALL]
    assert set(axes(problem, placement, 0).values()) == {"d0:4"}, "both lookups"
    assert len(axes(problem, placement, 0)) == 2
    assert axes(problem, placement, 5)["/head/MatMul"] == "n:4"


@pytest.mark.parametrize("shape", ["nn", "auto"])
def test_mt5_is_an_nn(shape: str) -> None:
    problem = model_problem("mt5", MT5)
    placement = placed(problem, shape=shape)
    assert groups(placement) == [ALL, (0,), (1,), ALL, (2,), (3,), ALL]
    assert ops(problem, placement, 0)[0] == ops(problem, placement, 3)[0] == "Gather"
    assert axes(problem, placement, 3) == {"/target_embedding/Gather": "d0:4"}
    names = {problem.graph.nodes[node].name.split("/")[1] for node in placement.stages[1].nodes}
    assert all(name.startswith("encoder") for name in names)


@pytest.mark.parametrize("shape", ["k", "K", "auto"])
def test_flava_is_a_k(shape: str) -> None:
    problem = model_problem("flava", FLAVA)
    placement = placed(problem, shape=shape)
    assert groups(placement) == [(0,), (1,), (2,), (3,), ALL]
    assert stage_edges(problem.graph, placement) == ((0, 1), (1, 4), (2, 3), (3, 4))
    split = axes(problem, placement, 4)
    layer = {
        name.removeprefix("/cross/layers.0"): axis
        for name, axis in split.items()
        if "layers.0" in name
    }
    assert layer["/attention/query/MatMul"] == layer["/feed_forward/up/MatMul"] == "n:4", (
        "by columns"
    )
    assert layer["/attention/MatMul_1"] == "h:4", "by heads"
    assert layer["/attention/output/MatMul"] == layer["/feed_forward/down/MatMul"] == "k:4", (
        "by rows"
    )
    assert not any("norm" in name for name in split)


def test_a_cross_encoder_that_cannot_be_shared_makes_no_k_unasked() -> None:
    """Three devices cannot share four heads."""
    problem = model_problem("flava", FLAVA, devices=3)
    assert groups(placed(problem)) == [(0,), (1,), (2,)]
    assert groups(placed(problem, shape="k"))[-1] == (0, 1, 2)


def test_v_and_x_run_over_the_devices_and_back() -> None:
    problem = model_problem("gpt", GPT)
    single = placed(problem, shape="v")
    both = placed(problem, shape="x")
    assert groups(single) == [(0,), (1,), (2,), (3,)]
    assert groups(both) == [*groups(single), (3,), (2,), (1,), (0,)]
    assert [stage.pipeline for stage in both.stages] == [0] * 4 + [1] * 4
    assert [stage.nodes for stage in both.stages[4:]] == [stage.nodes for stage in single.stages]


def test_chunks_go_round_or_back_and_forth() -> None:
    problem = model_problem("gpt", GPT)
    assert groups(placed(problem, shape="v", stages_per_rank=2)) == [(0,), (1,), (2,), (3,)] * 2
    assert groups(placed(problem, shape="v", stages_per_rank=2, style="v")) == [
        (0,),
        (1,),
        (2,),
        (3,),
        (3,),
        (2,),
        (1,),
        (0,),
    ]
    assert groups(placed(problem, shape="m", stages_per_rank=2)) == [
        ALL,
        *[(0,), (1,), (2,), (3,)] * 2,
        ALL,
    ]


def test_lookups_in_the_middle_can_be_made_first() -> None:
    problem = model_problem("dlrm", ())
    middle = placed(problem, shape="nn")
    first = placed(problem, shape="m")
    assert groups(middle) == [(0,), (1,), ALL, (2,), (3,)]
    assert groups(first) == [ALL, (0,), (1,), (2,), (3,)]
    assert set(axes(problem, first, 0).values()) == {"d0:4"}


def test_a_first_layer_is_no_branch() -> None:
    """The decoder's first attention meets the encoder with an eighth of the work in it."""
    assert groups(placed(model_problem("mt5", ()))) == [(0,), (1,), (2,), (3,)]


def test_inference_leaves_the_logits_in_shards() -> None:
    problem = model_problem("gpt", GPT, loss=False)
    placement = placed(problem)
    assert axes(problem, placement, 5) == {"/head/Transpose": "d0:4", "/head/MatMul": "n:4"}


def test_small_tables_and_no_branches_make_a_v() -> None:
    problem = model_problem("gpt", (("layers", "8"), ("vocabulary", "128")))
    assert groups(placed(problem)) == [(0,), (1,), (2,), (3,)]
    assert groups(placed(problem, shape="m"))[::5] == [ALL, ALL], (
        "asked for, the largest table is shared"
    )


@pytest.mark.parametrize(
    ("name", "settings", "options", "message"),
    [
        (
            "gpt",
            (("vocabulary", "1021"),),
            {"shape": "m"},
            "4 devices cannot evenly split the 1021 rows of the embedding table 'token_embedding",
        ),
        ("gpt", (("vocabulary", "1021"),), {"shape": "m"}, "pad it to 1024 in the model"),
        (
            "gpt",
            GPT,
            {"shape": "nn"},
            "requires 2 chains of operators between large embedding tables",
        ),
        (
            "gpt",
            GPT,
            {"shape": "k"},
            "shape k requires branches on at least one device each, but the number",
        ),
        (
            "candle-uno",
            (),
            {"shape": "m"},
            "splits large embedding tables over all devices, but the model lacks",
        ),
        (
            "gpt",
            GPT,
            {"shape": "v", "stages_per_rank": 100},
            "cannot be partitioned into 400 stages",
        ),
    ],
)
def test_models_without_the_shape(
    name: str, settings: tuple[tuple[str, str], ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InfeasibleError) as error:
        placed(model_problem(name, settings), **options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"shape": "w"}, "shape 'w' is unknown"), ({"stages_per_rank": 0}, "stages_per_rank is 0")],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TesselShapes(**options).requires(model_problem("gpt", GPT))


def test_one_device_is_a_v_of_one_stage() -> None:
    problem = model_problem("gpt", GPT, devices=1)
    assert groups(placed(problem, shape="v")) == [(0,)]
    assert {stage.devices for stage in placed(problem).stages} == {(0,)}
    for shape in ("x", "nn", "k"):
        with pytest.raises(InfeasibleError):
            placed(problem, shape=shape)


def test_constraints_are_refused() -> None:
    problem = replace(model_problem("gpt", GPT), constraints=(Constraint("*", stage=0),))
    with pytest.raises(ConfigurationError, match="tessel_shapes does not support constraints"):
        TesselShapes().requires(problem)


def test_chains_are_cut_where_memory_holds_them() -> None:
    problem = model_problem("gpt", GPT)
    even = device_memory(
        problem, placed(problem, shape="v"), stage_costs(problem, placed(problem, shape="v"))
    )
    tight = replace(problem, memory_limit=int(0.93 * max(even)))
    placement = placed(tight, shape="v")
    assert max(device_memory(tight, placement, stage_costs(tight, placement))) <= 0.93 * max(even)
    assert groups(placement) == [(0,), (1,), (2,), (3,)]


def test_memory_that_holds_no_shape_is_named() -> None:
    problem = replace(model_problem("gpt", GPT), memory_limit=200_000)
    with pytest.raises(
        InfeasibleError, match=r"of 6 needs? .* on device \d, .* over the limit of 0\.19 MiB"
    ):
        placed(problem)
