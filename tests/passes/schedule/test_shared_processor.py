"""Steps of devices that share a processor, against a computation that moves all that runs on, bit by bit."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_dags import free_messages, stage_graphs

from autopipe.ir.prediction import Prediction, Processor, StagePrediction
from autopipe.ir.schedule import Phase, Schedule, Task
from autopipe.passes.schedule.named.gpipe import order_gpipe
from autopipe.passes.schedule.named.one_f_one_b import order_1f1b
from autopipe.passes.schedule.predict import ticks_of
from autopipe.passes.schedule.shared_processor import SharedProcessor
from autopipe.passes.schedule.simulate import simulate


def test_two_tasks_on_one_processor_take_turns():
    shared = SharedProcessor(Processor((0, 1)))
    shared.begin(0, 2.0, 0.0)
    shared.begin(1, 1.0, 1.0)
    # From 1 on both have half the speed, of which each has a second to go: the first to come is the first to end.
    assert shared.next_end == 3.0
    assert shared.end(3.0) == 0
    assert (shared.next_end, shared.end(3.0)) == (3.0, 1)
    assert shared.next_end == float("inf")


def test_replicas_beyond_their_processors_take_as_much_longer():
    # Four replicas of 2 × 3 s on two processors, then a sum of 4 s and an update of 0.5 s, all at half the speed.
    stage = StagePrediction(1, 2, gradient_s=4, update_s=0.5)
    schedule = Schedule(2, (tuple(map(Task.parse, ("0F0", "0B0", "0F1", "0B1"))),) * 4)
    prediction = Prediction((stage,), processors=(Processor((0, 2)), Processor((1, 3))))
    assert simulate(schedule, ((0, 1, 2, 3),), prediction).end == pytest.approx(2 * (6 + 4 + 0.5))
    crowded = Prediction((stage,), processors=(Processor((0, 2), slowdown=1.5), Processor((1, 3), slowdown=1.5)))
    assert simulate(schedule, ((0, 1, 2, 3),), crowded).end == pytest.approx(3 * (6 + 4 + 0.5))


def test_a_task_on_several_nodes_waits_for_the_slowest():
    # Devices 0 and 1 share a processor; device 2 has one of its own.
    prediction = Prediction((StagePrediction(3), StagePrediction(1)), processors=(Processor((0, 1)),))
    task, other = Task.parse("0F0"), Task.parse("1F0")
    timeline = simulate(Schedule(1, ((task,), (other,), (task,))), ((0, 2), (1,)), prediction)
    ends = {(span.device, str(span.task)): span.end for span in timeline.spans}
    assert ends == pytest.approx({(0, "0F0"): 4, (2, "0F0"): 4, (1, "1F0"): 2})


@st.composite
def steps(draw):
    graph = draw(stage_graphs())
    seconds = st.integers(1, 5)
    stages = tuple(
        StagePrediction(
            draw(seconds), draw(seconds), gradient_s=draw(st.integers(0, 2)), update_s=draw(st.integers(0, 2))
        )
        for _ in graph.stage_devices
    )
    messages = tuple(
        dataclasses.replace(each, forward_bytes=1, backward_bytes=1, forward_s=draw(seconds), backward_s=draw(seconds))
        for each in free_messages(graph)
    )
    order = draw(st.sampled_from([order_gpipe, order_1f1b]))
    schedule = order(graph, draw(st.integers(1, 4)), True, ticks_of(stages))
    return graph, Prediction(stages, messages), schedule


@settings(max_examples=60, deadline=None)
@given(steps(), st.integers(1, 4), st.sampled_from([1.0, 1.25]), st.data())
def test_steps_are_those_of_a_computation_bit_by_bit(step, count, slowdown, data):
    graph, prediction, schedule = step
    owned = range(data.draw(st.integers(0, graph.devices)))
    shared = tuple(Processor(tuple(owned[first::count]), slowdown) for first in range(min(count, len(owned))))
    found = simulate(schedule, graph.stage_devices, dataclasses.replace(prediction, processors=shared))
    spans, groups, end = bit_by_bit(schedule, graph.stage_devices, prediction, shared)
    assert found.end == pytest.approx(float(end))
    assert {(span.device, span.task): (span.start, span.end) for span in found.spans} == {
        (device, task): pytest.approx((float(start), float(stop)))
        for task, (start, stop) in spans.items()
        if isinstance(task, Task)
        for device in groups[task]
    }


@settings(max_examples=40, deadline=None)
@given(steps())
def test_a_processor_each_changes_nothing(step):
    graph, prediction, schedule = step
    plenty = tuple(Processor((device,)) for device in range(graph.devices))
    alone = simulate(schedule, graph.stage_devices, prediction)
    together = simulate(schedule, graph.stage_devices, dataclasses.replace(prediction, processors=plenty))
    assert together.end == pytest.approx(alone.end)
    assert [(span.device, span.task) for span in together.spans] == [(span.device, span.task) for span in alone.spans]


def bit_by_bit(schedule, stage_devices, prediction, shared):
    """The spans by device and task, and the end of a step, with all that runs kept as what it still has to do.

    No end is known before: time goes on, in fractions, to the next instant at which anything ends, and a bit of all
    that runs is done until then.
    """
    orders, groups, seconds = tasks_of(schedule, stage_devices, prediction)
    now, begun, left, spans = Fraction(0), {}, {}, {}
    done, arrivals, busy = [0] * len(orders), {}, {}
    while True:
        for task in {order[at] for order, at in zip(orders, done, strict=True) if at < len(order)} - begun.keys():
            is_next = all(orders[each][done[each] : done[each] + 1] == [task] for each in groups[task])
            if is_next and all(arrivals.get(each, now + 1) <= now for each in awaited(prediction, task)):
                begun[task] = now
                left.update({(each, task): Fraction(seconds[task]) for each in groups[task]})
        over = [task for task in begun if task not in spans and not any(left[each, task] for each in groups[task])]
        for task in over:
            spans[task] = begun[task], now
            for device in groups[task]:
                done[device] += 1
            for source, target, size, key in sent(prediction, task):
                end = now if source == target else max(now, busy.get((source, target), now)) + size
                arrivals[key] = busy[source, target] = end
        speeds = {key: speed(key[0], left, shared) for key, rest in left.items() if rest}
        instants = [left[key] / each for key, each in speeds.items()] + [end - now for end in arrivals.values()]
        if not over and not any(each > 0 for each in instants):
            return spans, groups, now
        bit = Fraction(0) if over else min(each for each in instants if each > 0)
        now += bit
        for key, each in speeds.items():
            left[key] -= bit * each


def tasks_of(schedule, stage_devices, prediction):
    """The devices' orders with sums of gradients and updates behind them, each task's devices and its seconds."""
    orders = [list(order) for order in schedule.tasks]
    groups = {task: stage_devices[task.stage] for order in orders for task in order}
    seconds = {task: prediction.stages[task.stage].seconds(task.phase) for task in groups}
    stages = list(enumerate(zip(stage_devices, prediction.stages, strict=True)))
    for index, (devices, cost) in reversed(stages):
        if cost.gradient_s:
            groups["sum", index], seconds["sum", index] = devices, cost.gradient_s
            for device in devices:
                orders[device].append(("sum", index))
    for index, (devices, cost) in stages:
        for device in devices:
            groups["update", index, device], seconds["update", index, device] = (device,), cost.update_s
            orders[device].append(("update", index, device))
    return orders, groups, seconds


def speed(device, left, shared):
    """How fast a device goes on beside all that still have something to do."""
    for each in shared:
        if device in each.devices:
            at_work = sum(other in each.devices for (other, _), rest in left.items() if rest)
            return 1 / (at_work * Fraction(each.slowdown))
    return Fraction(1)


def awaited(prediction, task):
    """The messages that a task waits for, as `sent` names them."""
    if not isinstance(task, Task):
        return []
    end = "target_stage" if task.phase is Phase.FORWARD else "source_stage"
    return [(each, task) for each in prediction.messages if getattr(each, end) == task.stage]


def sent(prediction, task):
    """What a task sends: from where, to where, for how long, and to which task by which message."""
    for each in prediction.messages if isinstance(task, Task) else ():
        if task.phase is Phase.FORWARD and each.source_stage == task.stage:
            yield each.source, each.target, each.forward_s, (each, dataclasses.replace(task, stage=each.target_stage))
        elif task.phase is Phase.BACKWARD and each.target_stage == task.stage:
            yield each.target, each.source, each.backward_s, (each, dataclasses.replace(task, stage=each.source_stage))
