"""Repeated parts of sequences: against brute force on short ones, and where wiring differs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.repeats import Repeat, Wiring, find_repeats

Operands = Sequence[tuple[int, ...]]


def find(labels: Sequence[int], operands: Operands) -> tuple[Repeat, ...]:
    """Return the repeated parts of matmuls with one result each."""
    wiring = Wiring(operands, np.arange(len(labels) + 1))
    every = np.ones(len(labels), dtype=bool)
    return find_repeats(np.array(labels), wiring, every, every)


def chain(labels: Sequence[int]) -> Operands:
    """Return the operands of nodes that each read the result of the previous node."""
    return [(index - 1,) for index in range(len(labels))]


def assert_equal_and_disjoint(
    repeats: Sequence[Repeat], labels: Sequence[int], operands: Operands
) -> None:
    """Check the definition of equal ranges, written independently of the search."""
    used: set[int] = set()
    for each in repeats:
        assert len(each.starts) >= 2
        for start in each.starts:
            nodes = set(range(start, start + each.length))
            assert nodes <= set(range(len(labels)))
            assert not nodes & used
            used |= nodes
            first = each.starts[0]
            outside: set[tuple[int, int]] = set()
            for offset in range(each.length):
                assert labels[start + offset] == labels[first + offset]
                pairs = list(zip(operands[first + offset], operands[start + offset], strict=True))
                for one, other in pairs:
                    assert (one >= first) == (other >= start)
                    if one >= first:
                        assert one - first == other - start
                    else:
                        outside.add((one, other))
            assert len({one for one, _ in outside}) == len(outside)
            assert len({other for _, other in outside}) == len(outside)


def best_coverage(labels: Sequence[int]) -> int:
    """Return the maximum number of nodes of consecutive equal ranges of one length, by trying every
    start and length of at least two.
    """
    best = 0
    for length in range(2, len(labels) // 2 + 1):
        for start in range(len(labels) - 2 * length + 1):
            count = 1
            while list(labels[start + count * length : start + (count + 1) * length]) == list(
                labels[start : start + length]
            ):
                count += 1
            if count > 1:
                best = max(best, count * length)
    return best


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 2), max_size=24))
def test_chains_against_brute_force(labels: list[int]) -> None:
    found = find(labels, chain(labels))
    assert_equal_and_disjoint(found, labels, chain(labels))
    assert sum(each.length * len(each.starts) for each in found) >= best_coverage(labels)


@st.composite
def wired_sequences(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, ...]]]:
    part = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    labels = draw(st.lists(st.integers(0, 2), max_size=3))
    labels = [*labels, *(part * draw(st.integers(1, 4))), *draw(st.lists(st.integers(0, 2)))][:24]
    arities = {label: label % 2 + 1 for label in range(3)}
    operands = [
        tuple(draw(st.integers(-2, index - 1)) for _ in range(arities[label]))
        for index, label in enumerate(labels)
    ]
    return labels, operands


@settings(deadline=None, max_examples=300)
@given(wired_sequences())
def test_ranges_with_any_wiring_are_equal(case: tuple[list[int], list[tuple[int, ...]]]) -> None:
    labels, operands = case
    assert_equal_and_disjoint(find(labels, operands), labels, operands)


def test_a_layer_is_not_a_pair_of_equal_layers() -> None:
    labels = [9, *[0, 1, 2] * 6, 8]
    assert find(labels, chain(labels)) == (Repeat(3, (1, 4, 7, 10, 13, 16)),)


def test_a_layer_begins_where_the_fewest_values_cross() -> None:
    """Layers of a normalization (0), two projections (1, 2) and a sum with the residual (3)."""
    labels = [3]
    operands: list[tuple[int, ...]] = [(-1, -1)]
    for _ in range(4):
        hidden = len(labels) - 1
        labels += [0, 1, 2, 3]
        operands += [(hidden,), (hidden + 1,), (hidden + 2,), (hidden + 3, hidden)]
    labels += [0, 7]
    operands += [(len(operands) - 1,), (len(operands),)]
    assert find(labels, operands) == (Repeat(4, (1, 5, 9, 13)),)


def test_parts_inside_layers() -> None:
    labels = [*[4, *[0, 1] * 3, 5] * 3]
    (layer,) = find(labels, chain(labels))
    assert layer == Repeat(8, (0, 8, 16), (Repeat(2, (1, 3, 5)),))


def test_equal_layers_far_apart_are_one_part() -> None:
    labels = [*[0, 1, 2] * 2, 7, 8, 9, *[0, 1, 2] * 2, 6, 0, 1, 2]
    assert find(labels, chain(labels)) == (Repeat(3, (0, 3, 9, 12, 16)),)


def test_layers_with_other_wiring_inside_are_not_equal() -> None:
    labels = [0, 1, 2] * 2
    operands = [(-1,), (0, 0), (1,), (2,), (3, 2), (4,)]
    assert find(labels, operands) == ()


def test_layers_may_read_any_value_from_outside() -> None:
    """The decoder of a U-Net: each of its layers reads the result of another encoder layer."""
    labels = [5, 6, 7, 8, *[0, 1] * 3]
    operands = [(-1,), (0,), (1,), (2,), (3,), (4, 2), (5,), (6, 1), (7,), (8, 0)]
    assert find(labels, operands) == (Repeat(2, (4, 6, 8)),)


def test_small_parallel_parts_are_no_layers() -> None:
    """Three projections of one value."""
    labels = [9, *[0, 1] * 3, 4]
    operands = [(-1,), (0,), (1,), (0,), (3,), (0,), (5,), (2, 4, 6)]
    assert find(labels, operands) == ()
