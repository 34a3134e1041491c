"""Normal numbers from words: what a library's logarithm and cosine give, but for rounding."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopipe.backends.torch.runtime import philox as box_muller

WORDS = st.integers(0, 2**64 - 1)
EXTREMES = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 2**64 - 2**32, (2**31 - 1) << 32, 1 << 30, 3 << 30]


def by_library(words: list[int]) -> np.ndarray:
    radius = np.array([((word >> 32) + 1) / 2**32 for word in words])
    angle = np.array([(word & (2**32 - 1)) / 2**32 for word in words])
    return np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)


@given(st.lists(WORDS, max_size=50))
def test_any_words(words: list[int]) -> None:
    given_words = EXTREMES + words
    found = box_muller.box_muller_normal(np.array(given_words, np.uint64))
    np.testing.assert_allclose(found, by_library(given_words), rtol=1e-11, atol=1e-12)


@given(st.integers(1, 100), st.integers(0, 99))
def test_a_number_is_its_words_alone(count: int, place: int) -> None:
    """Whatever stands beside it, and however far into a vector register."""
    words = np.random.default_rng(0).integers(0, 2**64, 200, np.uint64)
    whole = box_muller.box_muller_normal(words)
    assert np.array_equal(box_muller.box_muller_normal(words[place : place + count]), whole[place : place + count])
    assert np.array_equal(box_muller.box_muller_normal(words.reshape(20, 10)), whole.reshape(20, 10))


def test_numbers_are_the_same_on_every_machine() -> None:
    words = np.array([0x0123456789ABCDEF, 0xFEDCBA9876543210, 1 << 63], np.uint64)
    assert [each.hex() for each in box_muller.box_muller_normal(words)] == [
        "-0x1.9977215aaf14cp+1",
        "-0x1.77c3c298ba2d7p-4",
        "0x1.2d6abe42fcf85p+0",
    ]
