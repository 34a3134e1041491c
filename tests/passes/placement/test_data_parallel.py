from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.placement import Split
from autopipe.ir.problem import Constraint, Optimizer
from autopipe.passes.placement.data_parallel import DataParallel
from tests.passes.cost.graphs import Builder, cluster, perceptron, problem


def test_every_node_with_samples_is_split() -> None:
    builder = Builder(8, 16)
    weight = builder.node("Transpose", (builder.parameter("w", (16, 16)),), (16, 16), perm=(1, 0))
    graph = builder.finish(builder.relu(builder.matmul("x", weight)))
    given = problem(graph, cluster(4))
    DataParallel().requires(given)
    (stage,) = DataParallel().run(given).stages
    assert stage.devices == (0, 1, 2, 3)
    assert stage.splits == ((1, (Split("m", 4),)), (2, (Split("x0", 4),)))


def test_samples_that_do_not_divide_are_refused() -> None:
    given = problem(perceptron([16, 16], batch=6), cluster(4))
    with pytest.raises(
        InfeasibleError, match=r"micro-batch of 6 samples evenly over 4 devices \(choose"
    ):
        DataParallel().requires(given)


def test_a_model_without_samples_is_refused() -> None:
    graph = replace(perceptron([16, 16]), batch_axes=())
    with pytest.raises(InfeasibleError, match="because the model's inputs lack a batch axis"):
        DataParallel().requires(problem(graph, cluster(4)))
    DataParallel().requires(problem(graph, cluster(1)))


def test_memory_that_does_not_do_is_refused() -> None:
    given = problem(perceptron([64, 64]), cluster(2, memory=1000), optimizer=Optimizer("adamw"))
    with pytest.raises(
        InfeasibleError, match=r"stage 0 of 1 needs 67\.00 KiB on device 0, 66\.02 KiB over"
    ):
        DataParallel().run(given)


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint("*", stage=1), "has stage 0 only"),
        (Constraint("*", devices=(0,)), "uses all for each node"),
        (Constraint("matmul*", split=(("n", 2),)), "a split other than"),
        (Constraint("matmul*", split=(("b", 1),)), "a split other than"),
        (Constraint("matmul*", split=()), "a split other than"),
        (Constraint("*", pipeline=1), "for pipeline 1, but the strategy uses 1"),
    ],
)
def test_constraints_it_cannot_follow_are_refused(constraint: Constraint, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        DataParallel().run(problem(perceptron([16, 16]), cluster(2), constraints=(constraint,)))


def test_constraints_it_follows_anyway_are_fine() -> None:
    resolved = (
        Constraint("*", stage=0),
        Constraint("re:mat.*", devices=()),
        Constraint("matmul0", split=(("b", 2),)),
    )
    assert (
        len(
            DataParallel()
            .run(problem(perceptron([16, 16]), cluster(2), constraints=resolved))
            .stages
        )
        == 1
    )
    whole = (Constraint("*", split=()),)
    assert (
        len(DataParallel().run(problem(perceptron([16, 16]), cluster(1), constraints=whole)).stages)
        == 1
    )


def test_a_constraint_may_name_its_nodes() -> None:
    wish = Constraint("an annotation", stage=1, nodes=("relu1",))
    with pytest.raises(
        ConfigurationError, match=r"^an annotation requires stage 1, but data_parallel"
    ):
        DataParallel().run(problem(perceptron([16, 16]), cluster(2), constraints=(wish,)))
