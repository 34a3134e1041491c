"""Random placements, written into a model and read from it again."""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path

import onnx
import onnxruntime
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.graph import Graph
from autopipe.ir.layout import are_even_splits, mesh_axes_of
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.space import AxisKind, Space
from autopipe.passes.analysis.operators import op_instances
from autopipe.passes.annotations import annotated_constraints, plan_annotations, write_annotated
from autopipe.passes.frontend import Model, read_model
from autopipe.passes.placement.manual import Manual
from tests.passes.annotations.models import feed_forward
from tests.passes.cost.graphs import cluster, problem

NAMES = tuple(f"device {index}" for index in range(8))


@functools.cache
def folder() -> Path:
    return Path(tempfile.mkdtemp())


@functools.cache
def read() -> Model:
    return read_model(feed_forward(folder()))


@st.composite
def splits(draw: st.DrawFn, space: Space, group: int) -> tuple[Split, ...]:
    """Some of the node's axes in any order, in parts that the node and the group can be cut
    into.
    """
    axes = [axis for axis in space.axes if axis.kind is not AxisKind.UNSPLITTABLE and axis.size > 1]
    found: list[Split] = []
    for axis in draw(st.permutations(axes)):
        rest = group // math.prod(split.degree for split in found)
        degree = draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0]))
        if degree > 1 and are_even_splits(space, (*found, Split(axis.name, degree))):
            found.append(Split(axis.name, degree))
    return tuple(found)


@st.composite
def placements(draw: st.DrawFn, graph: Graph, in_order: bool) -> Placement:
    """One stage or two on some of eight devices."""
    nodes = len(graph.nodes)
    uses = op_instances(graph)
    cut = draw(st.integers(1, nodes))
    devices = list(range(8)) if in_order else draw(st.permutations(range(8)))
    stages = []
    for members in (range(cut), range(cut, nodes)):
        size = draw(st.sampled_from([1, 2, 3, 4]))
        group = tuple(devices[:size])
        devices = devices[size:]
        own = tuple(
            (node, split) for node in members if (split := draw(splits(uses[node].space, size)))
        )
        if members:
            stages.append(Stage(tuple(members), group, 8, own))
    return Placement(tuple(stages))


def again(placement: Placement) -> Placement:
    """The placement as it is read from the model that it was written into."""
    model = read()
    configuration, left_out = plan_annotations(model.graph, placement, model.origins, NAMES)
    assert left_out == ()
    target = folder() / "annotated.onnx"
    write_annotated(model.path, target, configuration)
    reread = read_model(target)
    assert (reread.graph.nodes, reread.graph.values) == (model.graph.nodes, model.graph.values)
    constraints = annotated_constraints(reread, 8)
    return Manual().run(problem(reread.graph, cluster(8), constraints=constraints))


def parts(placement: Placement) -> dict[tuple[int, int], set[tuple[str, int, int]]]:
    """By node and device its axes in parts, and which one the device has."""
    found = {}
    for stage in placement.stages:
        for node in stage.nodes:
            own = stage.splits_of(node)
            mesh = mesh_axes_of(own, len(stage.devices))
            for position, device in enumerate(stage.devices):
                places = [axis.coordinate(position) for axis in mesh]
                found[node, device] = {
                    (cut.axis, cut.degree, at) for cut, at in zip(own, places, strict=True)
                }
    return found


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_placement_on_devices_in_order_is_the_same(data: st.DataObject) -> None:
    placement = data.draw(placements(read().graph, in_order=True))
    assert again(placement) == placement


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_each_device_does_the_same_whatever_their_order(data: st.DataObject) -> None:
    placement = data.draw(placements(read().graph, in_order=False))
    assert parts(again(placement)) == parts(placement)


def test_others_take_the_file_too() -> None:
    graph = read().graph
    stages = (
        Stage((0, 1), (2, 3), 8, ((0, (Split("n", 2),)),)),
        Stage(tuple(range(2, len(graph.nodes))), (0, 1), 8),
    )
    again(Placement(stages))
    target = folder() / "annotated.onnx"
    onnx.checker.check_model(target, full_check=True)
    proto = onnx.load(target)
    assert proto.ir_version == 11
    assert [(each.name, each.num_devices, len(each.device)) for each in proto.configuration] == [
        ("autopipe-8", 8, 8)
    ]
    (stated,) = proto.graph.node[0].device_configurations
    assert {spec.tensor_name for spec in stated.sharding_spec} == {"x", "w", "up"}
    assert all(len(node.device_configurations) == 1 for node in proto.graph.node)
    onnxruntime.InferenceSession(target, providers=["CPUExecutionProvider"])
