"""What the two halves of a split backward take and hold."""

from __future__ import annotations

import pytest

from autopipe.ir.problem import Mode
from autopipe.passes.analysis.gradients import weight_operands
from autopipe.passes.cost.roofline import accumulate_seconds, node_seconds
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.schedule.predict import predict
from tests.passes.cost.graphs import Builder, cluster, perceptron, problem
from tests.passes.cost.test_stages import cut, tied


def test_halves_of_a_product() -> None:
    """Of the first product all of its backward waits, since nothing flows to the data; of the
    second a half.
    """
    graph = perceptron([16, 32, 4])
    given = problem(graph, cluster(1))
    (cost,) = stage_costs(given, cut(graph, [0], [(0,)]))
    _, backward = node_seconds(given.work, given.cluster.devices[0], "fp32")
    added = 3 / 4 * accumulate_seconds(given.cluster.devices[0], cost.gradient_bytes)
    assert cost.weight_gradient_s == pytest.approx(backward[0] + backward[2] / 2 + added)
    assert cost.weight_kept_bytes == 4 * 8 * (32 + 32 + 4), (
        "an operand that is no data, two results' gradients"
    )


def test_halves_make_up_the_backward() -> None:
    graph = perceptron([16, 32, 32, 4])
    (stage,) = predict(problem(graph, cluster(1)), cut(graph, [0], [(0,)])).stages
    assert 0 < stage.weight_gradient_s < stage.backward_s
    assert stage.input_gradient_s + stage.weight_gradient_s == pytest.approx(
        stage.backward_s, rel=1e-12
    )
    (inferring,) = predict(
        problem(graph, cluster(1), mode=Mode.INFER), cut(graph, [0], [(0,)])
    ).stages
    assert (
        inferring.weight_gradient_s
        == inferring.input_gradient_s
        == inferring.weight_kept_bytes
        == 0
    )


def test_recomputation_belongs_to_the_first_half() -> None:
    graph = perceptron([16, 32, 32, 4])
    given = problem(graph, cluster(1))
    plain, again = (
        stage_costs(given, cut(graph, [0], [(0,)], recompute))[0] for recompute in (False, True)
    )
    assert plain.weight_gradient_s == again.weight_gradient_s
    assert plain.weight_kept_bytes == again.weight_kept_bytes
    assert again.backward_s > plain.backward_s


def test_one_parameter_in_two_products_waits_twice() -> None:
    graph = tied()
    assert [weight_operands(graph)[node] for node in range(3)] == [(1,), (), (1,)]
    given = problem(graph, cluster(1), micro_batches=1)
    (cost,) = stage_costs(given, cut(graph, [0], [(0,)]))
    _, backward = node_seconds(given.work, given.cluster.devices[0], "fp32")
    assert cost.weight_gradient_s == pytest.approx(backward[0] + backward[2] / 2)


def test_vectors_and_frozen_weights_do_not_wait() -> None:
    builder = Builder(8, 16)
    wide = builder.linear("x", 16, trainable=False)
    graph = builder.finish(builder.add(wide, builder.parameter("b", (16,))))
    assert [weight_operands(graph)[node] for node in range(2)] == [(), ()]
    given = problem(graph, cluster(1))
    (cost,) = stage_costs(given, cut(graph, [0], [(0,)]))
    assert cost.weight_gradient_s == cost.weight_kept_bytes == 0
    assert cost.backward_s > 0


def test_a_view_of_a_parameter_waits() -> None:
    builder = Builder(8, 16)
    turned = builder.node("Transpose", (builder.parameter("w", (4, 16)),), (16, 4), perm=(1, 0))
    graph = builder.finish(builder.matmul("x", turned))
    assert weight_operands(graph)[1] == (1,)


def test_devices_that_share_samples_share_what_waits() -> None:
    graph = perceptron([16, 32, 32])
    given = problem(graph, cluster(2))
    (alone,) = stage_costs(given, cut(graph, [0], [(0,)]))
    (shared,) = stage_costs(given, cut(graph, [0], [(0, 1)]))
    assert shared.weight_kept_bytes == alone.weight_kept_bytes / 2
    assert shared.weight_gradient_s < alone.weight_gradient_s
