"""Normal numbers: their distribution, their error, and equal bits everywhere."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from autopipe.backends.torch.runtime.random_numbers.normal_numbers import (
    normal_quantiles,
    standard_normal,
)
from autopipe.backends.torch.runtime.random_numbers.philox import draw_sequence

COUNT = 4_000_000
KEY = (1, 2)
WORDS = st.integers(-(2**31), 2**31 - 1)
EXTREMES = [0, -1, 1, 2**31 - 1, -(2**31), 2**30, 2**24, 2**24 + 1, -(2**23), 2**30 - 1]
NORMAL = NormalDist()


def exact(word: int) -> float:
    """The number of a word by the library's quantiles."""
    u = word + 0.5
    distance = -NORMAL.inv_cdf(abs(u) / 2**32)
    return math.copysign(distance, u)


@given(st.lists(WORDS, max_size=50))
def test_the_error_is_below_a_millionth(words: list[int]) -> None:
    given_words = EXTREMES + words
    found = standard_normal(torch.tensor(given_words, dtype=torch.int32))
    expected = [exact(word) for word in given_words]
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=1.2e-7, atol=1e-6)


def test_the_largest_numbers() -> None:
    """Half of a word's values are beyond each side of zero, and the last of them is the 2^-33
    quantile.
    """
    found = standard_normal(torch.tensor([0, -1], dtype=torch.int32)).tolist()
    assert found == pytest.approx([-NORMAL.inv_cdf(2.0**-33), NORMAL.inv_cdf(2.0**-33)], rel=1e-6)


@given(st.integers(1, 100), st.integers(0, 99))
def test_a_number_depends_on_its_word_only(count: int, place: int) -> None:
    words = draw_sequence(KEY, 0, 200)
    whole = standard_normal(words)
    assert torch.equal(standard_normal(words[place : place + count]), whole[place : place + count])
    assert torch.equal(standard_normal(words.view(20, 10).t()), whole.view(20, 10).t())


def test_numbers_are_equal_on_every_machine() -> None:
    words = torch.tensor([0x01234567, -0x01234568, 1 << 30, 2**31 - 1, 0], dtype=torch.int32)
    assert [each.hex() for each in standard_normal(words).tolist()] == [
        "0x1.4ee2de0000000p+1",
        "-0x1.4ee2de0000000p+1",
        "0x1.5956b80000000p-1",
        "0x0.0p+0",
        "0x1.95a11a0000000p+2",
    ]


@pytest.fixture(scope="module")
def drawn() -> np.ndarray:
    return standard_normal(draw_sequence(KEY, 0, COUNT)).double().numpy()


def test_the_distribution_is_normal(drawn: np.ndarray) -> None:
    """Kolmogorov and Smirnov: below the distance that one in a thousand samples of this size
    exceeds.
    """
    assert stats.kstest(drawn, "norm").statistic < 1.95 / math.sqrt(COUNT)


@pytest.mark.parametrize(("power", "moment"), [(1, 0), (2, 1), (3, 0), (4, 3), (6, 15)])
def test_moments(drawn: np.ndarray, power: int, moment: int) -> None:
    """Within four standard errors: the variance of x^k is E x^2k - (E x^k)²."""
    variance = math.prod(range(1, 2 * power, 2)) - moment**2
    assert abs((drawn**power).mean() - moment) < 4 * math.sqrt(variance / COUNT)


@pytest.mark.parametrize("beyond", [2.0, 3.0, 4.0, 4.5])
def test_tails(drawn: np.ndarray, beyond: float) -> None:
    expected = COUNT * NORMAL.cdf(-beyond)
    for count in (int((drawn > beyond).sum()), int((drawn < -beyond).sum())):
        assert abs(count - expected) < 4 * math.sqrt(expected)


def test_neighbours_are_independent(drawn: np.ndarray) -> None:
    for distance in (1, 2, 3, 4, 64):
        assert abs(np.corrcoef(drawn[:-distance], drawn[distance:])[0, 1]) < 4 / math.sqrt(COUNT)
        assert abs(
            np.corrcoef(drawn[:-distance] ** 2, drawn[distance:] ** 2)[0, 1]
        ) < 4 / math.sqrt(COUNT)


def test_quantiles_equal_the_library() -> None:
    probabilities = np.concatenate([10.0 ** -np.linspace(0.302, 12.0, 2000), [0.5, 0.075]])
    expected = [NORMAL.inv_cdf(each) for each in probabilities]
    np.testing.assert_allclose(normal_quantiles(probabilities), expected, rtol=1e-14, atol=1e-14)


def test_compiled_numbers_are_equal() -> None:
    words = draw_sequence(KEY, 0, 1000)
    compiled = torch.compile(
        lambda drawn: standard_normal(drawn) * 2.0, backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(words), standard_normal(words) * 2.0)
