"""Stages as blocks and back: a searched order can run within the time and memory of its blocks."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.schedule import MicroBatchSlice, Phase, StageGraph
from autopipe.ir.timeline import Message, Prediction, StagePrediction
from autopipe.passes.schedule.simulate import simulate, static_memory
from autopipe.passes.schedule.tessel.model import SearchOptions
from autopipe.passes.schedule.tessel.search import search
from autopipe.passes.schedule.tessel.stage_blocks import (
    add_links,
    add_memory,
    busiest_seconds,
    stage_blocks,
    stage_schedule,
)

QUICK = SearchOptions(time_limit=0.2)
seconds = st.floats(1e-3, 1e-1)
short = st.floats(0, 1e-3)
"""Messages are at most as long as each task, so that none waits for another one on its link."""


@st.composite
def stage_graphs(draw):
    """Draw up to 5 stages with any edges on up to 3 devices, some on several devices, sometimes
    with different micro-batch sizes.
    """
    stages = draw(st.integers(1, 5))
    devices = draw(st.integers(1, 3))
    pairs = [(source, target) for target in range(stages) for source in range(target)]
    edges = tuple(sorted(draw(st.sets(st.sampled_from(pairs))))) if pairs else ()
    group = st.sets(st.integers(0, devices - 1), min_size=1).map(lambda each: tuple(sorted(each)))
    turns = draw(st.just(()) | st.tuples(*[st.integers(1, 3)] * stages))
    return StageGraph(devices, tuple(draw(group) for _ in range(stages)), edges, ratios=turns)


def sharing_pairs(graph):
    """Yield (source, target, micro-batch of the source, of the target) for all micro-batches that
    share samples.
    """
    for source, target in graph.edges:
        for own in range(graph.micro_batch_ratio_at(source)):
            for other in graph.micro_batches_sharing_samples(source, own, target):
                yield (
                    source,
                    target,
                    MicroBatchSlice(own, graph.micro_batch_ratio_at(source)),
                    MicroBatchSlice(other, graph.micro_batch_ratio_at(target)),
                )


@st.composite
def predictions(draw, graph, train=True):
    """Draw times and sizes of stages, which save activations in training, and one message per
    link.
    """
    stages = []
    for _ in graph.stage_devices:
        first = draw(seconds)
        second = draw(seconds)
        kept, waiting, static, transient = (draw(st.integers(0, 2**20)) for _ in range(4))
        kept *= train
        halves = {
            "input_gradient_s": first,
            "weight_gradient_s": second,
            "weight_kept_bytes": min(kept, waiting),
        }
        sizes = {"kept_bytes": kept, "static_bytes": static, "transient_bytes": transient}
        stages.append(StagePrediction(draw(seconds), first + second, **halves, **sizes))
    links = []
    for number, (source, target, *turns) in enumerate(sharing_pairs(graph)):
        # Devices without a stage: nothing else is sent over their links.
        away = graph.devices + 2 * number
        links.append(
            Message(source, target, away, away + 1, 1, 1, draw(short), draw(short), *turns)
        )
    return Prediction(tuple(stages), tuple(links))


@given(st.data(), st.integers(1, 6), st.booleans(), st.booleans())
@settings(max_examples=40)
def test_a_searched_order_runs_within_the_time_and_memory_of_its_blocks(
    data, micro_batches, train, split
):
    graph = data.draw(stage_graphs())
    prediction = data.draw(predictions(graph, train))
    static = static_memory(graph.devices, graph.stage_devices, prediction.stages)
    kept = [
        each.kept_bytes * graph.micro_batch_ratio_at(stage)
        for stage, each in enumerate(prediction.stages)
    ]
    least = [
        sum(each for each, on in zip(kept, graph.stage_devices, strict=True) if device in on)
        for device in range(graph.devices)
    ]
    free = [each + 2**20 + data.draw(st.integers(2, 2**20)) for each in least]
    blocks = stage_blocks(
        graph, prediction, train, busiest_seconds(graph, prediction) / 500, split=split
    )
    blocks = add_memory(blocks, prediction.stages, free, micro_batches)
    found = search(blocks.graph, micro_batches, QUICK)
    schedule = stage_schedule(blocks, found, graph, micro_batches)
    schedule.verify(graph, train)
    for order in schedule.tasks:
        for stage, phase in {(task.stage, task.phase) for task in order}:
            own = [task.micro_batch for task in order if (task.stage, task.phase) == (stage, phase)]
            assert own == sorted(own), "a stage runs its micro-batches in order"
    step = simulate(schedule, graph.stage_devices, prediction)
    assert max(span.end for span in step.spans) <= found.makespan * blocks.tick_s * (1 + 1e-9)
    if train:
        for device, peak in enumerate(step.peak_memory):
            assert peak <= static[device] + free[device]


@given(st.data(), st.booleans())
@settings(max_examples=40)
def test_rounding_is_within_the_stated_error(data, split):
    graph = data.draw(stage_graphs())
    prediction = data.draw(predictions(graph))
    tick = busiest_seconds(graph, prediction) / 1000
    blocks = stage_blocks(graph, prediction, True, tick, split=split)
    said = max(blocks.graph.loads) * tick
    real = busiest_seconds(graph, prediction)
    assert real <= said * (1 + 1e-9)
    assert said * (1 - blocks.rounding) <= real * (1 + 1e-9)
    below = stage_blocks(graph, prediction, True, tick, split=split, round_up=False)
    pairs = zip(below.graph.blocks, blocks.graph.blocks, strict=True)
    assert all(0 <= high.time - low.time <= 1 for low, high in pairs)


def chain(devices, pipelines=()):
    edges = tuple((stage, stage + 1) for stage in range(devices - 1))
    groups = tuple((stage,) for stage in range(devices))
    if not pipelines:
        return StageGraph(devices, groups, edges)
    mirrored = tuple((devices + source, devices + target) for source, target in edges)
    return StageGraph(
        devices, groups + groups[::-1], edges + mirrored, (0,) * devices + (1,) * devices
    )


def test_two_pipelines_alternate_and_the_last_repetition_may_be_incomplete():
    graph = chain(2, pipelines=(0, 1))
    prediction = Prediction((StagePrediction(1.0, 2.0, 1.0, 1.0),) * 4)
    blocks = stage_blocks(graph, prediction, True, 0.5)
    assert (len(blocks.graph.blocks), blocks.graph.micro_batches_per_unit) == (8, 2)
    schedule = stage_schedule(blocks, search(blocks.graph, 3, QUICK), graph, 5)
    schedule.verify(graph, True)
    tasks = {task for order in schedule.tasks for task in order}
    assert {task.micro_batch for task in tasks if task.stage in (0, 1)} == {0, 2, 4}
    assert {task.micro_batch for task in tasks if task.stage in (2, 3)} == {1, 3}


def test_split_backwards_send_their_gradients_early():
    graph = chain(4)
    free = tuple(
        Message(source, target, source, target, 0, 0, 0.0, 0.0) for source, target in graph.edges
    )
    prediction = Prediction((StagePrediction(1.0, 2.0, 1.0, 1.0),) * 4, free)
    ends = []
    for split in (False, True):
        blocks = stage_blocks(graph, prediction, True, 0.1, split=split)
        schedule = stage_schedule(blocks, search(blocks.graph, 6, SearchOptions(2.0)), graph, 6)
        ends.append(simulate(schedule, graph.stage_devices, prediction).end)
        phases = {task.phase for order in schedule.tasks for task in order}
        assert (Phase.INPUT_GRADIENT in phases) is split
    # (6 + 3) * 3 for 1F1B, and no bubble except for the first forwards.
    assert ends == [
        27.0,
        21.0,
    ]


def test_delays_are_those_of_the_slowest_message():
    graph = chain(2)
    slow = Message(0, 1, 0, 1, 8, 8, 0.3, 0.7)
    prediction = Prediction(
        (StagePrediction(1.0, 2.0),) * 2, (slow, dataclasses.replace(slow, forward_s=0.2))
    )
    blocks = stage_blocks(graph, prediction, True, 0.1)
    named = {block.name: block for block in blocks.graph.blocks}
    assert named["1F"].delays == (3,)
    assert named["0B"].delays == (0, 7)
    local = dataclasses.replace(slow, target=0)
    assert stage_blocks(graph, Prediction(prediction.stages, (local,)), True, 0.1).graph.blocks[
        1
    ].delays == (0,)


@pytest.mark.parametrize(("kept", "rooms"), [(10, (None, None)), (1000, (3, 3))])
def test_memory_is_limited_only_if_not_all_micro_batches_fit(kept, rooms):
    graph = chain(2)
    stages = (StagePrediction(1.0, 2.0, kept_bytes=kept, transient_bytes=100),) * 2
    blocks = add_memory(
        stage_blocks(graph, Prediction(stages), True, 0.1), stages, (3_100, 3_100), 8
    )
    shares = {block.memory for block in blocks.graph.blocks if block.memory > 0}
    assert [room and room // max(shares) for room in blocks.graph.memory] == list(rooms)


@given(st.data(), st.integers(2, 3), st.integers(1, 6), st.booleans(), st.booleans())
@settings(max_examples=25)
def test_searches_with_links_predict_the_step(data, devices, micro_batches, train, split):
    graph = chain(devices)
    stages = tuple(StagePrediction(data.draw(seconds), 0.2, 0.1, 0.1) for _ in graph.stage_devices)
    slow = tuple(
        Message(a, b, a, b, 1, 1, data.draw(seconds), data.draw(seconds)) for a, b in graph.edges
    )
    prediction = Prediction(stages, slow)
    tick = busiest_seconds(graph, prediction) / 500
    blocks = add_links(stage_blocks(graph, prediction, train, tick, split=split), graph, slow)
    assert blocks.graph.devices == devices + len(slow) * (2 if train else 1)
    found = search(blocks.graph, micro_batches, QUICK)
    schedule = stage_schedule(blocks, found, graph, micro_batches)
    schedule.verify(graph, train)
    step = simulate(schedule, graph.stage_devices, prediction)
    assert max(span.end for span in step.spans) <= found.makespan * tick * (1 + 1e-9)


def test_a_slow_link_bounds_the_period():
    graph = chain(2)
    slow = Message(0, 1, 0, 1, 1, 1, 5.0, 1.0)
    prediction = Prediction((StagePrediction(1.0, 2.0),) * 2, (slow,))
    delayed = stage_blocks(graph, prediction, True, 1.0)
    assert search(delayed.graph, 8, QUICK).period == 3
    linked = add_memory(add_links(delayed, graph, (slow,)), prediction.stages, (10, 10), 8)
    found = search(linked.graph, 8, QUICK)
    assert (found.period, found.optimal) == (5, True)
