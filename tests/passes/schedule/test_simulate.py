"""The simulation against closed forms, and against a simple computation of when tasks can start."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_dags import chain, free_messages, predicted, samples_of, stage_graphs, with_ratios

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.schedule import Phase, Schedule, Task
from autopipe.ir.timeline import Message, Prediction, StagePrediction, StepEndKind, StepEndSpan
from autopipe.passes.schedule.predict import make_ticks
from autopipe.passes.schedule.published.base import order_gpipe
from autopipe.passes.schedule.published.one_f_one_b import order_kfkb
from autopipe.passes.schedule.simulate import simulate


def step(graph, prediction, micro_batches, order=order_kfkb, train=True):
    schedule = order(graph, micro_batches, train, make_ticks(prediction.stages))
    return simulate(schedule, graph.stage_devices, prediction)


@pytest.mark.parametrize("order", [order_gpipe, order_kfkb])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 5), (4, 4), (4, 16), (7, 9)])
def test_bubble_of_a_balanced_chain_equals_the_formula(order, stages, micro_batches):
    # Both GPipe and 1F1B have the bubble (p-1) / (m+p-1), for m >= p.
    graph = chain(stages)
    timeline = step(graph, predicted(graph), micro_batches, order)
    assert timeline.end == pytest.approx(3.0 * (micro_batches + stages - 1))
    assert timeline.bubble_rate == pytest.approx((stages - 1) / (micro_batches + stages - 1))


@pytest.mark.parametrize(
    ("order", "kept"), [(order_gpipe, [8, 8, 8, 8]), (order_kfkb, [4, 3, 2, 1])]
)
def test_memory_equals_that_of_the_micro_batches_in_flight(order, kept):
    graph = chain(4)
    prediction = Prediction(
        (StagePrediction(1, 2, static_bytes=1000, kept_bytes=10),) * 4, free_messages(graph)
    )
    timeline = step(graph, prediction, 8, order)
    assert timeline.static_memory == (1000,) * 4
    assert timeline.peak_memory == tuple(1000 + 10 * count for count in kept)
    assert [curve[-1][1] for curve in timeline.memory] == [1000] * 4
    assert all(curve[0][0] == 0 for curve in timeline.memory)


def test_temporary_memory_is_used_in_backward_or_without_training_in_forward():
    graph = chain(1)
    prediction = Prediction(
        (StagePrediction(1, 2, static_bytes=100, kept_bytes=10, transient_bytes=7),)
    )
    assert step(graph, prediction, 2).memory == (
        ((0.0, 110), (1.0, 117), (3.0, 110), (4.0, 117), (6.0, 100)),
    )
    assert step(graph, prediction, 1, train=False).memory == (((0.0, 107), (1.0, 100)),)


def test_messages_overlap_with_computation():
    # A message of 1 s after each forward of 2 s adds its time once per stage, not once per
    # micro-batch.
    graph = chain(3)
    messages = tuple(Message(a, b, a, b, 8, 0, 1.0, 0.0) for a, b in graph.edges)
    timeline = step(graph, Prediction((StagePrediction(2),) * 3, messages), 10, train=False)
    assert timeline.end == pytest.approx(2 * (10 + 2) + 2 * 1)


def test_messages_of_one_link_follow_one_another():
    # The link takes 5 s for a message that is computed in 1 s, so the link determines the step.
    graph = chain(2)
    message = Message(0, 1, 0, 1, 8, 0, 5.0, 0.0)
    timeline = step(graph, Prediction((StagePrediction(1),) * 2, (message,)), 4, train=False)
    assert [(each.start, each.end) for each in timeline.transfers] == [
        (1, 6),
        (6, 11),
        (11, 16),
        (16, 21),
    ]
    assert timeline.end == pytest.approx(22)


def test_the_two_directions_of_a_link_are_independent():
    graph = chain(2)
    message = Message(0, 1, 0, 1, 8, 8, 3.0, 3.0)
    timeline = step(graph, Prediction((StagePrediction(1, 1),) * 2, (message,)), 2)
    back = [(each.start, each.end) for each in timeline.transfers if each.source == 1]
    there = [(each.start, each.end) for each in timeline.transfers if each.source == 0]
    assert there == [(1, 4), (4, 7)]
    assert back == [(6, 9), (9, 12)]


def test_gradients_and_update_come_after_the_last_backward():
    # Two replicas of one stage: 2 forwards, 2 backwards, then the sum, then the update.
    stage = StagePrediction(1, 2, gradient_s=4, update_s=0.5)
    schedule = Schedule(2, (tuple(map(Task.parse, ("0F0", "0B0", "0F1", "0B1"))),) * 2)
    timeline = simulate(schedule, ((0, 1),), Prediction((stage,)))
    assert timeline.end == pytest.approx(6 + 4 + 0.5)
    assert timeline.ends == tuple(
        span
        for device in (0, 1)
        for span in (
            StepEndSpan(device, StepEndKind.GRADIENT_SUM, 0, 6.0, 10.0),
            StepEndSpan(device, StepEndKind.UPDATE, None, 10.0, 10.5),
        )
    )


def test_each_stage_of_a_device_sums_its_gradients_and_the_device_updates_once():
    stages = (
        StagePrediction(1, gradient_s=3, update_s=1),
        StagePrediction(1, gradient_s=2, update_s=1),
    )
    schedule = Schedule(1, (tuple(map(Task.parse, ("0F0", "1F0"))),))
    found = [
        (span.kind, span.stage, span.start, span.end)
        for span in simulate(schedule, ((0,), (0,)), Prediction(stages)).ends
    ]
    assert found == [
        (StepEndKind.GRADIENT_SUM, 1, 2, 4),
        (StepEndKind.GRADIENT_SUM, 0, 4, 7),
        (StepEndKind.UPDATE, None, 7, 9),
    ]


def test_a_task_waits_for_all_devices_of_its_group():
    # Stage 0 is on device 0, stage 1 on both devices. Device 1 is idle but cannot start alone.
    prediction = Prediction((StagePrediction(3), StagePrediction(1)))
    schedule = Schedule(1, ((Task.parse("0F0"), Task.parse("1F0")), (Task.parse("1F0"),)))
    spans = simulate(schedule, ((0,), (0, 1)), prediction).spans
    starts = [(span.device, str(span.task), span.start) for span in spans]
    assert starts == [(0, "0F0", 0), (0, "1F0", 3), (1, "1F0", 3)]


def test_an_order_that_cannot_run_is_rejected():
    schedule = Schedule(
        1, ((Task.parse("0B0"), Task.parse("0F0")), (Task.parse("1F0"), Task.parse("1B0")))
    )
    graph = chain(2)
    with pytest.raises(InfeasibleError, match="0B0 never starts"):
        simulate(schedule, graph.stage_devices, predicted(graph))


def test_halves_of_a_backward_keep_the_memory_they_still_need():
    stage = StagePrediction(
        1, 9, 2, 3, static_bytes=100, kept_bytes=10, weight_kept_bytes=4, transient_bytes=7
    )
    tasks = tuple(map(Task.parse, ("0F0", "0F1", "0I0", "0I1", "0W0", "0W1")))
    timeline = simulate(Schedule(2, (tasks,)), ((0,),), Prediction((stage,)))
    curve = ((0, 110), (1, 120), (2, 127), (4, 121), (6, 108), (9, 104), (12, 100))
    assert timeline.memory == (curve,)
    assert timeline.end == 12


def test_the_first_half_of_a_backward_receives_and_sends():
    # Stage 1 splits its backward of micro-batch 0, stage 0 that of micro-batch 1.
    graph = chain(2)
    message = Message(0, 1, 0, 1, 8, 8, 1.0, 1.0)
    rows = (("0F0", "0F1", "0B0", "0I1", "0W1"), ("1F0", "1I0", "1F1", "1B1", "1W0"))
    schedule = Schedule(2, tuple(tuple(map(Task.parse, row)) for row in rows))
    schedule.verify(graph, train=True)
    timeline = simulate(
        schedule, graph.stage_devices, Prediction((StagePrediction(2, 6, 3, 3),) * 2, (message,))
    )
    starts = {str(span.task): span.start for span in timeline.spans}
    assert starts == {
        "0F0": 0, "0F1": 2, "0B0": 9, "0I1": 17, "0W1": 20, "1F0": 3, "1I0": 5, "1F1": 8, "1B1": 10, "1W0": 16,
    }  # fmt: skip
    gradients = {str(each.task): each.start for each in timeline.transfers if each.source == 1}
    assert gradients == {"1I0": 8, "1B1": 16}


def halved(schedule, chosen):
    """Return the schedule with backwards split whose bit in `chosen` is set. The second halves run
    at the end of the device's list.
    """
    rows = []
    for order in schedule.tasks:
        row = []
        late = []
        for task in order:
            if task.phase is Phase.BACKWARD and chosen >> (7 * task.stage + task.micro_batch) & 1:
                row.append(Task(task.stage, Phase.INPUT_GRADIENT, task.micro_batch))
                late.append(Task(task.stage, Phase.WEIGHT_GRADIENT, task.micro_batch))
            else:
                row.append(task)
        rows.append((*row, *sorted(late, key=lambda task: (task.micro_batch, task.stage))))
    return Schedule(schedule.micro_batches, tuple(rows))


def naive_ends(schedule, graph, stages, seconds):
    """Return the end of each task, by iteration until nothing changes: a task starts after the
    previous task of its device and all tasks that it depends on.
    """
    ends = {task: 0.0 for order in schedule.tasks for task in order}

    @functools.cache
    def samples(task):
        return samples_of(graph, task.stage, task.micro_batch)

    changed = True
    while changed:
        changed = False
        for order in schedule.tasks:
            for place, task in enumerate(order):
                needs = [ends[order[place - 1]]] if place else [0.0]
                forward = task.phase is Phase.FORWARD
                pairs = (
                    graph.edges if forward else [(target, source) for source, target in graph.edges]
                )
                phases = (Phase.FORWARD,) if forward else (Phase.BACKWARD, Phase.INPUT_GRADIENT)
                needs += [
                    end + seconds
                    for other, end in ends.items()
                    if (other.stage, task.stage) in pairs
                    and task.phase is not Phase.WEIGHT_GRADIENT
                    if other.phase in phases and samples(other) & samples(task)
                ]
                end = max(*needs, 0.0) + stages[task.stage].seconds(task.phase)
                if end > ends[task] + 1e-12:
                    ends[task] = end
                    changed = True
    return ends


@settings(max_examples=80, deadline=None)
@given(
    stage_graphs().flatmap(with_ratios),
    st.integers(1, 5),
    st.lists(st.tuples(*[st.integers(1, 9)] * 4), min_size=6, max_size=6),
    st.sampled_from([order_gpipe, order_kfkb]),
    st.integers(0, 2**42),
)
def test_tasks_start_as_early_as_possible(graph, micro_batches, times, order, chosen):
    stages = tuple(StagePrediction(*map(float, each)) for each in times[: len(graph.stage_devices)])
    prediction = Prediction(stages, free_messages(graph))
    schedule = halved(order(graph, micro_batches, True, make_ticks(stages)), chosen)
    schedule.verify(graph, train=True)
    ends = naive_ends(schedule, graph, stages, 0.0)
    for span in simulate(schedule, graph.stage_devices, prediction).spans:
        assert span.end == pytest.approx(ends[span.task])


@settings(max_examples=40, deadline=None)
@given(stage_graphs(shared=False), st.integers(1, 5), st.integers(1, 3))
def test_messages_shorter_than_tasks_are_only_a_delay(graph, micro_batches, length):
    # Messages shorter than the sending tasks never wait for each other: they only delay the edge.
    stages = (StagePrediction(3.0, 4.0),) * len(graph.stage_devices)
    messages = tuple(
        dataclasses.replace(
            each,
            forward_bytes=1,
            backward_bytes=1,
            forward_s=float(length),
            backward_s=float(length),
        )
        for each in free_messages(graph)
    )
    schedule = order_kfkb(graph, micro_batches, True, make_ticks(stages))
    ends = naive_ends(schedule, graph, stages, float(length))
    for span in simulate(schedule, graph.stage_devices, Prediction(stages, messages)).spans:
        assert span.end == pytest.approx(ends[span.task])


def test_the_simulation_is_deterministic():
    graph = chain(4)
    messages = tuple(Message(a, b, a, b, 8, 8, 0.1, 0.1) for a, b in graph.edges)
    prediction = Prediction((StagePrediction(1, 2, kept_bytes=3),) * 4, messages)
    assert step(graph, prediction, 16) == step(graph, prediction, 16)
