"""What constraints ask of each node, and that it can be done."""

from __future__ import annotations

import pytest

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.placement import Split
from autopipe.ir.problem import Constraint
from autopipe.passes.analysis.constraints import required_splits, resolve_constraints
from autopipe.passes.analysis.operators import sample_axes
from tests.passes.cost.graphs import Builder, cluster, perceptron, problem

GRAPH = perceptron([16, 32])
"""matmul0 [8, 16] → [8, 32], relu1."""


def wished(*constraints: Constraint) -> dict[int, tuple[Split, ...]]:
    given = problem(GRAPH, cluster(8), constraints=constraints)
    return required_splits(resolve_constraints(given), sample_axes(GRAPH))


def test_a_node_is_split_along_the_axes_that_it_has() -> None:
    assert wished(Constraint("*", split=(("n", 4), ("b", 2)))) == {
        0: (Split("n", 4), Split("m", 2)),
        1: (Split("x0", 2),),
    }
    assert wished(Constraint("*", split=(("n", 4),))) == {0: (Split("n", 4),)}, (
        "the other is left open"
    )


def test_whole_is_not_open() -> None:
    assert wished(Constraint("*")) == {}
    assert wished(Constraint("*", split=())) == {0: (), 1: ()}
    assert wished(Constraint("*", split=(("b", 1),))) == {0: (), 1: ()}


def test_an_axis_inside_another_leaves_several_blocks() -> None:
    builder = Builder(8, 16)
    graph = builder.finish(
        builder.node("Flatten", (builder.parameter("p", (8, 4, 6)),), (8, 24)), builder.relu("x")
    )
    given = problem(graph, cluster(8), constraints=(Constraint("flatten0", split=(("a2", 2),)),))
    with pytest.raises(
        ConfigurationError,
        match=r"'flatten0': .* several separate parts of a tensor \(choose other splits.*",
    ):
        required_splits(resolve_constraints(given), sample_axes(graph))
