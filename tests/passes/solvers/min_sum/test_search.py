"""The default solver finds what trying all choices finds."""

from __future__ import annotations

import pytest
from hypothesis import given
from random_models import all_choices, models

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.solvers.min_sum import MinSum, solve


@given(models())
def test_it_finds_the_least_of_all_choices(model: MinSum) -> None:
    choices = all_choices(model)
    if not choices:
        with pytest.raises(InfeasibleError):
            solve(model)
        return
    answer = solve(model)
    assert answer.cost == pytest.approx(min(choices)[0], rel=1e-12, abs=1e-12)
    assert answer.cost == model.cost_of(answer.choice)
    assert answer.proven and answer.gap == 0 and answer.bound == answer.cost
