"""Bubble and memory of every published schedule are what its paper says, measured by code of the
tests' own.
"""

from __future__ import annotations

import itertools
import random

import pytest

from autopipe.passes.registry import scheduler_class
from autopipe.passes.schedule.published.base import order_gpipe
from autopipe.passes.schedule.published.one_f_one_b import OneForwardOneBackwardPlus, order_kfkb
from tests.passes.schedule.named.layouts import chain_on, down, suited, waves
from tests.passes.schedule.named.measuring import measure

DEVICES = pytest.mark.parametrize("devices", [2, 3, 4, 5, 6, 8])
EVEN = pytest.mark.parametrize("devices", [2, 4, 6, 8])
WHOLE = [{"F": 1, "B": 1}, {"F": 1, "B": 2}, {"F": 2, "B": 3}, {"F": 1, "B": 3}]
"""Times with whole backwards."""
HALVES = [
    {"F": 1, "I": 1, "W": 1},
    {"F": 2, "I": 2, "W": 1},
    {"F": 3, "I": 2, "W": 2},
    {"F": 4, "I": 5, "W": 3},
]
"""Times with backwards in halves, weight gradients being no longer than the rest."""
EQUAL = HALVES[0]


def step(name, graph, micro_batches, times):
    """A step of a schedule that is made for one form of placement."""
    schedule = scheduler_class(name)().order(graph, micro_batches)
    schedule.verify(graph, train=True)
    return measure(schedule, graph, times)


@DEVICES
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 20])
@pytest.mark.parametrize("times", WHOLE)
def test_gpipe_and_1f1b(devices, micro_batches, times):
    graph = chain_on(down(devices))
    gpipe, one, plus = (
        measure(schedule, graph, times)
        for schedule in (
            order_gpipe(graph, micro_batches, True, lambda task: 1),
            order_kfkb(graph, micro_batches, True, lambda task: 1),
            OneForwardOneBackwardPlus().order(graph, micro_batches),
        )
    )
    assert gpipe.bubble == one.bubble == (devices - 1) * (times["F"] + times["B"])
    assert gpipe.peaks == (micro_batches,) * devices
    assert one.peaks == tuple(min(devices - place, micro_batches) for place in range(devices))
    assert plus == one


@DEVICES
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("times", WHOLE)
def test_interleaved_1f1b_and_looped_bfs(devices, chunks, groups, times):
    # Times are those of a stage, of which a device has `chunks`: the bubble is the v-th part of
    # GPipe's.
    graph = chain_on(down(devices, chunks))
    micro_batches = groups * devices
    interleaved, looped = (
        step(name, graph, micro_batches, times) for name in ("interleaved_1f1b", "looped_bfs")
    )
    assert interleaved.bubble == looped.bubble == (devices - 1) * (times["F"] + times["B"])
    most = chunks * devices + devices - 1
    every = chunks * micro_batches
    assert interleaved.peaks == tuple(min(most - 2 * place, every) for place in range(devices))
    assert looped.peaks == (every,) * devices


