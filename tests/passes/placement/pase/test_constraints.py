"""Tests that pase satisfies constraints or rejects them by name."""

from __future__ import annotations

import pytest

from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.ir.placement import Placement, Split
from autopipe.ir.problem import Constraint
from autopipe.passes.placement.pase.strategy import Pase
from tests.passes.cost.graphs import cluster, perceptron, problem

GRAPH = perceptron([12, 24, 12])
"""matmul0 relu1 matmul2 relu3, on eight samples."""


def run(*constraints: Constraint, stages: int = 1, devices: int = 4) -> Placement:
    return Pase(stages=stages).run(problem(GRAPH, cluster(devices), constraints=constraints))


def test_a_required_split_is_kept_and_other_nodes_adapt() -> None:
    (stage,) = run(Constraint("matmul0", split=(("n", 2), ("b", 2)))).stages
    assert stage.splits_of(0) == (Split("n", 2), Split("m", 2)), (
        "outer to inner as asked for; b are the samples"
    )


def test_an_empty_split_is_required() -> None:
    (stage,) = run(Constraint("*", split=())).stages
    assert stage.splits == ()


def test_devices_of_the_one_stage() -> None:
    (stage,) = run(Constraint("relu1", devices=(2, 3))).stages
    assert stage.devices == (2, 3)


def test_stages_and_their_devices() -> None:
    first, second = run(Constraint("matmul2", stage=0), stages=2).stages
    assert 2 in first.nodes and second.nodes == (3,)
    first, second = run(Constraint("relu1", devices=(2, 3)), stages=2).stages
    assert first.nodes == (0,) and second.devices == (2, 3)


@pytest.mark.parametrize(
    ("constraints", "stages", "message", "where"),
    [
        ((Constraint("matmul*", split=(("n", 2),)), Constraint("matmul2", split=(("n", 4),))), 1, "'matmul\\*' and "
         "the constraint on 'matmul2' require different splits", "'matmul2'"),
        ((Constraint("matmul0", split=(("n", 5),)),), 1, "'matmul0' splits axis 'n' into 5 parts, which do not divide "
         "its size 24", "'matmul0'"),
        ((Constraint("matmul0", split=(("n", 3),)),), 1, "require the splits n:3, whose product of degrees does not divide the 4 devices",
         "'matmul0'"),
        ((Constraint("matmul0", split=(("n", 8),)),), 1, "require the splits n:8, whose product of degrees does not divide the 4 devices",
         "'matmul0'"),
        ((Constraint("matmul0", split=(("q", 2),)),), 1, "splits axis 'q', but none of the matching nodes has", ""),
        ((Constraint("nothing", split=(("n", 2),)),), 1, "'nothing' matches the name of no node", "constraints"),
        ((Constraint("relu1", devices=(4,)),), 1, "requires device 4, but the cluster has 4 devices", ""),
        ((Constraint("relu1", devices=(0,)), Constraint("relu3", devices=(1,))), 1, "require different devices, but "
         "strategy.stages is 1", ""),
        ((Constraint("relu1", stage=1),), 1, "'relu1' requires stage 1, but pase has 1 stage", ""),
        ((Constraint("relu1", devices=(0, 2)),), 2, "requires devices \\[0, 2\\], but no stage uses", ""),
        ((Constraint("relu1", stage=0, devices=(2, 3)),), 2, "requires stage 0 and the devices of stage 1", ""),
        ((Constraint("matmul0", stage=1), Constraint("relu3", stage=0)), 2, "permit no boundary after stage 0 of 2: 'matmul0' "
         "comes before 'relu3'", "constraints"),
        ((Constraint("*", stage=0),), 2, "permit no boundary after stage 0 of 2", "constraints"),
        ((Constraint("relu1", stage=0, pipeline=1),), 1, "is for pipeline 1, but the strategy uses 1 pipeline", ""),
    ],
)  # fmt: skip
def test_constraints_that_cannot_be_satisfied_are_named(
    constraints: tuple[Constraint, ...], stages: int, message: str, where: str
) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        run(*constraints, stages=stages)
    assert (caught.value.where or "") == where


def test_expensive_constraints_are_satisfied() -> None:
    alone = (Constraint("matmul0", split=(("k", 4),)), Constraint("relu1", split=(("x1", 4),)))
    (stage,) = run(
        *alone, Constraint("matmul2", split=(("n", 4),)), Constraint("relu3", split=(("x0", 4),))
    ).stages
    assert [stage.splits_of(node)[0].axis for node in range(4)] == ["k", "x1", "n", "x0"]


def test_an_axis_that_no_degree_divides_is_not_split() -> None:
    """Seven devices cannot split a model whose sizes are even: each device computes everything."""
    (stage,) = run(devices=7).stages
    assert stage.splits == ()


def test_the_papers_search_space_rejects_constraints() -> None:
    given = problem(GRAPH, cluster(4), constraints=(Constraint("*", split=()),))
    with pytest.raises(AutopipeError, match="supports neither constraints nor several stages"):
        Pase(costs="pase-paper", search_space="paper").requires(given)
