"""What is refused of annotations before any shape is known: files are untrusted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from autopipe.ir.errors import ModelError
from autopipe.passes.frontend import read_model
from autopipe.passes.frontend.device_annotations import (
    Annotation,
    Configuration,
    Sharding,
    configurations_of,
)
from tests.passes.frontend.building import floats, model, node, saved


def linear() -> onnx.ModelProto:
    """A product whose result is annotated as cut into two columns, each on two of four devices."""
    proto = model([node("MatMul", "x w", "y")], {"x": [8, 4]}, "y", {"w": floats(4, 6)})
    proto.configuration.add(name="four", num_devices=4, device=["a", "b", "c", "d"])
    stated = proto.graph.node[0].device_configurations.add(
        configuration_id="four", pipeline_stage=1
    )
    spec = stated.sharding_spec.add(tensor_name="y", device=[-1, -2])
    spec.index_to_device_group_map.add(key=-1, value=[0, 1])
    spec.index_to_device_group_map.add(key=-2, value=[2, 3])
    spec.sharded_dim.add(axis=1).simple_sharding.add(num_shards=2)
    return proto


def annotation(proto: onnx.ModelProto) -> onnx.NodeDeviceConfigurationProto:
    return proto.graph.node[0].device_configurations[0]


def spec(proto: onnx.ModelProto) -> onnx.ShardingSpecProto:
    return annotation(proto).sharding_spec[0]


def test_what_a_file_says() -> None:
    sharding = Sharding("y", ((1, 2),), ((0, 1), (2, 3)))
    expected = Configuration("four", 4, ("a", "b", "c", "d"), (Annotation(0, 1, (sharding,)),))
    assert configurations_of(linear()) == (expected,)
    assert sharding.shards_by_dimension(2) == (
        (1, dict.fromkeys(range(4), 0)),
        (2, {0: 0, 1: 0, 2: 1, 3: 1}),
    )


def test_blocks_are_counted_along_the_last_dimension_first() -> None:
    sharding = Sharding("y", ((0, 2), (-1, 2)), ((5,), (6,), (7,), (8,)))
    assert sharding.shards_by_dimension(2) == (
        (2, {5: 0, 6: 0, 7: 1, 8: 1}),
        (2, {5: 0, 6: 1, 7: 0, 8: 1}),
    )


def test_devices_listed_one_by_one_hold_copies() -> None:
    proto = linear()
    spec(proto).ClearField("sharded_dim")
    (configuration,) = configurations_of(proto)
    assert configuration.annotations[0].shardings == (Sharding("y", (), ((0, 1, 2, 3),)),)


def test_what_onnx_ir_writes_is_read(tmp_path: Path) -> None:
    built = ir.serde.deserialize_model(
        model([node("MatMul", "x w", "y")], {"x": [8, 4]}, "y", {"w": floats(4, 6)})
    )
    built.ir_version = 11
    product = built.graph[0]
    halves = built.add_device_configuration("halves", device_names=("CPU", "CUDA:0"))
    product.shard(
        product.outputs[0], configuration=halves, axis=-1, num_shards=2, device_indices=(1, 0)
    )
    read = read_model(saved(ir.serde.serialize_model(built), tmp_path))
    (configuration,) = read.configurations
    assert (configuration.name, configuration.device_names) == ("halves", ("CPU", "CUDA:0"))
    assert configuration.annotations == (
        Annotation(0, None, (Sharding("y", ((-1, 2),), ((1,), (0,))),)),
    )


def renamed(proto: onnx.ModelProto) -> None:
    annotation(proto).configuration_id = "five"


def twice(proto: onnx.ModelProto) -> None:
    proto.graph.node[0].device_configurations.append(annotation(proto))


def of_another_node(proto: onnx.ModelProto) -> None:
    spec(proto).tensor_name = "z"


def tensor_twice(proto: onnx.ModelProto) -> None:
    annotation(proto).sharding_spec.append(spec(proto))


def negative_stage(proto: onnx.ModelProto) -> None:
    annotation(proto).pipeline_stage = -1


def far_device(proto: onnx.ModelProto) -> None:
    spec(proto).index_to_device_group_map[1].value[:] = [2, 4]


def no_such_group(proto: onnx.ModelProto) -> None:
    spec(proto).device[:] = [-1, -3]


def device_twice(proto: onnx.ModelProto) -> None:
    spec(proto).index_to_device_group_map[1].value[:] = [2, 1]


def empty_group(proto: onnx.ModelProto) -> None:
    spec(proto).index_to_device_group_map[0].ClearField("value")


def group_twice(proto: onnx.ModelProto) -> None:
    spec(proto).index_to_device_group_map[0].key = -2


def too_many_shards(proto: onnx.ModelProto) -> None:
    spec(proto).sharded_dim[0].simple_sharding[0].num_shards = 3


def astronomic_shards(proto: onnx.ModelProto) -> None:
    for axis in range(9):
        spec(proto).sharded_dim.add(axis=axis + 2).simple_sharding.add(num_shards=2**62)


def no_shards(proto: onnx.ModelProto) -> None:
    spec(proto).sharded_dim[0].simple_sharding[0].num_shards = 0


def unsaid_shards(proto: onnx.ModelProto) -> None:
    spec(proto).sharded_dim[0].ClearField("simple_sharding")


def no_axis(proto: onnx.ModelProto) -> None:
    spec(proto).sharded_dim[0].ClearField("axis")


def axis_twice(proto: onnx.ModelProto) -> None:
    spec(proto).sharded_dim.append(spec(proto).sharded_dim[0])


def uneven(proto: onnx.ModelProto) -> None:
    spec(proto).sharded_dim[0].simple_sharding[0].dim_value = 5


def inner(proto: onnx.ModelProto) -> None:
    spec(proto).sharded_dim[0].simple_sharding.add(num_shards=2)


def same_name(proto: onnx.ModelProto) -> None:
    proto.configuration.add(name="four", num_devices=2)


def no_devices(proto: onnx.ModelProto) -> None:
    proto.configuration[0].num_devices = 0


def unnamed_devices(proto: onnx.ModelProto) -> None:
    proto.configuration[0].num_devices = 3


NODE = "MatMul 'matmul_y': "


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            renamed,
            NODE
            + (
                "the node is annotated for configuration 'five', which the model does not define "
                "(the model defines"
            ),
        ),
        (twice, NODE + "the node has two annotations for configuration 'four'"),
        (
            of_another_node,
            NODE + "the annotation shards tensor 'z', which the node neither reads nor writes",
        ),
        (tensor_twice, NODE + "the annotation shards tensor 'y' twice"),
        (negative_stage, NODE + "the pipeline stage of the annotation is -1"),
        (far_device, NODE + "tensor 'y': the annotation lists device 4, expected 0 to 3"),
        (no_such_group, NODE + "tensor 'y': the annotation lists device -3"),
        (device_twice, NODE + "tensor 'y': the annotation lists device 1 twice"),
        (empty_group, NODE + "tensor 'y': device group -1 of the annotation is empty"),
        (group_twice, NODE + "tensor 'y': two device groups of the annotation have the same key"),
        (
            too_many_shards,
            NODE + "tensor 'y': the tensor is sharded into 3 blocks, but the number",
        ),
        (astronomic_shards, NODE + "tensor 'y': the tensor is sharded into over 1048576 blocks"),
        (
            no_shards,
            NODE + "tensor 'y', dimension 1: the number of shards is missing or less than 1",
        ),
        (unsaid_shards, NODE + "tensor 'y', dimension 1: the number of shards is missing"),
        (no_axis, NODE + "tensor 'y': a sharded dimension lacks its axis"),
        (axis_twice, NODE + "tensor 'y': dimension 1 of the tensor is sharded twice"),
        (uneven, NODE + "tensor 'y', dimension 1: the size 5 is not divisible by 2 shards"),
        (inner, NODE + "tensor 'y', dimension 1: an inner axis of a fused dimension is sharded"),
        (same_name, "two device configurations have the name 'four'"),
        (no_devices, "device configuration 'four': the configuration has 0 devices, expected 1 to"),
        (
            unnamed_devices,
            "device configuration 'four': the configuration lists 4 device names for 3 devices",
        ),
    ],
)
def test_bad_annotations_are_refused_in_one_line(
    spoil: Callable[[onnx.ModelProto], None], message: str, tmp_path: Path
) -> None:
    proto = linear()
    spoil(proto)
    path = saved(proto, tmp_path)
    with pytest.raises(ModelError) as caught:
        read_model(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    data = linear().SerializeToString().replace(b"four", b"fo\xffr")
    (tmp_path / "model.onnx").write_bytes(data)
    with pytest.raises(ModelError, match="a name in it is not text"):
        read_model(tmp_path / "model.onnx")


def test_annotations_in_functions_are_left_out_with_a_warning(tmp_path: Path) -> None:
    proto = model(
        [onnx.helper.make_node("Twice", ["x"], ["y"], domain="own")],
        {"x": [2]},
        "y",
        domains=["own"],
    )
    inside = node("Add", "a a", "b")
    inside.device_configurations.add(configuration_id="unknown")
    proto.functions.append(
        onnx.helper.make_function(
            "own", "Twice", ["a"], ["b"], [inside], [onnx.helper.make_opsetid("", 20)]
        )
    )
    proto.graph.node[0].device_configurations.add(configuration_id="unknown")
    read = read_model(saved(proto, tmp_path))
    assert read.warnings == (
        "multi-device annotations of and inside the file's functions are ignored",
    )