@EVEN
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_chimera(devices, groups):
    micro_batches = groups * devices
    found = step("chimera", chain_on(waves(devices), 2), micro_batches, {"F": 1, "B": 1})
    assert found.bubble == devices - 2
    assert found.bubble / found.makespan == (devices - 2) / (2 * micro_batches + devices - 2)
    assert (min(found.peaks), max(found.peaks)) == (devices // 2 + 1, devices)


@DEVICES
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_hanayo(devices, count, groups):
    graph = chain_on(waves(devices, count))
    micro_batches = groups * devices
    equal, real = (
        step("hanayo", graph, micro_batches, {"F": 1, "B": backward}) for backward in (1, 2)
    )
    assert equal.bubble == 2 * (devices - 1)
    assert max(equal.peaks) == 2 * count * devices
    assert real.bubble == 2 * (devices - 1) * (1 + groups)
    if (
        groups == 1
    ):  # the paper's case; the rate that is quoted, (2p - 2) / (3pw + p - 1), is a little higher
        rate = (2 * devices - 2) / (3 * devices * count + 2 * devices - 2)
        assert real.bubble / real.makespan == pytest.approx(rate)
        assert rate < (2 * devices - 2) / (3 * devices * count + devices - 1)


@DEVICES
@pytest.mark.parametrize("more", [0, 1, 7])
@pytest.mark.parametrize("times", HALVES)
def test_zb_h1(devices, more, times):
    found = step("zb_h1", chain_on(down(devices)), devices + more, times)
    assert found.bubble == (devices - 1) * (times["F"] + times["I"] - times["W"])
    assert max(found.peaks) == devices


@DEVICES
@pytest.mark.parametrize("more", [0, 1, 7])
@pytest.mark.parametrize("times", HALVES)
def test_zb_h2(devices, more, times):
    found = step("zb_h2", chain_on(down(devices)), 2 * devices - 1 + more, times)
    assert found.waiting == (devices - 1) * (times["F"] + times["I"] - 2 * times["W"])
    assert max(found.peaks) == 2 * devices - 1


@DEVICES
@pytest.mark.parametrize("more", [0, 1, 7])
def test_zb_v(devices, more):
    found = step("zb_v", chain_on(waves(devices)), 2 * devices - 1 + more, EQUAL)
    assert found.waiting == 0
    assert max(found.peaks) == 2 * devices


@DEVICES
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_v_half_and_v_min(devices, groups):
    # Bubble rates of about p / 2m and 2p / 3m; a micro-batch is six slots of work on each device.
    half, least = (
        step(name, chain_on(waves(devices)), groups * devices, EQUAL)
        for name in ("v_half", "v_min")
    )
    assert 3 * (devices - 2) <= half.bubble <= 3 * devices
    assert 4 * devices - 5 <= least.bubble < 4 * devices
    assert max(half.peaks) == 2 * ((devices + 2) // 2)
    assert max(least.peaks) == 2 * ((devices + 4) // 3)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("more", [0, 1, 5])
@pytest.mark.parametrize("times", [EQUAL, {"F": 2, "I": 2, "W": 1}, {"F": 3, "I": 3, "W": 2}])
def test_dualpipe_and_dualpipe_v(depth, more, times):
    backward = times["I"] + times["W"]
    times = {**times, "B": backward, "&": times["F"] + backward}
    cases = (
        ("dualpipe", chain_on(waves(2 * depth), 2), 2 * (2 * depth + more)),
        ("dualpipe_v", chain_on(waves(depth)), 2 * depth + more),
    )
    for name, graph, micro_batches in cases:
        schedule = scheduler_class(name)().order(graph, micro_batches)
        overlapping = measure(schedule, graph, times, overlapped(schedule))
        assert overlapping.bubble == (depth - 1) * (times["&"] + backward - 3 * times["W"])
        assert max(overlapping.peaks) == 2 * depth + 1
        # One after the other, the forward does not wait for the backward beside it: the bubble is
        # ZB-H1's.
        apart = measure(schedule, graph, times)
        assert apart.bubble == (depth - 1) * (times["F"] + times["I"] - times["W"])


def overlapped(schedule):
    """The pairs that DualPipe overlaps: a forward and the whole backward right after it, of the
    other direction.

    Not the first pair in the middle: there the published schedule runs them apart.
    """
    pairs = []
    for order in schedule.tasks:
        found = [
            (str(task), str(after))
            for task, after in itertools.pairwise(order)
            if task.phase.value == "F" and after.phase.value == "B" and task.stage != after.stage
        ]
        first_backward = next(task for task in order if task.phase.value in "BI")
        middle = str(first_backward) == found[0][1]
        pairs += found[1:] if middle else found
    return pairs


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        (name, each)
        for name in ("zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "hanayo")
        for each in (1, 2, 3, 4, 7)
    ]
    + [("chimera", 2), ("chimera", 4), ("chimera", 6)],
)
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 9])
def test_any_number_of_micro_batches_can_run(name, devices, micro_batches):
    graph = suited(name, devices)
    scheduler_class(name)().order(graph, micro_batches).verify(graph, train=True)


def test_devices_may_be_numbered_in_any_way_and_come_in_groups():
    numbers = list(range(8))
    random.Random(3).shuffle(numbers)
    single = suited("zb_v", 4)
    groups = tuple(
        (numbers[2 * device], numbers[2 * device + 1]) for (device,) in single.stage_devices
    )
    grouped = type(single)(9, groups, single.edges)
    schedule, wide = (scheduler_class("zb_v")().order(graph, 6) for graph in (single, grouped))
    wide.verify(grouped, train=True)
    assert all(
        wide.tasks[device] == schedule.tasks[place // 2] for place, device in enumerate(numbers)
    )
    assert wide.tasks[8] == ()
