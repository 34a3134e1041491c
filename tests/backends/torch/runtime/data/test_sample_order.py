"""The order of samples over steps and epochs: each once an epoch, the same wherever a run goes
on.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.backends.torch.runtime.data.sample_order import (
    RunProgress,
    SampleOrder,
    shuffle_positions,
)


@given(st.integers(1, 3000), st.integers(0, 5), st.integers(0, 5))
def test_an_epoch_is_a_permutation_whoever_asks_for_which_part(
    samples: int, seed: int, epoch: int
) -> None:
    whole = shuffle_positions(np.arange(samples), samples, seed, epoch)
    assert sorted(whole) == list(range(samples))
    part = np.arange(samples // 3, samples)
    assert np.array_equal(shuffle_positions(part, samples, seed, epoch), whole[samples // 3 :])


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        tuple(shuffle_positions(np.arange(50), 50, seed, epoch))
        for seed in range(10)
        for epoch in range(10)
    }
    assert len(orders) == 100


def test_every_sample_comes_to_every_place() -> None:
    """Of 5 samples in 6,000 epochs each is at each place 1,200 times, within five standard
    deviations (155).
    """
    counts = np.zeros((5, 5), int)
    for epoch in range(6000):
        counts[np.arange(5), shuffle_positions(np.arange(5), 5, 7, epoch)] += 1
    assert abs(counts - 1200).max() < 155


def test_neighbours_do_not_stay_neighbours() -> None:
    whole = shuffle_positions(np.arange(100_000), 100_000, 0, 0)
    assert abs(np.corrcoef(whole[:-1], whole[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(100_000), whole)[0, 1]) < 0.02


def walk(order: SampleOrder) -> list[list[int]]:
    """The stored samples of each step, to the end."""
    found = []
    step = order.begin.steps
    while count := order.sample_count(step):
        found.append(
            list(order.stored_indices(order.first_sample(step), order.first_sample(step) + count))
        )
        step += 1
    assert step == order.steps_until_end
    return found


def joined(steps: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(steps))


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("keeps_last", [True, False])
def test_epochs_take_all_samples_or_all_that_fill_batches(
    seed: int | None, keeps_last: bool
) -> None:
    steps = walk(SampleOrder(20, 6, keeps_last, seed, epochs=2))
    assert [len(each) for each in steps] == ([6, 6, 6, 2] if keeps_last else [6, 6, 6]) * 2
    for epoch in (steps[: len(steps) // 2], steps[len(steps) // 2 :]):
        taken = joined(epoch)
        assert len(set(taken)) == len(taken) == (20 if keeps_last else 18)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 8), st.booleans(), st.data())
def test_a_run_goes_on_with_batches_of_another_size_where_it_was(
    samples: int, before: int, after: int, keeps_last: bool, data: st.DataObject
) -> None:
    """All samples of the epoch before the stop, then those behind it, in one order."""
    if not keeps_last and samples < max(before, after):
        return
    first = SampleOrder(samples, before, keeps_last, 5, epochs=3)
    assert first.steps_until_end is not None
    stop = data.draw(st.integers(0, first.steps_until_end))
    begin = RunProgress(stop, first.first_sample(stop))
    second = SampleOrder(samples, after, keeps_last, 5, 3, begin)
    taken = joined([*walk(first)[:stop], *walk(second)])
    whole = joined(walk(SampleOrder(samples, 1, True, 5, 3)))
    if keeps_last:
        assert taken == whole
    else:  # All in order, but for what fills no batch at an epoch's end.
        rest = iter(whole)
        assert all(number in rest for number in taken)
        assert len(taken) > 3 * samples - 4 * max(before, after)
    assert second.steps_until_end == stop + len(walk(second))


def test_after_the_last_epoch_nothing_is_left() -> None:
    order = SampleOrder(20, 6, False, None, 1, RunProgress(3, 20))
    assert (order.steps_until_end, order.sample_count(3)) == (3, 0)
