"""Elimination in each ordering finds the minimum over all choices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_models import all_choices, models

from autopipe.ir.errors import AutopipeError, ConfigurationError, InfeasibleError
from autopipe.passes.solvers.min_sum import Edge, MinSum, TableTooLargeError, eliminate
from autopipe.passes.solvers.min_sum.elimination import ORDERINGS


@given(models(), st.sampled_from(sorted(ORDERINGS)))
def test_elimination_finds_the_minimum(model: MinSum, ordering: str) -> None:
    choices = all_choices(model)
    if not choices:
        with pytest.raises(InfeasibleError):
            eliminate(model, ordering)
        return
    answer = eliminate(model, ordering)
    assert answer.cost == pytest.approx(min(choices)[0], rel=1e-12, abs=1e-12)
    assert answer.cost == model.cost_of(answer.choice)
    assert answer.proven and answer.gap == 0 and answer.bound == answer.cost


def test_integer_costs_are_exact() -> None:
    large = 2**60
    model = MinSum(
        (np.array([large + 1, large + 2]), np.array([5, 3])),
        (Edge(1, 0, np.array([[0, 0], [2, 2]])),),
    )
    answer = eliminate(model)
    assert (answer.choice, answer.cost) == ((0, 0), large + 6)
    assert isinstance(answer.cost, int)


def test_too_large_tables_are_rejected_with_their_size() -> None:
    vector = np.zeros(100)
    matrix = np.zeros((100, 100))
    everyone = tuple(Edge(u, v, matrix) for u in range(6) for v in range(u))
    with pytest.raises(
        TableTooLargeError, match=r"requires 75\.3 GiB of tables, above the maximum of 2\.00 GiB"
    ):
        eliminate(MinSum((vector,) * 6, everyone))


def test_equal_layers_are_eliminated_once() -> None:
    """A star with a thousand equal leaves has one table."""
    leaf = np.arange(50.0)
    hub = np.arange(60.0)
    matrix = np.ones((50, 60))
    edges = tuple(Edge(u, 1000, matrix) for u in range(1000))
    assert eliminate(MinSum((leaf,) * 1000 + (hub,), edges)).cost == 1000.0


def test_mismatched_shapes_are_rejected() -> None:
    two = np.zeros(2)
    three = np.zeros(3)
    with pytest.raises(AutopipeError, match=r"edge 0-1 has shape \(3, 2\), expected \(2, 3\)"):
        MinSum((two, three), (Edge(0, 1, np.zeros((3, 2))),))
    with pytest.raises(AutopipeError, match="memory must consist of one vector per node"):
        MinSum((two, three), memory=(two, two))
    with pytest.raises(AutopipeError, match="the costs of node 1 have shape"):
        MinSum((two, np.zeros(0)))


def test_an_unknown_ordering_is_rejected() -> None:
    with pytest.raises(
        ConfigurationError, match=r"'random'.*use one of generate_seq, breadth_first, min_fill"
    ):
        eliminate(MinSum((np.zeros(2),)), "random")


def test_sizes_beyond_the_range_of_floats_are_reported() -> None:
    vector = np.zeros(100)
    matrix = np.zeros((100, 100))
    everyone = tuple(Edge(u, v, matrix) for u in range(200) for v in range(u))
    with pytest.raises(TableTooLargeError, match=r"requires 2\^1\d\d\d B of tables"):
        eliminate(MinSum((vector,) * 200, everyone))
