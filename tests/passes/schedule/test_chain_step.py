"""`chain_step`, which computes the step of a chain without tasks, against the simulation of all
tasks.
"""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.schedule import StageGraph
from autopipe.ir.timeline import Message, Prediction, StagePrediction
from autopipe.passes.schedule.limits import chain_step, is_chain
from autopipe.passes.schedule.predict import make_ticks
from autopipe.passes.schedule.published.one_f_one_b import order_kfkb
from autopipe.passes.schedule.simulate import simulate


@st.composite
def chains(draw):
    """Draw stages of 1 to 3 devices in a chain, some of which also send to later stages, and
    devices without a stage.
    """
    groups = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    devices = draw(st.permutations(range(sum(groups) + draw(st.integers(0, 1)))))
    ends = list(itertools.accumulate(groups))
    stages = tuple(
        tuple(devices[end - count : end]) for end, count in zip(ends, groups, strict=True)
    )
    skips = draw(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=3))
    pairs = {
        *itertools.pairwise(range(len(groups))),
        *((a, b) for a, b in skips if a < b < len(groups)),
    }
    seconds = st.floats(0.1, 3)
    size = st.integers(0, 9)
    predicted = tuple(
        StagePrediction(
            draw(seconds),
            draw(seconds),
            gradient_s=draw(st.sampled_from([0.0, 0.7])),
            update_s=draw(st.sampled_from([0.0, 0.3])),
            static_bytes=draw(size),
            kept_bytes=draw(size),
            transient_bytes=draw(size),
        )
        for _ in groups
    )
    messages = tuple(
        Message(
            a,
            b,
            source,
            target,
            draw(st.integers(0, 1)),
            draw(st.integers(0, 1)),
            draw(seconds),
            draw(seconds),
        )
        for a, b in sorted(pairs)
        for source, target in zip(itertools.cycle(stages[a]), stages[b])
    )
    return StageGraph(len(devices), stages, tuple(sorted(pairs))), Prediction(predicted, messages)


@settings(max_examples=80, deadline=None)
@given(chains(), st.integers(1, 9), st.booleans())
def test_chain_step_equals_the_simulated_step_to_the_last_bit(drawn, micro_batches, train):
    graph, prediction = drawn
    assert is_chain(graph)
    schedule = order_kfkb(graph, micro_batches, train, make_ticks(prediction.stages))
    timeline = simulate(schedule, graph.stage_devices, prediction)
    step = chain_step(graph, prediction, micro_batches, train)
    assert step.end == timeline.end
    assert (step.peak_memory, step.static_memory) == (timeline.peak_memory, timeline.static_memory)


def test_is_chain_rejects_other_graphs():
    line = StageGraph(2, ((0,), (1,)), ((0, 1),))
    assert is_chain(line)
    assert not is_chain(StageGraph(2, ((0,), (1,)), ())), "stages without edges run in parallel"
    assert not is_chain(StageGraph(2, ((0,), (0,)), ((0, 1),))), "one device has two stages"
    assert not is_chain(StageGraph(2, ((0,), (1,)), ((0, 1),), ratios=(1, 2)))
    assert not is_chain(StageGraph(2, ((0,), (1,)), ((0, 1),), pipelines=(0, 1)))
