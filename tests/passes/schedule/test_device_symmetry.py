"""A simulation with one device per pipeline rank against a simulation of all devices."""

from __future__ import annotations

from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st
from random_dags import stage_graphs

from autopipe.ir.schedule import Schedule, StageGraph
from autopipe.ir.timeline import Message, Prediction, StagePrediction
from autopipe.passes.schedule.predict import make_ticks
from autopipe.passes.schedule.published.base import order_gpipe
from autopipe.passes.schedule.published.one_f_one_b import order_kfkb
from autopipe.passes.schedule.simulate import DeviceSymmetry, simulate


def without_symmetry(schedule, stage_devices, prediction):
    singles = tuple((device,) for device in range(schedule.devices))
    return DeviceSymmetry(schedule, tuple(map(tuple, stage_devices)), prediction, singles, ())


@st.composite
def steps(draw):
    """Draw stages on groups of devices, several of them equal, with messages between any of
    them.
    """
    small = draw(stage_graphs())
    copies = draw(st.integers(1, 4))
    groups = tuple(
        tuple(device * copies + copy for device in group for copy in range(copies))
        for group in small.stage_devices
    )
    graph = StageGraph(small.devices * copies, groups, small.edges)
    stages = tuple(
        StagePrediction(
            draw(st.sampled_from((0.5, 1.0, 1.3))),
            draw(st.sampled_from((1.0, 2.1))),
            gradient_s=draw(st.sampled_from((0.0, 0.7))),
            update_s=draw(st.sampled_from((0.0, 0.1))),
            static_bytes=draw(st.integers(0, 3)),
            kept_bytes=draw(st.integers(0, 3)),
        )
        for _ in groups
    )
    messages = []
    for source, target in graph.edges:
        pairs = [(a, b) for a in groups[source] for b in groups[target]]
        kinds = st.sampled_from(((1, 0.4), (2, 0.9), (0, 0.0)))
        for a, b in draw(
            st.sampled_from(
                (pairs, pairs[::-1], [*zip(groups[source], groups[target], strict=False)])
            )
        ):
            size, seconds = (1, 0.4) if copies > 2 else draw(kinds)
            messages.append(Message(source, target, a, b, size, size, seconds, seconds))
    micro_batches = draw(st.integers(1, 4))
    order = draw(st.sampled_from((order_kfkb, order_gpipe)))
    schedule = order(graph, micro_batches, True, make_ticks(stages))
    # Equal lists that are different objects, as if read from a file.
    schedule = Schedule(micro_batches, tuple(tasks[:1] + tasks[1:] for tasks in schedule.tasks))
    return schedule, groups, Prediction(stages, tuple(messages))


@settings(max_examples=150)
@given(steps())
def test_one_device_per_rank_gives_the_step_of_all_devices(step):
    found = simulate(*step)
    with mock.patch("autopipe.passes.schedule.simulate.device_symmetry", without_symmetry):
        every = simulate(*step)
    assert found.spans == every.spans
    assert found.ends == every.ends
    assert sorted(map(repr, found.transfers)) == sorted(map(repr, every.transfers))
    assert (found.end, found.memory, found.static_memory) == (
        every.end,
        every.memory,
        every.static_memory,
    )
    assert abs(found.bubble_rate - every.bubble_rate) < 1e-12


def test_a_large_group_is_simulated_as_one_device():
    groups = (tuple(range(64)), tuple(range(64, 128)))
    messages = tuple(Message(0, 1, device, 64 + device, 8, 8, 0.1, 0.1) for device in range(64))
    graph = StageGraph(128, groups, ((0, 1),))
    prediction = Prediction((StagePrediction(1.0, 2.0),) * 2, messages)
    step = simulate(order_kfkb(graph, 4, True, make_ticks(prediction.stages)), groups, prediction)
    assert len(step.own_spans) == 2 * 2 * 4 and len(step.spans) == 128 * 2 * 4
    assert len(step.own_transfers) == 2 * 4 and len(step.transfers) == 64 * 2 * 4
    assert {span.device for span in step.spans} == set(range(128))
