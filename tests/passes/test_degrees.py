"""Degrees of placements by hand and by every strategy, and the rate and the MFU of a plan."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.configs.zoo import build, configure
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Mode, Optimizer
from autopipe.passes.cost.stage_work import stage_work
from autopipe.passes.degrees import open_degrees, plan_degrees
from autopipe.passes.pipeline import PlanResult, Request, make_plan
from autopipe.passes.placement.data_parallel import DataParallel
from autopipe.passes.placement.grid import Grid
from autopipe.passes.registry import Strategy, scheduler_class, strategy_class
from tests.passes.cost.graphs import Builder, cluster, perceptron, problem

BATCH = 16
SEQUENCE = 8
HIDDEN = 32
LAYERS = 4
HEADS = 4
VOCABULARY = 64
GPT = {
    "layers": LAYERS,
    "hidden": HIDDEN,
    "heads": HEADS,
    "sequence": SEQUENCE,
    "vocabulary": VOCABULARY,
    "loss": True,
}


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "gpt.onnx"
    build(configure("gpt", {name: str(value).lower() for name, value in GPT.items()})).save(path)
    return path


def planned(
    model: Path, strategy: Strategy, schedule: str = "1f1b", devices: int = 4, shard: bool = False
) -> PlanResult:
    request = Request(
        model=model,
        cluster=build_cluster(cluster_preset("h100-80gb"), devices, None, None),
        strategy=strategy,
        scheduler=scheduler_class(schedule)(),
        batch_size=BATCH,
        micro_batches=4,
        optimizer=Optimizer(name="adamw", shard=shard),
        precision="bf16",
    )
    return make_plan(request)


@pytest.mark.parametrize(
    ("strategy", "schedule", "text"),
    [
        # Devices that share products hold copies of what is not split, such as biases and norms.
        (Grid(2, 1, 2), "1f1b", "pipeline 2 × data 1 × tensor 2, ZeRO-1"),
        (Grid(1, 2, 2), "1f1b", "pipeline 1 × data 2 × tensor 2, ZeRO-1"),
        (Grid(2, 2, 1, stages_per_rank=2), "interleaved_1f1b", "pipeline 2 (2 stages per rank) × data 2 × tensor 1, ZeRO-1"),
        (DataParallel(), "1f1b", "pipeline 1 × data 4 × tensor 1, ZeRO-1"),
        (strategy_class("tessel_shapes")("x"), "chimera", "pipeline 4 (2 directions) × data 1 × tensor 1, ZeRO-1"),
        (strategy_class("tessel_shapes")("m"), "1f1b_plus",
         (
             "pipeline 5 groups of 4, 1, 1, 1 and 1 devices (1–2 stages per rank, groups share devices), "
             "data 1, tensor 1–4"
         )),
    ],
    ids=["pipeline", "tensor", "chunks", "data", "directions", "overlapping"],
)  # fmt: skip
def test_degrees_of_strategies(gpt: Path, strategy: Strategy, schedule: str, text: str) -> None:
    degrees = planned(gpt, strategy, schedule, shard=True).plan.summary.degrees
    assert degrees is not None
    assert degrees.text == text


@pytest.mark.parametrize(
    "name", ["graphpipe", "pase", "pipedream", "piper", "tepdist", "handcrafted"]
)
def test_degrees_multiply_to_the_devices_of_a_group(gpt: Path, name: str) -> None:
    found = planned(gpt, strategy_class(name)())
    degrees = found.plan.summary.degrees
    assert degrees is not None
    each = degrees.data, degrees.sequence, degrees.tensor, degrees.copies
    least, most = (math.prod(interval[end] for interval in each) for end in (0, 1))
    assert all(least <= size <= most for size in degrees.groups)
    assert {len(stage.devices) for stage in found.plan.placement.stages} == set(degrees.groups)


def test_nothing_is_shared_where_nothing_is_replicated() -> None:
    graph = perceptron([8, 8, 8])
    stages = (Stage((0, 1), (0,), 8), Stage((2, 3), (1,), 8))
    given = problem(graph, cluster(2), optimizer=Optimizer(name="adamw", shard=True))
    assert plan_degrees(given, Placement(stages)).text == "pipeline 2 × data 1 × tensor 1"


def test_unequal_stages_are_no_grid() -> None:
    graph = perceptron([10, 20, 20, 20])
    stages = (
        Stage((0, 1), (0,), 8, recompute=True),
        Stage((2, 3), (1, 2), 8, ((2, (Split("m", 2),)), (3, (Split("x0", 2),)))),
        Stage((4, 5), (3, 4, 5, 6, 7), 8, ((4, (Split("n", 5),)),)),
    )
    degrees = plan_degrees(problem(graph, cluster(8)), Placement(stages))
    assert (
        degrees.text
        == "pipeline 3 stages of 1, 2 and 5 devices, data 1–2, tensor 1–5, recompute 1 of 3 stages"
    )


def test_devices_that_compute_the_same_are_copies() -> None:
    stage = Stage((0, 1), (0, 1, 2, 3), 8, ((0, (Split("n", 2),)),))
    degrees = plan_degrees(problem(perceptron([8, 8]), cluster(4)), Placement((stage,)))
    assert degrees.text == "pipeline 1 × data 1 × tensor 2 × copies 2"


def test_rows_beyond_samples_are_the_sequence() -> None:
    """A product of 2 samples × 4 positions, merged, in 4 parts along them: two samples, each in
    halves.
    """
    builder = Builder(2, 4)
    builder.inputs = (replace(builder.inputs[0], shape=(2, 4, 6)),)
    builder.shapes["x"] = (2, 4, 6)
    graph = builder.finish(builder.linear("x", 6))
    given = problem(graph, cluster(4))
    rows = stage_work(given, Placement((Stage((0,), (0, 1, 2, 3), 2),)))[0].nodes[0].use.space.axes
    positions = rows[1].name
    stage = Stage((0,), (0, 1, 2, 3), 2, ((0, (Split(rows[0].name, 2), Split(positions, 2))),))
    degrees = plan_degrees(given, Placement((stage,)))
    assert degrees.text == "pipeline 1 × data 2 × sequence 2 × tensor 1"


def test_a_product_of_no_weight_does_not_count_beside_one() -> None:
    """The first product is most of the work and split over two; the second is a hundredth and
    whole.
    """
    graph = perceptron([1000, 1000, 1], batch=8)
    stage = Stage((0, 1, 2, 3), (0, 1), 8, ((0, (Split("n", 2),)), (1, (Split("x1", 2),))))
    assert plan_degrees(problem(graph, cluster(2)), Placement((stage,))).tensor == (2, 2)


def test_open_options_are_told() -> None:
    assert open_degrees(Grid(2, None, None)) == ("data", "tensor")
    assert open_degrees(DataParallel()) == ()


def test_rates_and_mfu_are_those_of_the_definition(gpt: Path) -> None:
    """A decoder's FLOPs are 6 per token and weight of a product, and 12 per layer, hidden unit and
    pair of tokens.
    """
    found = planned(gpt, Grid(2, 1, 2))
    summary = found.plan.summary
    given = found.problem
    tokens = BATCH * SEQUENCE
    weights = LAYERS * 12 * HIDDEN**2 + HIDDEN * VOCABULARY
    products = 6 * weights * tokens + 12 * LAYERS * HIDDEN * SEQUENCE * tokens
    peak = 4 * 989.5e12
    assert summary.mfu == given.step_flops / (summary.step_time_s * peak)
    elementwise = sum(
        each.forward_flops + each.backward_flops
        for each in given.work
        if each.kind not in ("matmul", "convolution", "recurrent")
    )
    assert given.step_flops - given.micro_batches * elementwise == pytest.approx(
        products, rel=0.002
    )
    assert summary.rate_per_device == (pytest.approx(tokens / summary.step_time_s / 4), "tokens/s")
    assert summary.tokens_per_sample == SEQUENCE


def test_recomputation_adds_nothing_to_mfu(gpt: Path) -> None:
    plain = planned(gpt, DataParallel())
    request = replace(plain.request, recompute="full")
    again = make_plan(request)
    assert again.problem.step_flops == plain.problem.step_flops
    ratio = plain.plan.summary.step_time_s / again.plan.summary.step_time_s
    assert ratio < 1
    assert again.plan.summary.mfu == pytest.approx((plain.plan.summary.mfu or 0) * ratio)


def test_inference_counts_forward_alone() -> None:
    graph = perceptron([16, 16], batch=4)
    given = problem(graph, cluster(1), micro_batches=2, mode=Mode.INFER)
    assert given.step_flops == 2 * (2 * 4 * 16 * 16 + 4 * 16)
