"""Annotations as messages of onnx."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from autopipe.passes.annotations.sharding import Annotation, Configuration, Sharding

if TYPE_CHECKING:
    import onnx


def configuration_proto(configuration: Configuration) -> onnx.DeviceConfigurationProto:
    """The model's message for the configuration."""
    import onnx

    return onnx.DeviceConfigurationProto(
        name=configuration.name, num_devices=configuration.devices, device=configuration.device_names
    )


def annotation_proto(annotation: Annotation, configuration: str) -> onnx.NodeDeviceConfigurationProto:
    """A node's message for the configuration of this name."""
    import onnx

    return onnx.NodeDeviceConfigurationProto(
        configuration_id=configuration,
        pipeline_stage=annotation.stage,
        sharding_spec=[_spec(sharding) for sharding in annotation.shardings],
    )


def _spec(sharding: Sharding) -> onnx.ShardingSpecProto:
    import onnx

    keys = itertools.count(-1, -1)
    groups = {copies: next(keys) for copies in sharding.devices if len(copies) > 1}
    return onnx.ShardingSpecProto(
        tensor_name=sharding.tensor,
        device=[groups.get(copies, copies[0]) for copies in sharding.devices],
        index_to_device_group_map=[onnx.IntIntListEntryProto(key=key, value=copies) for copies, key in groups.items()],
        sharded_dim=[
            onnx.ShardedDimProto(axis=dimension, simple_sharding=[onnx.SimpleShardedDimProto(num_shards=blocks)])
            for dimension, blocks in sharding.cuts
        ],
    )
