"""Reading and writing of ONNX multi-device annotations, with the checks that need no tensor shapes.

The annotations are defined in
https://github.com/onnx/onnx/blob/main/docs/proposals/ONNXMultiDeviceProposal.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from autopipe.ir.errors import ModelError
from autopipe.ir.words import plural

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class Sharding:
    """Layout over devices of a tensor that a node reads or writes.

    `cuts` lists (dimension, number of equal shards) for the sharded dimensions; negative dimensions
    count from the end. `devices` lists for each shard the devices that hold a copy of it. Shards
    are in row-major order of their indices: the index along the last entry of `cuts` varies
    fastest.
    """

    tensor: str
    cuts: tuple[tuple[int, int], ...]
    devices: tuple[tuple[int, ...], ...]

    def all_devices(self) -> frozenset[int]:
        """Return all devices that hold a shard of the tensor."""
        return frozenset(device for copies in self.devices for device in copies)

    def shards_by_dimension(self, rank: int) -> tuple[tuple[int, dict[int, int]], ...]:
        """Return (number of shards, shard index by device) for each of the tensor's `rank`
        dimensions. A dimension that is not sharded has one shard.
        """
        found: list[tuple[int, dict[int, int]]] = [
            (1, dict.fromkeys(self.all_devices(), 0)) for _ in range(rank)
        ]
        after = math.prod(blocks for _, blocks in self.cuts)
        for dimension, blocks in self.cuts:
            after //= blocks
            index = {
                device: block // after % blocks
                for block, copies in enumerate(self.devices)
                for device in copies
            }
            found[dimension] = (blocks, index)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Annotation:
    """Annotation of a node for one configuration.

    `node` is the node's position in the file, `stage` its pipeline stage (None if undeclared), and
    `shardings` the layouts of tensors that it reads or writes.
    """

    node: int
    stage: int | None
    shardings: tuple[Sharding, ...]


@dataclass(frozen=True, slots=True)
class Configuration:
    """A distribution of the model over `devices` devices, which are identified by numbers from 0.
    `device_names` contains a name per device or is empty.
    """

    name: str
    devices: int
    device_names: tuple[str, ...]
    annotations: tuple[Annotation, ...]


def configuration_proto(configuration: Configuration) -> onnx.DeviceConfigurationProto:
    """Return the ONNX message that declares a configuration."""
    import onnx

    return onnx.DeviceConfigurationProto(
        name=configuration.name,
        num_devices=configuration.devices,
        device=configuration.device_names,
    )


def annotation_proto(
    annotation: Annotation, configuration: str
) -> onnx.NodeDeviceConfigurationProto:
    """Return the ONNX message of a node's annotation for the configuration named
    `configuration`.
    """
    import onnx

    return onnx.NodeDeviceConfigurationProto(
        configuration_id=configuration,
        pipeline_stage=annotation.stage,
        sharding_spec=[_sharding_proto(sharding) for sharding in annotation.shardings],
    )


def _sharding_proto(sharding: Sharding) -> onnx.ShardingSpecProto:
    """Return the ONNX message of a tensor's layout. Shards with several copies become device groups
    with negative keys.
    """
    import onnx

    keys = itertools.count(-1, -1)
    groups = {copies: next(keys) for copies in sharding.devices if len(copies) > 1}
    return onnx.ShardingSpecProto(
        tensor_name=sharding.tensor,
        device=[groups.get(copies, copies[0]) for copies in sharding.devices],
        index_to_device_group_map=[
            onnx.IntIntListEntryProto(key=key, value=copies) for copies, key in groups.items()
        ],
        sharded_dim=[
            onnx.ShardedDimProto(
                axis=dimension, simple_sharding=[onnx.SimpleShardedDimProto(num_shards=blocks)]
            )
            for dimension, blocks in sharding.cuts
        ],
    )


T = TypeVar("T")
MOST_DEVICES = 1 << 20
"""Maximum number of devices of a configuration. The limit is checked before memory for that many
devices is allocated.
"""


def configurations_of(model: onnx.ModelProto) -> tuple[Configuration, ...]:
    """Return the configurations of `model` in file order, each with the annotations of the nodes
    for it.

    Raises ModelError, naming the configuration or the node, if an annotation is malformed or
    contradicts another one.
    """
    found: dict[str, list[Annotation]] = {}
    for declared in model.configuration:
        _check_configuration(declared)
        if declared.name in found:
            raise ModelError(f"two device configurations have the name {declared.name!r}")
        found[declared.name] = []
    devices = {declared.name: declared.num_devices for declared in model.configuration}
    for position, node in enumerate(model.graph.node):
        where = f"{node.op_type} {node.name!r}"
        for stated in node.device_configurations:
            name = stated.configuration_id
            if name not in found:
                known = ", ".join(map(repr, found)) or "none"
                raise ModelError(
                    (
                        f"the node is annotated for configuration {name!r}, which the model does "
                        "not define"
                    ),
                    hint=f"the model defines: {known}",
                    where=where,
                )
            if found[name] and found[name][-1].node == position:
                raise ModelError(
                    f"the node has two annotations for configuration {name!r}, expected at most "
                    "one",
                    where=where,
                )
            found[name].append(_parse_annotation(position, node, stated, devices[name], where))
    return tuple(
        Configuration(each.name, each.num_devices, tuple(each.device), tuple(found[each.name]))
        for each in model.configuration
    )


def annotation_names(model: onnx.ModelProto) -> Iterator[object]:
    """Yield every name in the device annotations of `model`, so that the caller can check them.
    Protobuf returns bytes for a name that is not valid UTF-8.
    """
    for declared in model.configuration:
        yield from (declared.name, *declared.device)
    for node in model.graph.node:
        for stated in node.device_configurations:
            yield stated.configuration_id
            yield from (spec.tensor_name for spec in stated.sharding_spec)


def _check_configuration(declared: onnx.DeviceConfigurationProto) -> None:
    """Raise ModelError if a configuration has no name, an invalid number of devices, or not one
    name per device.
    """
    if not declared.name:
        raise ModelError("a device configuration of the model lacks a name")
    where = f"device configuration {declared.name!r}"
    if not 1 <= declared.num_devices <= MOST_DEVICES:
        raise ModelError(
            f"the configuration has {declared.num_devices} "
            f"{plural(declared.num_devices, 'device')}, expected 1 to {MOST_DEVICES}",
            where=where,
        )
    if declared.device and len(declared.device) != declared.num_devices:
        raise ModelError(
            (
                f"the configuration lists {len(declared.device)} device names for "
                f"{declared.num_devices} {plural(declared.num_devices, 'device')}"
            ),
            where=where,
        )


def _parse_annotation(
    position: int,
    node: onnx.NodeProto,
    stated: onnx.NodeDeviceConfigurationProto,
    devices: int,
    where: str,
) -> Annotation:
    """Return the parsed annotation `stated` of the node at `position` in the file. Raises
    ModelError if it is malformed.
    """
    stage = stated.pipeline_stage if stated.HasField("pipeline_stage") else None
    if stage is not None and stage < 0:
        raise ModelError(
            f"the pipeline stage of the annotation is {stage}, expected at least 0", where=where
        )
    own = {name for name in (*node.input, *node.output) if name}
    shardings = []
    for spec in stated.sharding_spec:
        if spec.tensor_name not in own:
            raise ModelError(
                f"the annotation shards tensor {spec.tensor_name!r}, which the node neither "
                "reads nor writes",
                where=where,
            )
        shardings.append(_parse_sharding(spec, devices, f"{where}: tensor {spec.tensor_name!r}"))
    twice = _first_repeated(each.tensor for each in shardings)
    if twice is not None:
        raise ModelError(f"the annotation shards tensor {twice!r} twice", where=where)
    return Annotation(position, stage, tuple(shardings))


def _parse_sharding(spec: onnx.ShardingSpecProto, devices: int, where: str) -> Sharding:
    """Return the parsed layout of one tensor. Raises ModelError if it is malformed or lists a
    device outside of 0 … `devices` − 1.
    """
    cuts = tuple(_parse_sharded_dimension(each, where) for each in spec.sharded_dim)
    again = _first_repeated(dimension for dimension, _ in cuts)
    if again is not None:
        raise ModelError(f"dimension {again} of the tensor is sharded twice", where=where)
    groups = _devices_by_shard(spec, where)
    blocks = math.prod(count for _, count in cuts)
    # An unsharded tensor consists of one shard; each of several listed devices stores a copy of it.
    if blocks == 1 and groups:
        groups = (tuple(device for group in groups for device in group),)
    if blocks != len(groups):
        many = str(blocks) if blocks <= MOST_DEVICES else f"over {MOST_DEVICES}"
        raise ModelError(
            (
                f"the tensor is sharded into {many} {plural(blocks, 'block')}, but the "
                f"number of listed devices or device groups is {len(groups)}"
            ),
            where=where,
        )
    listed = [device for group in groups for device in group]
    foreign = next((device for device in listed if not 0 <= device < devices), None)
    if foreign is not None:
        raise ModelError(
            f"the annotation lists device {foreign}, expected 0 to {devices - 1}", where=where
        )
    twice = _first_repeated(listed)
    if twice is not None:
        raise ModelError(
            f"the annotation lists device {twice} twice", hint="list each device once", where=where
        )
    return Sharding(spec.tensor_name, tuple(cut for cut in cuts if cut[1] > 1), groups)


def _first_repeated(items: Iterable[T]) -> T | None:
    """Return the first item that equals an earlier item; None if all items differ."""
    seen: set[T] = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None


def _devices_by_shard(spec: onnx.ShardingSpecProto, where: str) -> tuple[tuple[int, ...], ...]:
    """Return for each shard the devices that hold it. A number in `spec.device` is the key of a
    device group if `spec` defines a group with that key; otherwise it is a device.
    """
    known = {entry.key: tuple(entry.value) for entry in spec.index_to_device_group_map}
    if len(known) < len(spec.index_to_device_group_map):
        raise ModelError("two device groups of the annotation have the same key", where=where)
    empty = next((key for key, group in known.items() if not group), None)
    if empty is not None:
        raise ModelError(f"device group {empty} of the annotation is empty", where=where)
    return tuple(known.get(each, (each,)) for each in spec.device)


def _parse_sharded_dimension(stated: onnx.ShardedDimProto, where: str) -> tuple[int, int]:
    """Return (dimension, number of shards) of a sharded dimension. Raises ModelError if it is
    malformed or if its size is not divisible by the number of shards.
    """
    if not stated.HasField("axis"):
        raise ModelError("a sharded dimension lacks its axis", where=where)
    where = f"{where}, dimension {stated.axis}"
    counts = [simple.num_shards for simple in stated.simple_sharding]
    if not counts or min(counts) < 1:
        raise ModelError("the number of shards is missing or less than 1", where=where)
    # A dimension may be the product of several axes. Only a shard along the outermost axis is a
    # contiguous part of the dimension.
    if any(count > 1 for count in counts[1:]):
        raise ModelError(
            "an inner axis of a fused dimension is sharded: only the outermost axis may be",
            where=where,
        )
    for simple in stated.simple_sharding:
        if simple.HasField("dim_value") and (
            simple.dim_value < 1 or simple.dim_value % simple.num_shards
        ):
            raise ModelError(
                f"the size {simple.dim_value} is not divisible by {simple.num_shards} "
                f"{plural(simple.num_shards, 'shard')}",
                where=where,
            )
    return stated.axis, counts[0]
