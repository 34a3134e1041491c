from __future__ import annotations

import pytest

from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Split
from autopipe.ir.problem import Constraint
from autopipe.passes.placement.handcrafted import OneWeirdTrick
from tests.passes.cost.graphs import Builder, cluster, perceptron, problem


def network(*widths: int, batch: int = 8) -> Graph:
    """A convolution of 3 channels to 4 on 5 by 5 pixels, and linear layers with a Relu after
    each.
    """
    builder = Builder(batch, 75)
    image = builder.node(
        "Reshape", ("x", builder.parameter("s", (4,), trainable=False)), (batch, 3, 5, 5)
    )
    kernel = builder.parameter("kernel", (4, 3, 3, 3))
    data = builder.node("Conv", (image, kernel), (batch, 4, 3, 3))
    data = builder.node("Flatten", (builder.relu(data),), (batch, 36), axis=1)
    for width in widths:
        data = builder.relu(builder.linear(data, width))
    return builder.finish(data)


def splits_by_name(graph: Graph, devices: int, **more: object) -> dict[str, tuple[Split, ...]]:
    given = problem(graph, cluster(devices), **more)
    OneWeirdTrick().requires(given)
    (stage,) = OneWeirdTrick().run(given).stages
    return {graph.nodes[node].op + str(node): splits for node, splits in stage.splits}


def test_layers_behind_convolutions_are_split_by_outputs() -> None:
    found = splits_by_name(network(16, 32), 4)
    assert found["Conv1"] == (Split("n", 4),)  # As its samples are called.
    for product, relu in (("MatMul4", "Relu5"), ("MatMul6", "Relu7")):
        assert found[product] == (Split("n", 4),)
        assert found[relu] == (Split("x1", 4),)


def test_outputs_that_do_not_divide_leave_samples_to_the_others() -> None:
    found = splits_by_name(network(16, 6), 4)
    assert found["MatMul4"] == (Split("n", 4),)
    assert found["MatMul6"] == (Split("m", 2), Split("n", 2))
    assert found["Relu7"] == (Split("x0", 2), Split("x1", 2))


def test_a_product_before_a_convolution_is_no_classifier() -> None:
    builder = Builder(8, 3)
    data = builder.node(
        "Reshape", (builder.linear("x", 48), builder.parameter("s", (4,), False)), (8, 3, 4, 4)
    )
    data = builder.node("Conv", (data, builder.parameter("kernel", (4, 3, 1, 1))), (8, 4, 4, 4))
    assert splits_by_name(builder.finish(data), 4)["MatMul0"] == (Split("m", 4),)


def test_a_model_without_convolutions_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="the model lacks convolutions"):
        OneWeirdTrick().requires(problem(perceptron([16, 16]), cluster(4)))


def test_samples_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InfeasibleError, match="micro-batch of 6 samples evenly over 4 replicas"):
        OneWeirdTrick().requires(problem(network(16, batch=6), cluster(4)))


def test_memory_that_does_not_do_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="over the limit"):
        OneWeirdTrick().run(problem(network(16), cluster(2, memory=1000)))


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint("*", stage=1), "requires stage 1, but this node is in stage 0"),
        (
            Constraint("conv*", devices=(0,)),
            r"requires devices \[0\], but this node is on \[0, 1, 2, 3\]",
        ),
        (
            Constraint("matmul4", split=(("b", 4),)),
            "requires split b:4, but this node has split n:4",
        ),
        (Constraint("matmul4", split=()), "requires split none, but this node has split n:4"),
    ],
)
def test_constraints_it_does_not_follow_are_refused(constraint: Constraint, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        splits_by_name(network(16), 4, constraints=(constraint,))


def test_constraints_it_follows_anyway_are_fine() -> None:
    resolved = (
        Constraint("conv*", split=(("b", 4),)),
        Constraint("re:matmul.*", split=(("n", 4),)),
        Constraint("*", stage=0, devices=()),
        Constraint("re:(reshape|flatten).*", split=(("q", 2),)),
    )
    splits_by_name(network(16), 4, constraints=resolved)
