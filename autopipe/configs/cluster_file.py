"""The schema of a cluster's description, in a file or within a configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from autopipe.configs.quantity import BYTES, BYTES_PER_SECOND, FLOPS, SECONDS
from autopipe.configs.schema import Above, AtLeast, AtMost
from autopipe.ir.cluster import Cluster, Device, Level, Link
from autopipe.ir.errors import ConfigurationError, InfeasibleError

Latency = Annotated[float, SECONDS, AtLeast(0)]
Bandwidth = Annotated[float, BYTES_PER_SECOND, Above(0)]
Peak = Annotated[float, FLOPS, Above(0)]
Fraction = Annotated[float, Above(0), AtMost(1)]

MOST_DEVICES = 2**20
DeviceCount = Annotated[int, AtLeast(1), AtMost(MOST_DEVICES)]


@dataclass(frozen=True, slots=True)
class PeakRates:
    """Peak rates by precision, one multiply-add counted as two operations."""

    fp32: Peak
    """Peak of 32-bit floating point."""

    tf32: Peak | None = None
    """Peak of matrix units on 32-bit values rounded to 19 bits."""

    fp16: Peak | None = None
    """Peak of 16-bit floating point, matrix units included; fp32's rate where it is not given."""

    bf16: Peak | None = None
    """Peak of bfloat16, matrix units included; fp32's rate where it is not given."""

    fp64: Peak | None = None
    """Peak of 64-bit floating point."""


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """Fractions of the peak (of the memory bandwidth for operators bound by it) that classes of operators reach."""

    matmul: Fraction
    """Matrix products."""

    convolution: Fraction
    """Convolutions."""

    elementwise: Fraction
    """Operators on each element by itself."""

    normalization: Fraction
    """Softmax, batch and layer normalization."""

    reduction: Fraction
    """Sums, means and maxima over axes, pooling."""

    memory: Fraction
    """Operators that only move data: transpose, concatenate, gather."""

    recurrent: Fraction
    """LSTM, GRU and RNN."""


@dataclass(frozen=True, slots=True)
class DeviceDescription:
    """One kind of device."""

    name: str
    """The product's name."""

    memory: Annotated[int, BYTES, AtLeast(1)]
    """Memory a program may use."""

    peak: PeakRates
    """Peak rates by precision."""

    bandwidth: Bandwidth
    """Bandwidth between the device and its own memory."""

    launch_latency: Latency
    """Time from one kernel's end to the next one's start, when each is launched by itself."""

    efficiency: Efficiencies
    """Fractions of peak and bandwidth that classes of operators reach."""


@dataclass(frozen=True, slots=True)
class LevelDescription:
    """One level of the hierarchy of links."""

    name: str
    """What the level forms, such as `node` or `cluster`."""

    latency: Latency
    """Time before the first byte arrives."""

    bandwidth: Bandwidth
    """Bandwidth from one device to another, in one direction."""

    size: DeviceCount | None = None
    """Members of the level below in one group; at the outermost level, `null` for as many as are needed."""


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """Devices of one kind in a hierarchy of nodes."""

    name: str
    """A name for reports."""

    device: DeviceDescription
    """The kind of device."""

    levels: tuple[LevelDescription, ...]
    """From the innermost (devices in a node) to the outermost (nodes in the cluster)."""


def build_cluster(
    description: ClusterDescription, count: int | None, nodes: int | None = None, devices_per_node: int | None = None
) -> Cluster:
    """A cluster of `count` devices (all there are where it is None).

    `nodes` and `devices_per_node` replace the sizes of the two innermost levels. An outermost level without a size
    grows to hold `count`. Raises ConfigurationError for levels without a size elsewhere or a level that is missing,
    InfeasibleError where fewer than `count` devices are described.
    """
    sizes = _sizes(description, nodes, devices_per_node)
    fixed = math.prod(size for size in sizes if size is not None)
    if sizes[-1] is None:
        sizes[-1] = 1 if count is None else max(1, -(-count // fixed))
    total = math.prod(size for size in sizes if size is not None)
    if total > MOST_DEVICES:
        raise ConfigurationError(
            f"cluster {description.name} has {total} devices", hint=f"at most {MOST_DEVICES} can be planned for"
        )
    if count is not None and count > total:
        shape = " x ".join(f"{size} in a {level.name}" for size, level in zip(sizes, description.levels, strict=True))
        raise InfeasibleError(
            f"cluster {description.name} has {total} devices ({shape}), {count - total} fewer than the {count} wanted",
            hint="ask for fewer devices or give the cluster more nodes",
        )
    levels = tuple(
        Level(level.name, size or 1, Link(level.latency, level.bandwidth))
        for size, level in zip(sizes, description.levels, strict=True)
    )
    cluster = Cluster(description.name, (_device(description.device),) * total, levels)
    return cluster if count is None else cluster.take(count)


def _sizes(description: ClusterDescription, nodes: int | None, devices_per_node: int | None) -> list[int | None]:
    if not description.levels:
        raise ConfigurationError(f"cluster {description.name} has no levels", hint="describe at least one")
    sizes = [level.size for level in description.levels]
    if devices_per_node is not None:
        sizes[0] = devices_per_node
    if nodes is not None and len(sizes) > 1:
        sizes[1] = nodes
    elif nodes is not None and nodes > 1:
        raise ConfigurationError(
            f"cluster {description.name} describes no link between nodes, so it cannot have {nodes}",
            hint="leave cluster.nodes out, or describe a second level",
        )
    for level, size in zip(description.levels[:-1], sizes, strict=False):
        if size is None:
            raise ConfigurationError(
                f"level {level.name} of cluster {description.name} has no size", hint="only the outermost may have none"
            )
    return sizes


def _device(description: DeviceDescription) -> Device:
    peaks = ((name, getattr(description.peak, name)) for name in PeakRates.__dataclass_fields__)
    efficiencies = ((name, getattr(description.efficiency, name)) for name in Efficiencies.__dataclass_fields__)
    return Device(
        name=description.name,
        memory_bytes=description.memory,
        peak_flops=tuple((name, rate) for name, rate in peaks if rate is not None),
        bandwidth_bytes_per_s=description.bandwidth,
        launch_latency_s=description.launch_latency,
        efficiency=tuple(efficiencies),
    )
