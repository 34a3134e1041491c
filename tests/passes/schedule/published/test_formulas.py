"""Bubble and memory of each published schedule equal the formulas of its paper. They are measured
by `measuring`, which is independent of autopipe.
"""

from __future__ import annotations

import itertools
import random

import pytest

from autopipe.passes.registry import scheduler_class
from autopipe.passes.schedule.published.base import order_gpipe
from autopipe.passes.schedule.published.one_f_one_b import OneForwardOneBackwardPlus, order_kfkb
from tests.passes.schedule.published.layouts import chain_on, down, suited, waves
from tests.passes.schedule.published.measuring import measure

DEVICES = pytest.mark.parametrize("devices", [2, 3, 4, 5, 6, 8])
EVEN = pytest.mark.parametrize("devices", [2, 4, 6, 8])
UNSPLIT = [{"F": 1, "B": 1}, {"F": 1, "B": 2}, {"F": 2, "B": 3}, {"F": 1, "B": 3}]
"""Times with unsplit backwards."""
HALVES = [
    {"F": 1, "I": 1, "W": 1},
    {"F": 2, "I": 2, "W": 1},
    {"F": 3, "I": 2, "W": 2},
    {"F": 4, "I": 5, "W": 3},
]
"""Times with split backwards, where weight gradients take at most as long as each of the others."""
EQUAL = HALVES[0]


def step(name, graph, micro_batches, times):
    """Measure a step of a schedule that requires one placement pattern."""
    schedule = scheduler_class(name)().order(graph, micro_batches)
    schedule.verify(graph, train=True)
    return measure(schedule, graph, times)


@DEVICES
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 20])
@pytest.mark.parametrize("times", UNSPLIT)
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
@pytest.mark.parametrize("times", UNSPLIT)
def test_interleaved_1f1b_and_looped_bfs(devices, chunks, groups, times):
    # Times are those of one stage, and a device has `chunks` = v stages: the bubble is GPipe's
    # divided by v.
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
    if groups == 1:
        # The paper's case. The rate that others quote, (2p - 2) / (3pw + p - 1), is slightly higher.
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
    # The bubble rates are about p / 2m and 2p / 3m. A micro-batch has six slots of work per device.
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
        # Without overlap, the forward does not wait for the backward of its pair: the bubble equals
        # that of ZB-H1.
        sequential = measure(schedule, graph, times)
        assert sequential.bubble == (depth - 1) * (times["F"] + times["I"] - times["W"])


def overlapped(schedule):
    """Return the pairs that DualPipe overlaps: a forward, and the unsplit backward of the other
    direction right after it. The first pair in the middle is excluded, because the published
    schedule does not overlap it.
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


def test_devices_may_have_any_numbers_and_form_groups():
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
