"""kFkB: the example of the GraphPipe paper, 1F1B as a special case, and any stage graph with any
micro-batch sizes and any k.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.schedule import (
    InvalidScheduleError,
    MicroBatchSlice,
    Phase,
    Schedule,
    StageGraph,
    depths_to_end,
)
from autopipe.ir.timeline import Message, Prediction, StagePrediction
from autopipe.passes.cost.memory import graphpipe_table_2
from autopipe.passes.schedule.orders import merge_orders
from autopipe.passes.schedule.published.one_f_one_b import (
    KForwardsKBackwards,
    max_in_flight,
    order_kfkb,
    stage_order,
)
from autopipe.passes.schedule.simulate import simulate
from tests.passes.schedule.random_dags import chain, stage_graphs


def one_tick(task):
    return 1


def with_ratios(graph, turns):
    return dataclasses.replace(graph, ratios=turns)


def orders(schedule):
    return [
        " ".join(f"{task.phase.value}{task.micro_batch}" for task in order)
        for order in schedule.tasks
    ]


def predicted(graph, size=None, backward=2.0):
    """Return stages that take `backward` seconds per sample in backward, 1 second per sample in
    forward, and save 1 byte per sample. Messages take no time.

    The largest micro-batch has `size` samples; None for the minimum number.
    """
    samples = [(size or math.lcm(*graph.ratios)) // turns for turns in graph.ratios]
    stages = tuple(
        StagePrediction(float(size), backward * size, kept_bytes=size) for size in samples
    )
    return Prediction(
        stages, tuple(message for edge in graph.edges for message in messages(graph, *edge))
    )


def messages(graph, source, target):
    """Return a message for each pair of micro-batch slices that share samples."""
    devices = graph.stage_devices[source][0], graph.stage_devices[target][0]
    for own in range(graph.ratios[source]):
        for other in graph.micro_batches_sharing_samples(source, own, target):
            turns = (
                MicroBatchSlice(own, graph.ratios[source]),
                MicroBatchSlice(other, graph.ratios[target]),
            )
            yield Message(source, target, *devices, 0, 0, 0.0, 0.0, *turns)


def test_the_papers_example_with_micro_batches_of_1_2_and_4():
    graph = with_ratios(chain(3), (4, 2, 1))
    schedule = order_kfkb(graph, 4, True, one_tick)
    schedule.verify(graph, train=True)
    assert max_in_flight(graph, (1, 1, 1)) == (10, 4, 1), "10, 8 and 4 samples"
    assert orders(schedule)[2] == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert orders(schedule)[1].startswith("F0 F1 F2 F3 B0 F4 B1 F5")
    assert orders(schedule)[0].startswith("F0 F1 F2 F3 F4 F5 F6 F7 F8 F9 B0 F10 B1 F11")
    uniform = with_ratios(chain(3), (1, 1, 1))
    assert max_in_flight(uniform, (1, 1, 1)) == (3, 2, 1), "12, 8 and 4 samples"
    steps = [
        simulate(order_kfkb(each, 4, True, one_tick), each.stage_devices, predicted(each, size=4))
        for each in (graph, uniform)
    ]
    assert [step.peak_memory for step in steps] == [(10, 8, 4), (12, 8, 4)]
    assert steps[0].end < steps[1].end, "the others begin earlier after smaller micro-batches"


def test_k_of_2_runs_two_tasks_in_a_row():
    graph = chain(2)
    found = order_kfkb(graph, 6, True, one_tick, (2, 2))
    found.verify(graph, train=True)
    assert orders(found) == [
        "F0 F1 F2 F3 B0 B1 F4 F5 B2 B3 B4 B5",
        "F0 F1 B0 B1 F2 F3 B2 B3 F4 F5 B4 B5",
    ]


@given(stage_graphs(), st.integers(1, 6), st.booleans())
def test_equal_sizes_and_k_of_1_give_1f1b(graph, micro_batches, train):
    depths = depths_to_end(len(graph.stage_devices), graph.edges)
    orders = [
        stage_order(s, depth, 1, graph.micro_batches_of(s, micro_batches), train)
        for s, depth in enumerate(depths)
    ]
    found = order_kfkb(graph, micro_batches, train, one_tick)
    assert found.tasks == merge_orders(orders, graph, one_tick)


@settings(deadline=None, max_examples=60)
@given(st.data(), stage_graphs(), st.integers(1, 5), st.booleans())
def test_any_graph_sizes_and_k_can_run_within_the_in_flight_limit(
    data, graph, micro_batches, train
):
    count = len(graph.stage_devices)
    turns = data.draw(st.tuples(*[st.sampled_from((1, 2, 3, 4, 6))] * count))
    ks = data.draw(st.tuples(*[st.integers(1, 5)] * count))
    graph = with_ratios(graph, turns)
    schedule = order_kfkb(graph, micro_batches, train, one_tick, ks)
    schedule.verify(graph, train)
    step = simulate(schedule, graph.stage_devices, predicted(graph))
    assert len(step.spans) == sum(map(len, schedule.tasks))
    if train:
        for stage, most in enumerate(max_in_flight(graph, ks)):
            assert in_flight_of(schedule, graph, stage) <= most


def in_flight_of(schedule: Schedule, graph: StageGraph, stage: int) -> int:
    """Return the maximum number of micro-batches between the start of forward and the end of
    backward, by the order of the stage's device.
    """
    held = most = 0
    for task in schedule.tasks[graph.stage_devices[stage][0]]:
        if task.stage == stage:
            held += 1 if task.phase is Phase.FORWARD else -1
            most = max(most, held)
    return most


@pytest.mark.parametrize("turns", [(1, 1), (1, 2), (1, 4), (2, 1), (4, 1)])
def test_table_2_is_the_minimum_that_keeps_the_next_stage_busy(turns):
    graph = with_ratios(chain(2), turns)
    for ks in itertools.product((1, 2, 4), repeat=2):
        in_flight_of, behind = max_in_flight(graph, ks)
        assert idle_at_the_end(graph, ks, (in_flight_of, behind), backward=1.0) == 0.0
        fewer = idle_at_the_end(graph, ks, (in_flight_of - 1, behind), backward=1.0)
        assert fewer is None or fewer > 0, f"{in_flight_of - 1} would do for {turns} and {ks}"


def test_a_balanced_chain_never_idles_in_its_steady_state():
    for turns in itertools.product((1, 2, 4, 8), repeat=3):
        for ks in itertools.product((1, 2), repeat=3) if min(turns) == 1 else ():
            graph = with_ratios(chain(3), turns)
            assert idle_at_the_end(graph, ks, max_in_flight(graph, ks)) == pytest.approx(0.0), (
                turns,
                ks,
            )
    # For equal k * size, Table 2 gives two micro-batches more than the next stage has in flight.
    # From k = 4 on, this is not enough if a backward takes twice as long as a forward.
    graph = with_ratios(chain(2), (1, 1))
    assert idle_at_the_end(graph, (4, 4), max_in_flight(graph, (4, 4))) == pytest.approx(1.0)


def test_more_than_table_2_is_in_flight_if_needed_to_run():
    graph = with_ratios(chain(2), (1, 1))
    assert graphpipe_table_2(5, 1, 4, 1, 4) == 7
    assert idle_at_the_end(graph, (5, 4), (7, 4)) is None, (
        "the fifth backward waits for the next stage's eighth forward"
    )
    assert max_in_flight(graph, (5, 4)) == (8, 4)
    assert idle_at_the_end(graph, (5, 4), (8, 4)) is not None


def idle_at_the_end(graph, ks, in_flight_of, backward=2.0):
    """Return the seconds that the last device is idle between its first and its last task; None if
    the order cannot run.
    """
    orders = [
        stage_order(stage, most, k, graph.micro_batches_of(stage, 8), train=True)
        for stage, (most, k) in enumerate(zip(in_flight_of, ks, strict=True))
    ]
    schedule = Schedule(8, tuple(map(tuple, orders)))
    try:
        schedule.verify(graph, train=True)
    except InvalidScheduleError:
        return None
    step = simulate(schedule, graph.stage_devices, predicted(graph, backward=backward))
    last = [span for span in step.spans if span.device == graph.devices - 1]
    return last[-1].end - last[0].start - sum(span.end - span.start for span in last)


def test_k_must_have_one_number_per_stage():
    found = KForwardsKBackwards((1, 2))
    with pytest.raises(
        ConfigurationError,
        match=r"schedule.k lists 2 numbers, but the placement consists of 3 stages",
    ):
        found.requires(None, type("", (), {"stages": (1, 2, 3)}))
    with pytest.raises(ConfigurationError, match=r"schedule.k contains 0"):
        KForwardsKBackwards(0).requires(None, type("", (), {"stages": (1, 2, 3)}))
