"""How a batch is divided: what is given is kept, what is open is chosen as stated, what does not
fit is refused.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.ir.errors import ConfigurationError
from autopipe.passes.batching import Batching, Division, batchings, hill_climb


def first(**given):
    every = {
        "batch_size": None,
        "micro_batches": None,
        "micro_batch_size": None,
        "own": None,
        "devices": 4,
        **given,
    }
    return next(batchings(**every))


@pytest.mark.parametrize(
    ("seconds", "start", "tried"),
    [
        ({1: 5, 2: 4, 4: 3, 8: 3, 16: 1}, 1, [2, 4, 8, 1]),
        ({1: 1, 2: 2, 4: 3, 8: 4, 16: 5}, 2, [4, 8, 2, 1]),
        ({1: 1, 2: 1, 4: None, 8: None, 16: 2}, 2, [4, 8, 16]),
        ({1: 1, 2: float("inf"), 4: 3, 8: None, 16: 1}, 1, [2, 4, 8, 1]),
        ({1: None, 2: 1, 4: 2, 8: 3, 16: 4}, 1, [2, 4, 1]),
    ],
    ids=[
        "both ways",
        "down",
        "while memory refuses",
        "past what has no step",
        "memory refuses what comes before",
    ],
)
def test_a_climb_goes_on_while_steps_get_shorter(seconds, start, tried):
    found = []
    hill_climb(tuple(seconds), start, lambda place: found.append(place) or seconds[place])
    assert found == tried


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, (16, 16)),
        ({"devices": 1}, (1, 1)),
        ({"batch_size": 64}, (64, 16)),
        ({"batch_size": 12}, (12, 12)),
        ({"batch_size": 34}, (34, 2)),
        ({"micro_batches": 8}, (8, 8)),
        ({"micro_batch_size": 2}, (32, 16)),
        ({"batch_size": 64, "micro_batch_size": 2}, (64, 32)),
        ({"micro_batches": 3, "micro_batch_size": 2}, (6, 3)),
        ({"own": 8}, (8, 8)),
        ({"own": 1}, (1, 1)),
        ({"own": 8, "batch_size": 64}, (64, 16)),
        ({"own": 8, "micro_batches": 4}, (32, 4)),
        ({"own": 8, "micro_batch_size": 2}, (8, 4)),
        ({"own": 2, "batch_size": 64}, (64, 32)),
    ],
)
def test_what_is_chosen(given, chosen):
    assert first(**given) == Batching(*chosen)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 10, "micro_batches": 4}, "4 micro-batches do not divide a batch of 10"),
        (
            {"batch_size": 10, "micro_batch_size": 4},
            "10 samples cannot be divided into 2 micro-batches of 4",
        ),
        (
            {"batch_size": 2, "micro_batch_size": 4},
            "2 samples cannot be divided into 1 micro-batch of 4",
        ),
        (
            {"own": 8, "micro_batch_size": 3},
            "micro-batches of 3 samples do not divide the batch of 8",
        ),
        (
            {"own": 8, "batch_size": 9, "micro_batches": 3},
            "micro-batches of 3 samples do not divide the batch of 8",
        ),
    ],
)
def test_what_does_not_divide_is_refused(given, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        first(**given)
    assert caught.value.hint


@given(st.integers(1, 200), st.integers(1, 16), st.none() | st.integers(1, 12))
def test_open_divisions_are_all_there_are_best_first(batch_size, devices, own):
    fitting = [
        count
        for count in range(1, batch_size + 1)
        if batch_size % count == 0 and (own is None or own % (batch_size // count) == 0)
    ]
    if not fitting:
        return
    found = [each.micro_batches for each in batchings(batch_size, None, None, own, devices)]
    assert sorted(found) == fitting
    most = 4 * devices if devices > 1 else 1
    within = [count for count in fitting if count <= most]
    assert found[0] == (max(within) if within else min(fitting))


@given(st.integers(1, 200), st.integers(1, 16), st.none() | st.integers(1, 12))
def test_a_strategy_that_chooses_begins_with_the_largest_and_may_have_all_that_divide_it(
    batch_size, devices, own
):
    every = [batch_size // each.micro_batches for each in open_divisions(batch_size, own, devices)]
    if not every:
        return
    first = next(batchings(batch_size, None, None, own, devices, Division.OWN))
    largest = batch_size // first.micro_batches
    assert largest == max(every)
    assert first.sizes == tuple(size for size in sorted(every) if largest % size == 0)


def open_divisions(batch_size, own, devices):
    try:
        return list(batchings(batch_size, None, None, own, devices))
    except ConfigurationError:
        return []


@pytest.mark.parametrize("given", [{"micro_batches": 8}, {"micro_batch_size": 2}])
def test_given_micro_batches_leave_a_strategy_no_choice(given):
    assert first(**given, division=Division.OWN).sizes == ()
