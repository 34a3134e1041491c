from __future__ import annotations

import pytest

from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split
from autopipe.ir.problem import Constraint, Problem
from autopipe.passes.placement.handcrafted import Handcrafted
from tests.passes.cost.graphs import Builder, cluster, perceptron, problem


def placed(given: Problem, tensor: int = 0) -> Placement:
    strategy = Handcrafted(tensor)
    strategy.requires(given)
    placement = strategy.run(given)
    placement.verify(given.graph)
    return placement


def feed_forward(given: Problem, tensor: int = 0) -> list[tuple[Split, ...]]:
    (stage,) = placed(given, tensor).stages
    return [stage.splits_of(node) for node in range(len(given.graph.nodes))]


def test_columns_then_rows_within_a_group_and_samples_among_groups() -> None:
    given = problem(perceptron([16, 32, 16]), cluster(8, per_node=4))
    assert feed_forward(given) == [
        (Split("m", 2), Split("n", 4)),
        (Split("x0", 2), Split("x1", 4)),
        (Split("m", 2), Split("k", 4)),
        (Split("x0", 2),),
    ]


def test_a_group_is_no_larger_than_lets_most_nodes_be_shared() -> None:
    given = problem(perceptron([16, 6, 16]), cluster(4))
    assert feed_forward(given)[0] == (Split("m", 2), Split("n", 2))


def test_a_group_is_as_large_as_asked() -> None:
    given = problem(perceptron([16, 32, 16]), cluster(8, per_node=4))
    assert feed_forward(given, tensor=8)[0] == (Split("n", 8),)
    assert feed_forward(given, tensor=1)[0] == (Split("m", 8),)
    with pytest.raises(InfeasibleError, match="8 devices cannot be divided into groups of size 3"):
        placed(given, tensor=3)


def test_samples_that_groups_cannot_share_are_refused() -> None:
    given = problem(perceptron([16, 32, 16], batch=3), cluster(8, per_node=4))
    with pytest.raises(
        InfeasibleError,
        match="handcrafted cannot split a micro-batch of 3 samples evenly over 2 replicas",
    ):
        placed(given)
    assert feed_forward(given, tensor=8)[0] == (Split("n", 8),)


def language_model(layers: int) -> Graph:
    """Recurrent layers on [4 steps, 8 samples, 6], then a projection."""
    builder = Builder(8, 24)
    data = builder.node("Reshape", ("x", builder.parameter("s", (3,), False)), (8, 4, 6))
    data = builder.node("Transpose", (data,), (4, 8, 6), perm=(1, 0, 2))
    for layer in range(layers):
        weight = builder.parameter(f"weight{layer}", (1, 24, 6))
        recurrence = builder.parameter(f"recurrence{layer}", (1, 24, 6))
        data = builder.node("LSTM", (data, weight, recurrence), (4, 1, 8, 6), hidden_size=6)
        data = builder.node(
            "Reshape", (data, builder.parameter(f"s{layer}", (3,), False)), (4, 8, 6)
        )
    data = builder.node("Transpose", (data,), (8, 4, 6), perm=(1, 0, 2))
    return builder.finish(builder.linear(data, 10))


@pytest.mark.parametrize(
    ("layers", "devices", "groups"),
    [
        (2, 4, [(0, 1), (2, 3)]),
        (3, 4, [(0, 1), (2, 3)]),
        (3, 6, [(0, 1), (2, 3), (4, 5)]),
        (2, 1, [(0,)]),
    ],
)
def test_recurrent_layers_are_a_pipeline(
    layers: int, devices: int, groups: list[tuple[int, ...]]
) -> None:
    graph = language_model(layers)
    stages = placed(problem(graph, cluster(devices))).stages
    assert [stage.devices for stage in stages] == groups
    count = [sum(graph.nodes[node].op == "LSTM" for node in stage.nodes) for stage in stages]
    assert sum(count) == layers and min(count) > 0
    assert all(
        len(splits) == 1 and splits[0].degree == len(groups[0])
        for stage in stages
        for _, splits in stage.splits
    )


def test_networks_that_mostly_convolve_are_split_by_one_weird_trick() -> None:
    builder = Builder(8, 75)
    data = builder.node("Reshape", ("x", builder.parameter("s", (4,), False)), (8, 3, 5, 5))
    data = builder.node("Conv", (data, builder.parameter("kernel", (4, 3, 3, 3))), (8, 4, 3, 3))
    data = builder.linear(builder.node("Flatten", (data,), (8, 36), axis=1), 8)
    (stage,) = placed(problem(builder.finish(data), cluster(4))).stages
    assert stage.splits_of(1) == (Split("n", 4),)  # As its samples are called.
    assert stage.splits_of(3) == (Split("n", 4),)


def test_what_it_cannot_do_is_refused() -> None:
    given = problem(
        perceptron([16, 32, 16]),
        cluster(4),
        constraints=(Constraint("matmul0", split=(("b", 4),)),),
    )
    with pytest.raises(ConfigurationError, match="requires split b:4, but this node has split n:4"):
        placed(given)
    with pytest.raises(ConfigurationError, match="tensor is -1"):
        placed(given, tensor=-1)
    with pytest.raises(InfeasibleError, match="over the limit"):
        placed(problem(perceptron([64, 64, 64]), cluster(2, memory=1000)))
