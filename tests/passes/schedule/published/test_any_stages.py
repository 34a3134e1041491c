"""Published schedules on DAGs of stages: the order of a chain can run for any edges to later
stages.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.schedule import StageGraph
from autopipe.passes.registry import scheduler_class
from autopipe.passes.schedule.published.one_f_one_b import OneForwardOneBackwardPlus
from tests.passes.schedule.published.layouts import suited

NAMES = [
    "chimera",
    "dualpipe",
    "dualpipe_v",
    "hanayo",
    "interleaved_1f1b",
    "looped_bfs",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
]


@st.composite
def forward_edges(draw, stages, pipelines):
    """Draw edges from stages to later stages of the same pipeline."""
    pairs = [
        (source, target)
        for target in range(stages)
        for source in range(target)
        if not pipelines or pipelines[source] == pipelines[target]
    ]
    return tuple(sorted(draw(st.lists(st.sampled_from(pairs), unique=True)))) if pairs else ()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(st.data())
def test_orders_can_run_for_any_edges(name, data):
    devices = data.draw(
        st.sampled_from([2, 4] if name in {"chimera", "dualpipe"} else [1, 2, 3, 4])
    )
    micro_batches = devices * data.draw(st.sampled_from([2, 4]))
    chain = suited(name, devices)
    graph = replace(
        chain, edges=data.draw(forward_edges(len(chain.stage_devices), chain.pipelines))
    )
    scheduler_class(name)().order(graph, micro_batches).verify(graph, train=True)


@st.composite
def stages_and_shared_stages(draw):
    """Draw one stage on each of some devices in any order, and stages on several of these devices
    between them.
    """
    devices = draw(st.integers(2, 4))
    groups = [(device,) for device in draw(st.permutations(range(devices)))]
    several = st.lists(st.integers(0, devices - 1), min_size=2, max_size=devices, unique=True)
    for group in draw(st.lists(several, max_size=4)):
        groups.insert(draw(st.integers(0, len(groups))), tuple(group))
    return StageGraph(devices, tuple(groups), draw(forward_edges(len(groups), ())))


@settings(max_examples=150)
@given(stages_and_shared_stages(), st.integers(1, 7))
def test_1f1b_plus_can_run_for_any_position_of_shared_stages(graph, micro_batches):
    OneForwardOneBackwardPlus().order(graph, micro_batches).verify(graph, train=True)
