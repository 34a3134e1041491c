"""Tests that the sums of mixtures of two choices are the model's, and that the best mixture within
the limit is returned.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import layered

from autopipe.passes.placement.tepdist.levels import best_mixture
from autopipe.passes.solvers.min_sum import MinSum


@settings(max_examples=100)
@given(layered(memory=True), st.integers(0, 60), st.integers(0, 99))
def test_the_best_mixture_is_found(model: MinSum, limit: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, last = (tuple(int(rng.integers(len(costs))) for costs in model.costs) for _ in range(2))
    rank = rng.integers(0, 4, len(model.costs))
    mixed = [tuple(np.where(rank < at, first, last).tolist()) for at in range(5)]
    fitting = [float(model.cost_of(each)) for each in mixed if model.memory_of(each) <= limit]
    found = best_mixture(model, rank, first, last, limit)
    if min(fitting, default=np.inf) == np.inf:
        assert found is None
    else:
        assert found is not None and model.memory_of(found) <= limit
        assert model.cost_of(found) == min(fitting)
