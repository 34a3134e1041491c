"""The schema of a device and of a level of links, and what is planned with made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from autopipe.configs.quantity import BYTES, BYTES_PER_SECOND, FLOPS, SECONDS
from autopipe.configs.schema import Above, AtLeast, AtMost
from autopipe.ir.cluster import Device, Level, Link

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
    """Kind of group, such as `node` or `cluster`."""

    latency: Latency
    """Time before the first byte arrives."""

    bandwidth: Bandwidth
    """Bandwidth from one device to another, in one direction."""

    size: DeviceCount | None = None
    """Members of the level below in one group; at the outermost level, `null` for as many as are needed."""


def level_of(description: LevelDescription, size: int) -> Level:
    """The level with `size` members in one group."""
    return Level(description.name, size, Link(description.latency, description.bandwidth))


def device_of(description: DeviceDescription) -> Device:
    """The device as it is planned for."""
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
