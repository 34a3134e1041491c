"""Layer and edge costs against the paper's formulas, written out for single configurations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.passes.placement.pase.paper_costs import (
    Cost,
    CrossEntropyCost,
    Degrees,
    ElementwiseCost,
    FreeCost,
    LSTMCost,
    MatmulCost,
    NormCost,
    PoolingCost,
    ReductionCost,
    SoftmaxCost,
    transfer_cost,
)

R = 5000.0


def degrees(*rows: tuple[int, ...]) -> Degrees:
    return np.array(rows, dtype=np.int64)


def cost(kind: Cost, extents: tuple[int, ...], split: tuple[int, ...]) -> float:
    (found,) = kind.operations(extents, degrees(split))
    return float(found)


def ring(words: float, devices: int) -> float:
    return 2 * R * words / devices * (devices - 1)


def test_a_product() -> None:
    product = MatmulCost(batch=(0,), rows=(1,), columns=(2,), summed=(3,), pointwise=2)
    m = 16 / 2
    n = 32 / 4
    k = 64 / 8
    part = 3 * m * n * k + 3 * 2 * m * n + ring(m * n, 8) + ring(m * k, 4) + ring(n * k, 2)
    assert cost(product, (6, 16, 32, 64), (3, 2, 4, 8)) == 2 * part


def test_a_whole_product_is_its_work() -> None:
    assert cost(MatmulCost((), (0,), (1,), (2,)), (4, 5, 6), (1, 1, 1)) == 3 * 4 * 5 * 6


def test_recurrence_moves_what_the_next_step_lacks() -> None:
    extents = (2, 10, 8, 16, 16)
    product = 3 * 80 * 64 * 32 + 9 * 80 * 64
    assert cost(LSTMCost(), extents, (1, 1, 1, 1, 1)) == 2 * product
    assert cost(LSTMCost(), extents, (2, 1, 1, 1, 1)) == product
    columns = 3 * 80 * 32 * 32 + 9 * 80 * 32 + ring(80 * 32, 2)
    assert cost(LSTMCost(), extents, (1, 1, 1, 2, 1)) == 2 * columns + R * 20 * (8 * 16 - 8 * 8)
    summed = 3 * 80 * 64 * 16 + 9 * 80 * 64 + ring(80 * 64, 2)
    assert cost(LSTMCost(), extents, (1, 1, 1, 1, 2)) == 2 * summed + R * 20 * 8 * 8


def test_rows() -> None:
    assert cost(SoftmaxCost(1), (8, 32), (2, 4)) == 4 * 32 + 32 * 32 + 2 * ring(4, 4) + ring(
        4 * 32, 4
    )
    assert cost(CrossEntropyCost(1), (8, 32), (2, 4)) == 4 * 32 + 2 * 4 + 2 * R * 4
    assert cost(CrossEntropyCost(1), (8, 32), (2, 1)) == 4 * 128 + 2 * 4
    assert cost(NormCost(2), (8, 4, 32), (2, 4, 8)) == 16 * 16 + 4 * ring(4, 8) + 4 * ring(4, 8)
    assert cost(ReductionCost((1,)), (8, 32), (2, 4)) == ring(32, 4)
    assert cost(ElementwiseCost(1), (8, 32), (2, 4)) == 2 * 32
    assert cost(FreeCost(), (8, 32), (2, 4)) == 0


def test_pooling_needs_its_neighbours_rows() -> None:
    pooling = PoolingCost(2, (8, 4, 55, 55), (3, 5))
    assert cost(pooling, (8, 4, 27, 27), (2, 1, 1, 1)) == 4 * 4 * 27 * 27
    halo = ((55 / 3 + 3) * 55 - 55 / 3 * 55) * 32
    assert cost(pooling, (8, 4, 27, 27), (1, 1, 3, 1)) == pytest.approx(32 * 9 * 27 + R * halo)


SPLITS = st.lists(st.tuples(*[st.sampled_from([1, 2, 4])] * 3), min_size=1, max_size=4)


@given(SPLITS, SPLITS)
def test_transfers(source: list[tuple[int, ...]], target: list[tuple[int, ...]]) -> None:
    extents = (4, 8, 12)
    found = transfer_cost(extents, degrees(*source), degrees(*target))
    for (row, have), (column, want) in itertools.product(enumerate(source), enumerate(target)):
        held, needed = (
            [n / c for n, c in zip(extents, each, strict=True)] for each in (have, want)
        )
        common = 0.0 if math.prod(want) > math.prod(have) else math.prod(map(min, held, needed))
        assert found[row, column] == 2 * R * max(0.0, math.prod(needed) - common)
