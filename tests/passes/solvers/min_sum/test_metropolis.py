"""The random walk on small models."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from random_models import all_choices, models

from autopipe.passes.solvers.min_sum import Edge, MinSum, solve
from autopipe.passes.solvers.min_sum.metropolis import random_walk

seeds = st.integers(0, 100)


@given(models(), seeds, st.floats(0, 2), st.integers(0, 3))
def test_a_walk_is_never_worse_than_its_start(
    model: MinSum, seed: int, temperature: float, followers: int
) -> None:
    start = [0] * len(model.costs)
    assume(model.cost_of(start) < math.inf)
    answer = random_walk(
        model,
        start,
        iterations=50,
        temperature=temperature,
        seed=seed,
        followers=followers % len(start),
    )
    assert answer.cost == model.cost_of(answer.choice) <= model.cost_of(start)
    assert answer.memory == model.memory_of(answer.choice)
    assert not answer.proven
    assert answer == random_walk(
        model,
        start,
        iterations=50,
        temperature=temperature,
        seed=seed,
        followers=followers % len(start),
    )


@given(models(forbidden=False, memory=True), seeds)
def test_a_walk_stays_within_the_limit_or_reduces_memory(model: MinSum, seed: int) -> None:
    needs = sorted(memory for _, memory in all_choices(model))
    limit = needs[len(needs) // 2]
    start = [int(vector.argmax()) for vector in model.memory or ()]
    answer = random_walk(
        model, start, iterations=400, temperature=0.5, seed=seed, memory_limit=limit
    )
    assert answer.fits == (answer.memory <= limit)
    assert answer.memory <= max(limit, model.memory_of(start))


def chain(followers: bool) -> MinSum:
    """Return twenty nodes for which equal configurations are cheapest. With followers, there is a
    follower between each pair of nodes, which costs if it differs.
    """
    differ = 1.0 - np.eye(3)
    costs = [np.array([5.0, 4.0, 6.0])] * 20
    if not followers:
        return MinSum(tuple(costs), tuple(Edge(node, node + 1, differ) for node in range(19)))
    between = [Edge(end, 20 + node, differ) for node in range(19) for end in (node, node + 1)]
    return MinSum((*costs, *[np.zeros(3)] * 19), tuple(between))


@pytest.mark.parametrize("followers", [0, 19])
def test_a_long_walk_finds_the_minimum(followers: int) -> None:
    model = chain(followers > 0)
    answer = random_walk(
        model, [0] * len(model.costs), iterations=4000, temperature=0.1, followers=followers
    )
    assert answer.cost == solve(model).cost == 80.0


def test_at_temperature_0_no_step_increases_the_cost() -> None:
    apart = np.array([[0.0, 9.0], [9.0, 0.0]])
    model = MinSum((np.array([1.0, 0.0]),) * 2, (Edge(0, 1, apart),))
    assert random_walk(model, [0, 0], iterations=200, temperature=0.0).choice == (0, 0)
    assert random_walk(model, [0, 0], iterations=200, temperature=5.0).choice == (1, 1)
