"""The generator: published vectors, positions, and keys."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopipe.backends.torch.runtime.random_numbers.philox import (
    CounterBlock,
    CounterRows,
    Key,
    Purpose,
    as_unsigned,
    draw_sequence,
    draw_words,
    draw_words_by_operators,
    integers_below,
    key_of,
    philox_4x32,
)
from autopipe.backends.torch.runtime.random_numbers.philox_numpy import draw_words_by_numpy

ONES = 0xFFFFFFFF
VECTORS = {
    "zeros": ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}
"""Counter, key and words: `kat_vectors` of Random123."""
POSITIONS = st.integers(0, 5000)
KEY = (7, 9)


@pytest.mark.parametrize("name", VECTORS)
def test_words_are_the_published_ones(name: str) -> None:
    counter, key, words = VECTORS[name]
    c0, c1, c2, c3 = map(torch.tensor, counter)
    k0, k1 = map(torch.tensor, key)
    assert tuple(map(int, philox_4x32((c0, c1, c2, c3), (k0, k1)))) == words
    assert tuple(map(int, philox_4x32((c0, c1, c2, c3), key))) == words


@pytest.mark.parametrize("name", VECTORS)
def test_rows_have_the_published_words(name: str) -> None:
    (c0, c1, c2, c3), key, words = VECTORS[name]
    column = [torch.tensor([[each]]) for each in (c0, c2, c3, c1)]
    found = draw_words(CounterRows(*column), 0, 1, key)
    assert found.dtype == torch.int32
    assert tuple(as_unsigned(found)[0].tolist()) == words


def test_counters_carry_into_their_second_word() -> None:
    zero = torch.tensor(0)
    found = as_unsigned(draw_sequence(KEY, 4 * (2**32 - 1), 8)).tolist()
    last = philox_4x32((torch.tensor(ONES), zero, zero, zero), KEY)
    carried = philox_4x32((zero, torch.tensor(1), zero, zero), KEY)
    assert found == [int(each) for each in (*last, *carried)]


def column(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)[:, None]


LOW = column(3, 2**32 - 1, 17)
HIGH = column(2**31, 5, 2**32 - 1)


@pytest.mark.parametrize(
    "rows",
    [
        CounterRows(column(2**32 - 3), column(0), column(0)),
        CounterRows(column(0, 2**40, 2**33 - 1), LOW, HIGH),
        CounterRows(column(7), column(0), HIGH, LOW),
        CounterRows(column(7), LOW, column(2**32 - 5), HIGH),
    ],
)
@pytest.mark.parametrize("key", [(2**32 - 1, 5), (torch.tensor(9), torch.tensor(2**31))])
@pytest.mark.parametrize("blocks", [(0, 1), (3, 3), (5, 1400)])
def test_numpy_draws_the_words_of_torch_operators(
    rows: CounterRows, key: Key, blocks: tuple[int, int]
) -> None:
    expected = draw_words_by_operators(rows, *blocks, key)
    found = draw_words_by_numpy(rows.first, rows.second, rows.third, rows.fourth, *blocks, key)
    assert torch.equal(found, expected)
    assert torch.equal(draw_words(rows, *blocks, key), expected)


def test_words_broadcast() -> None:
    """Counters of size 1 along a dimension apply to all of it."""
    rows = torch.arange(3)[:, None]
    blocks = torch.arange(2)[None]
    key = torch.tensor(1), torch.tensor(2)
    zero = torch.zeros((), dtype=torch.int64)
    found: CounterBlock = philox_4x32((blocks, rows, zero, zero), key)
    for row, block in itertools.product(range(3), range(2)):
        one = philox_4x32((blocks[0, block], rows[row, 0], zero, zero), key)
        assert [int(each[row, block]) for each in found] == [int(each) for each in one]


@given(POSITIONS, st.integers(1, 5000))
def test_parts_equal_the_whole(start: int, count: int) -> None:
    assert torch.equal(
        draw_sequence(KEY, start, count), draw_sequence(KEY, 0, start + count)[start:]
    )


def test_keys_differ_by_seed_purpose_and_number() -> None:
    keys = {
        key_of(0, Purpose.BATCH, 1),
        key_of(1, Purpose.BATCH, 1),
        key_of(0, Purpose.FORWARD, 1),
        key_of(0, Purpose.BATCH, 2),
        key_of(0, Purpose.BATCH, 1, 5),
        key_of(0, Purpose.BATCH, 2**127),
    }
    assert len(keys) == 6
    runs = [draw_sequence(key, 0, 8) for key in keys]
    assert not any(torch.equal(*pair) for pair in itertools.combinations(runs, 2))


def test_keys_are_equal_on_every_machine() -> None:
    assert key_of(7, Purpose.PARAMETER, 2) == (1734722684, 2188976234)


@given(st.integers(1, 300), POSITIONS)
def test_integers_stay_below_their_limit(below: int, start: int) -> None:
    drawn = integers_below(draw_sequence(KEY, start, 64), below)
    assert int(drawn.min()) >= 0 and int(drawn.max()) < below


@pytest.mark.parametrize("below", [1, 5, 2**31, 2**40])
def test_integers_cover_their_range(below: int) -> None:
    drawn = integers_below(draw_sequence(KEY, 0, 20_000), below)
    largest = min(below, 2**31)
    assert 0 <= int(drawn.min()) < max(1, largest // 1000)
    assert largest - max(1, largest // 1000) <= int(drawn.max()) < largest
    if below == 5:
        counts = torch.bincount(drawn, minlength=5) / len(drawn)
        torch.testing.assert_close(counts, torch.full((5,), 0.2), atol=0.015, rtol=0)
