"""Tasks as text, and the check that a schedule can run."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.schedule import Phase, Schedule, StageGraph, Task

CHAIN = StageGraph(2, ((0,), (1,)), ((0, 1),))


@given(st.integers(0, 999), st.sampled_from(list(Phase)), st.integers(0, 9999))
def test_tasks_print_and_parse(stage, phase, micro_batch):
    task = Task(stage, phase, micro_batch)
    assert Task.parse(str(task)) == task


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "-1F0", "2F0 ", "2f0", "2F0\n"])
def test_other_text_is_no_task(text):
    with pytest.raises(ConfigurationError, match="is not a task"):
        Task.parse(text)


def schedule(*lists, micro_batches=1):
    return Schedule(micro_batches, tuple(tuple(map(Task.parse, each.split())) for each in lists))


def test_orders_are_compared_device_by_device():
    first = schedule("0F0 0B0", "1F0 1B0")
    assert first.has_orders_of(schedule("0F0 0B0", "1F0 1B0"))
    assert not first.has_orders_of(schedule("0F0 0B0", "1B0 1F0"))
    assert not first.has_orders_of(schedule("0F0 0B0"))
    assert not first.has_orders_of(schedule("0F0 0B0", "1F0 1B0", micro_batches=2))


def test_orders_that_can_run_are_all_those_that_respect_the_edges():
    # All interleavings of one device with two stages and one micro-batch: only one respects F0 F1
    # B1 B0.
    tasks = [Task.parse(text) for text in ("0F0", "1F0", "1B0", "0B0")]
    good = []
    for order in itertools.permutations(tasks):
        try:
            Schedule(1, (order,)).verify(StageGraph(1, ((0,), (0,)), ((0, 1),)), True)
            good.append(order)
        except InfeasibleError:
            pass
    assert good == [tuple(tasks)]


@pytest.mark.parametrize(
    ("lists", "reason"),
    [
        (("0F0 0B0", "1B0 1F0"), "0B0 waits for 1B0"),
        (("0F0", "1F0 1B0"), "stage 0 runs F"),
        (("0F0 0B0 0F0", "1F0 1B0"), "0F0 occurs twice"),
        (("0F0 0B0 1F0", "1F0 1B0"), "stage 1 is not on device 0"),
        (("0F0 0B0 0F1", "1F0 1B0"), "there is no micro-batch 1"),
        (("0F0 0I0", "1F0 1B0"), "stage 0 runs FI"),
    ],
)
def test_what_is_wrong_is_said_with_the_cell_marked(lists, reason):
    with pytest.raises(InfeasibleError, match=reason) as caught:
        schedule(*lists).verify(CHAIN, True)
    assert "[" in str(caught.value)


def test_inference_has_forwards_alone():
    schedule("0F0", "1F0").verify(CHAIN, False)
    with pytest.raises(InfeasibleError, match="the schedule is for inference"):
        schedule("0F0 0B0", "1F0").verify(CHAIN, False)


def test_a_group_that_waits_for_itself_is_refused():
    with pytest.raises(InfeasibleError, match="never starts"):
        schedule("0F0 1F0", "1F0 0F0").verify(StageGraph(2, ((0, 1), (0, 1)), ()), False)


def test_a_backward_may_be_split_for_some_micro_batches_alone():
    schedule("0F0 0F1 0I0 0B1 0W0", "1F0 1B0 1F1 1I1 1W1", micro_batches=2).verify(CHAIN, True)
    with pytest.raises(InfeasibleError, match="0W0 waits for 0I0"):
        schedule("0F0 0F1 0W0 0I0 0B1", "1F0 1B0 1F1 1I1 1W1", micro_batches=2).verify(CHAIN, True)


def test_pipelines_take_micro_batches_in_turn():
    two_ways = StageGraph(2, ((0,), (1,), (1,), (0,)), ((0, 1), (2, 3)), (0, 0, 1, 1))
    schedule("0F0 3F1", "2F1 1F0", micro_batches=2).verify(two_ways, False)
    with pytest.raises(
        InfeasibleError, match="micro-batch 1 does not run on the pipeline of stage 0"
    ):
        schedule("0F0 0F1 3F1", "2F1 1F0", micro_batches=2).verify(two_ways, False)


UNEQUAL = StageGraph(2, ((0,), (1,)), ((0, 1),), ratios=(2, 1))


def test_a_larger_micro_batch_waits_for_the_smaller_ones_with_its_samples():
    schedule("0F0 0F1 0B0 0B1", "1F0 1B0").verify(UNEQUAL, True)
    for lists, reason in (
        (("0F0 0B0 0F1 0B1", "1F0 1B0"), "0B0 waits for 1B0"),
        (("0F0 0F1 0B0 0B1 0F2 0B2", "1F0 1B0"), "there is no micro-batch 2"),
        (("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"), "there is no micro-batch 1"),
        (("0F0 0B0", "1F0 1B0"), "stage 0 runs nothing on micro-batch 1"),
    ):
        with pytest.raises(InfeasibleError, match=reason):
            schedule(*lists).verify(UNEQUAL, True)


@given(st.data())
def test_what_can_run_is_what_an_order_of_samples_allows(data):
    """One device with two stages, its tasks in any order: it can run iff each comes behind all with
    its samples.
    """
    turns = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    phases = (Phase.FORWARD, Phase.BACKWARD)
    tasks = [
        Task(stage, phase, number)
        for stage in (0, 1)
        for phase in phases
        for number in range(turns[stage])
    ]
    order = data.draw(st.permutations(tasks)) if data.draw(st.booleans()) else by_end(tasks, turns)
    graph = StageGraph(1, ((0,), (0,)), ((0, 1),), ratios=turns)
    done: set[Task] = set()
    good = True
    for task in order:
        good &= all(need in done for need in tasks if waits(task, need, turns))
        done.add(task)
    try:
        Schedule(1, (tuple(order),)).verify(graph, True)
    except InfeasibleError:
        assert not good
    else:
        assert good


def samples_of(task, turns):
    """Twelfths of the largest micro-batch."""
    size = 12 // turns[task.stage]
    return set(range(task.micro_batch * size, (task.micro_batch + 1) * size))


def waits(task, need, turns):
    if task.stage == need.stage:
        return (task.phase, need.phase) == (
            Phase.BACKWARD,
            Phase.FORWARD,
        ) and task.micro_batch == need.micro_batch
    ways = {(Phase.FORWARD, 1), (Phase.BACKWARD, 0)}
    return (
        need.phase is task.phase
        and (task.phase, task.stage) in ways
        and samples_of(task, turns) & samples_of(need, turns)
    )


def by_end(tasks, turns):
    """Forwards as their last samples come, then backwards, later stage first."""

    def key(task):
        backward = task.phase is Phase.BACKWARD
        return backward, max(samples_of(task, turns)), -task.stage if backward else task.stage

    return sorted(tasks, key=key)
