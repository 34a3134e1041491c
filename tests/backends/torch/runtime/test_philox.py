"""Streams that any rank draws any part of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.backends.torch.runtime import philox

PLACES = st.integers(0, 5000)


def test_words_are_those_of_philox() -> None:
    """From the start of a stream they are what numpy's generator gives under the stream's key."""
    key = np.random.SeedSequence([7, 1, 2]).generate_state(2, np.uint64)
    assert np.array_equal(philox.words(7, (1, 2), 0, 100), np.random.Philox(key=key).random_raw(100))


@given(PLACES, PLACES)
def test_parts_equal_the_whole(start: int, count: int) -> None:
    whole = philox.words(3, (1,), 0, start + count)
    assert np.array_equal(philox.words(3, (1,), start, count), whole[start:])


@given(PLACES, st.integers(0, 200))
@pytest.mark.parametrize("made", [philox.as_uniform, philox.box_muller_normal])
def test_numbers_depend_on_their_place_alone(made: object, start: int, count: int) -> None:
    assert callable(made)
    part, whole = philox.words(3, (1, 4), start, count), philox.words(3, (1, 4), 0, start + count)
    assert np.array_equal(made(part), made(whole)[start:])


@given(st.lists(st.tuples(PLACES, st.integers(0, 200)), max_size=5))
def test_a_reader_goes_to_any_place(reads: list[tuple[int, int]]) -> None:
    reader = philox.WordReader(philox.key_of(3, (1,)))
    whole = philox.words(3, (1,), 0, 6000)
    for start, count in reads:
        assert np.array_equal(reader.read(start, count), whole[start : start + count])


def test_streams_and_seeds_differ() -> None:
    drawn = [philox.words(seed, stream, 0, 8) for seed, stream in [(0, (1,)), (1, (1,)), (0, (2,)), (0, (1, 5))]]
    for index, one in enumerate(drawn):
        assert all(not np.array_equal(one, other) for other in drawn[:index])


def test_normal_numbers_have_mean_zero_and_deviation_one() -> None:
    drawn = philox.box_muller_normal(philox.words(0, (1,), 0, 200_000))
    assert np.isfinite(drawn).all()
    assert abs(drawn.mean()) < 0.01
    assert abs(drawn.std() - 1) < 0.01
    assert abs(np.mean(drawn**4) - 3) < 0.1


def test_uniform_numbers_fill_the_unit_interval() -> None:
    drawn = philox.as_uniform(philox.words(0, (1,), 0, 100_000))
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert np.abs(np.histogram(drawn, 10, (0, 1))[0] / 10_000 - 1).max() < 0.05


@given(st.integers(1, 300), PLACES)
def test_whole_numbers_stay_below_their_limit(below: int, start: int) -> None:
    drawn = philox.integers(philox.words(0, (1,), start, 64), below)
    assert drawn.min() >= 0
    assert drawn.max() < below


def test_whole_numbers_take_every_value() -> None:
    assert set(philox.integers(philox.words(0, (1,), 0, 1000), 5)) == set(range(5))
