from __future__ import annotations

import numpy as np
import pytest

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import DType, Value
from autopipe.ir.problem import NodeCost
from autopipe.passes.cost.roofline import node_seconds, roofline_costs, update_seconds
from autopipe.passes.frontend.fusion import cross_entropy
from tests.passes.cost.graphs import Builder, device


def test_time_is_the_slower_of_computing_and_moving_plus_the_launch() -> None:
    toy = device(flops=1e12, bandwidth=1e11, latency=1e-6)
    busy = NodeCost("matmul", 1e9, 2e9, 1e6, 2e6, 0)
    moving = NodeCost("elementwise", 1e3, 1e3, 1e8, 1e8, 0)
    view = NodeCost("view", 0, 0, 0, 0, 0)
    forward, backward = node_seconds([busy, moving, view], toy, "fp32")
    np.testing.assert_allclose(forward, [1e9 / 0.5e12 + 1e-6, 1e8 / 0.5e11 + 1e-6, 0])
    np.testing.assert_allclose(backward, [2e9 / 0.5e12 + 2e-6, 1e8 / 0.5e11 + 1e-6, 0])


@pytest.mark.parametrize(
    ("trained", "products"), [(True, 3), (False, 2)], ids=["trained", "frozen"]
)
def test_a_loss_that_makes_its_scores_multiplies_once_more_in_backward(
    trained: bool, products: int
) -> None:
    builder = Builder(8, 4)
    builder.inputs += (Value("labels", DType.INT64, (8,)),)
    scores = builder.linear(builder.linear("x", 4), 10, trained)
    loss = builder.node("SoftmaxCrossEntropyLoss", (scores, "labels"), ())
    apart = builder.finish(loss)
    joined = cross_entropy.fuse_linear_losses(apart, (loss,))
    (_, product, taken) = roofline_costs(apart)
    (_, both) = roofline_costs(joined)
    assert both.forward_flops == product.forward_flops + taken.forward_flops
    assert both.backward_flops == pytest.approx(products * both.forward_flops)
    assert both.kept_bytes == 4 * 8 * 4 + 16 * 8, (
        "x, and for each label where it is, its weight and its logarithm"
    )


@pytest.mark.parametrize(
    ("precision", "widths", "rates"),
    [
        ("fp32", (64, 63, 64), [1.0, 1.0]),
        ("bf16", (64, 63, 64), [0.25, 0.25]),
        ("bf16", (64, 72, 63), [1.0, 0.25]),
        ("bf16", (64, 72, 64), [1.0, 1.0]),
    ],
)
def test_unaligned_16_bit_products_are_slower(
    precision: str, widths: tuple[int, int, int], rates: list[float]
) -> None:
    """The rows of both factors and of the result have to be multiples of 8 elements."""
    builder = Builder(8, widths[0])
    graph = builder.finish(builder.linear(builder.linear("x", widths[1]), widths[2]))
    work = roofline_costs(graph, precision)
    assert [each.product_rate for each in work] == rates
    toy = device(flops=1e12, bandwidth=1e15, latency=0.0)
    forward, _ = node_seconds(work, toy, precision)
    flops = [each.forward_flops for each in work]
    np.testing.assert_allclose(
        forward, [count / 0.5e12 / rate for count, rate in zip(flops, rates, strict=True)]
    )


def test_shares_divide_work_but_not_launches() -> None:
    toy = device(latency=1e-6)
    work = [NodeCost("matmul", 1e9, 0, 1e6, 0, 0)] * 2
    forward, backward = node_seconds(work, toy, "fp32", np.array([1.0, 0.25]))
    assert forward[1] - 1e-6 == pytest.approx((forward[0] - 1e-6) / 4)
    assert not backward.any(), "no gradients, no launch"


def test_update_moves_parameters_gradients_and_states() -> None:
    toy = device(bandwidth=1e11, latency=1e-6)
    assert update_seconds(toy, 1e6, 2) == pytest.approx(7e6 / 0.5e11 + 1e-6)
    assert update_seconds(toy, 0, 2) == 0


def test_a_precision_the_device_does_not_state_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="does not declare the peak FLOP/s for fp64"):
        node_seconds([NodeCost("matmul", 1, 0, 1, 0, 0)], device(), "fp64")
