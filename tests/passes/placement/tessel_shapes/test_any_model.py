"""Random models: whatever shape they take, the placement is one that can be lowered."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.problem import Mode, Problem
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.lower.lower import lower
from autopipe.passes.placement.tessel_shapes import TesselShapes
from tests.distributed.support.drawing import BATCH, graphs
from tests.distributed.support.running import schedule_of
from tests.passes.cost.graphs import cluster


@given(
    st.data(),
    st.booleans(),
    st.sampled_from(["auto", "v", "m", "nn", "k"]),
    st.sampled_from([1, 2, 4]),
)
@settings(max_examples=60, deadline=None)
def test_placements_can_be_lowered(
    data: st.DataObject, train: bool, shape: str, devices: int
) -> None:
    graph, loss = data.draw(graphs(train))
    mode = Mode.TRAIN if train else Mode.INFER
    problem = Problem(graph, roofline_costs(graph), cluster(devices), BATCH, 1, mode, loss)
    try:
        placement = TesselShapes(shape).run(problem)
    except InfeasibleError as error:
        assert "\n" not in str(error)
        return
    placement.verify(graph)
    assert all(0 <= device < devices for stage in placement.stages for device in stage.devices)
    lower(graph, placement, schedule_of(graph, placement, 1, train=train), loss)
