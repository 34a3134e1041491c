"""Cluster descriptions: their schema, the presets, and construction of a `Cluster`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

from autopipe.configs.schema import convert
from autopipe.configs.yaml_source import BYTES, BYTES_PER_SECOND, FLOPS, SECONDS, read_file
from autopipe.ir.cluster import Cluster, Device, DevicePool, Level, Link
from autopipe.ir.codec import Above, AtLeast, AtMost
from autopipe.ir.errors import ConfigurationError, InfeasibleError, similar_name_hint
from autopipe.ir.words import plural

Latency = Annotated[float, SECONDS, AtLeast(0)]
Bandwidth = Annotated[float, BYTES_PER_SECOND, Above(0)]
Peak = Annotated[float, FLOPS, Above(0)]
Fraction = Annotated[float, Above(0), AtMost(1)]
MAX_DEVICES = 2**20
DeviceCount = Annotated[int, AtLeast(1), AtMost(MAX_DEVICES)]


@dataclass(frozen=True, slots=True)
class PeakRates:
    """Peak rates per precision. A multiply-add counts as two operations."""

    fp32: Peak
    """Peak of 32-bit floating point."""
    tf32: Peak | None = None
    """Peak of tensor cores on fp32 values rounded to TF32."""
    fp16: Peak | None = None
    """Peak of fp16, including tensor cores. Default: the fp32 rate."""
    bf16: Peak | None = None
    """Peak of bfloat16, including tensor cores. Default: the fp32 rate."""
    fp64: Peak | None = None
    """Peak of 64-bit floating point."""


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """Fraction of the peak rate, or of the memory bandwidth for memory-bound operators, that each
    class of operators reaches.
    """

    matmul: Fraction
    """Matmuls."""
    convolution: Fraction
    """Convolutions."""
    elementwise: Fraction
    """Elementwise operators."""
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
    name: str
    """Product name."""
    memory: Annotated[int, BYTES, AtLeast(1)]
    """Memory of the device."""
    peak: PeakRates
    """Peak rates by precision."""
    bandwidth: Bandwidth
    """Bandwidth between the device and its own memory."""
    launch_latency: Latency
    """Time between the end of a kernel and the start of the next one."""
    efficiency: Efficiencies
    """Fractions of peak rate and bandwidth per class of operators."""
    context: Annotated[int, BYTES, AtLeast(0)] = 0
    """Memory of the CUDA context. If it is set, memory for NCCL buffers is reserved too."""
    host_launch: Latency = 0.0
    """Host time to launch one operator of an eager program. The time of a stage is the maximum of
    its device time and its host time. 0: the host never limits.
    """


@dataclass(frozen=True, slots=True)
class LevelDescription:
    name: str
    """Name of the level, such as `node` or `cluster`."""
    latency: Latency
    """Time until the first byte arrives."""
    bandwidth: Bandwidth
    """Bandwidth between two devices in one direction."""
    size: DeviceCount | None = None
    """Number of members of the level below in one group. `null`, at the outermost level only, for
    the number that is required.
    """


def build_level(description: LevelDescription, size: int) -> Level:
    """Return the level `description`, a tier of the hierarchy of links such as `node`. Each of its
    groups consists of `size` members (devices, or groups of the level below), which its link
    connects.
    """
    return Level(description.name, size, Link(description.latency, description.bandwidth))


def build_device(description: DeviceDescription | str) -> Device:
    """Return the device of a description whose preset names are resolved."""
    assert not isinstance(description, str), "`with_presets` replaces names of presets"
    return Device(
        name=description.name,
        memory_bytes=description.memory,
        peak_flops=tuple(
            (name, rate) for name, rate in asdict(description.peak).items() if rate is not None
        ),
        bandwidth_bytes_per_s=description.bandwidth,
        launch_latency_s=description.launch_latency,
        efficiency=tuple(asdict(description.efficiency).items()),
        context_bytes=description.context,
        host_launch_s=description.host_launch,
    )


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A device pool of a mixed cluster: devices of one type."""

    name: str
    """Name for reports."""
    device: DeviceDescription | str
    """The device type, or the name of a preset with this device type."""
    count: DeviceCount
    """Number of devices."""
    levels: tuple[LevelDescription, ...] = ()
    """Levels of the group, from the innermost (devices in a node) to the outermost. Default: the
    levels of the preset that `device` names.
    """


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """Devices of one type in a hierarchy of levels (such as node and cluster, each with its own
    links), or groups of devices, each of one type.
    """

    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("device", "groups"),)
    name: str
    """Name for reports."""
    levels: tuple[LevelDescription, ...]
    """Levels from the innermost (devices in a node) to the outermost (nodes in the cluster). With
    `groups`, the one level that connects the groups.
    """
    device: DeviceDescription | None = None
    """The device type of a cluster without groups."""
    groups: tuple[GroupDescription, ...] = ()
    """The groups of a mixed cluster, in the order of device indices. `gpus` selects the first
    devices.
    """


def build_cluster(
    description: ClusterDescription,
    count: int | None,
    nodes: int | None = None,
    devices_per_node: int | None = None,
) -> Cluster:
    """Return a cluster with the first `count` devices of a description; None for all devices.

    `nodes` and `devices_per_node` replace the sizes of the two innermost levels. An outermost level
    without a size grows to hold `count` devices. Raise ConfigurationError if another level has no
    size, if a level is missing, or if a mixed cluster gets `nodes` or `devices_per_node`. Raise
    InfeasibleError if the description has fewer than `count` devices.
    """
    who = f"cluster {description.name}"
    if not description.levels:
        raise ConfigurationError(
            f"{who} describes no levels, expected one or more", hint="describe one level or more"
        )
    if description.groups:
        if nodes is not None or devices_per_node is not None:
            message = (
                f"{who} consists of groups, for which cluster.nodes and cluster.devices_per_node "
                "are ambiguous"
            )
            hint = (
                "set gpus to use the first devices, or set the count of each group in a cluster "
                "file"
            )
            raise ConfigurationError(message, hint)
        found = _build_mixed_cluster(description)
        shape = ", ".join(f"{group.count} in {group.name}" for group in description.groups)
    elif description.device is not None:
        sizes = _level_sizes(description, count, nodes, devices_per_node)
        _check_total(description, math.prod(sizes))
        levels = tuple(
            build_level(level, size) for size, level in zip(sizes, description.levels, strict=True)
        )
        found = Cluster(
            description.name, (build_device(description.device),) * math.prod(sizes), levels
        )
        shape = " x ".join(
            f"{size} in a {level.name}"
            for size, level in zip(sizes, description.levels, strict=True)
        )
    else:
        raise ConfigurationError(
            f"{who} describes no devices, expected one or more",
            hint="set device, or groups of devices",
        )
    if count is not None and count > found.size:
        message = (
            f"{who} consists of {found.size} {plural(found.size, 'device')} ({shape}), "
            f"{count - found.size} fewer than the requested {count}"
        )
        raise InfeasibleError(message, "request fewer devices, or describe a larger cluster")
    return found if count is None else found.take(count)


def _build_mixed_cluster(description: ClusterDescription) -> Cluster:
    who = f"cluster {description.name}"
    outer, *more = description.levels
    if more or outer.size not in (None, len(description.groups)):
        found = (
            f"{len(description.levels)} {plural(len(description.levels), 'level')}"
            if more
            else f"a level of {outer.size}"
        )
        hint = (
            "describe one level without a size; describe the links inside a group as levels of "
            "the group"
        )
        raise ConfigurationError(
            (
                f"{who} connects {len(description.groups)} "
                f"{plural(len(description.groups), 'group')} by {found}"
            ),
            hint,
        )
    names: set[str] = set()
    kinds: dict[str, Device] = {}
    for group in description.groups:
        if group.name in names:
            raise ConfigurationError(
                f"{who} contains two groups with the name {group.name!r}",
                "use a unique name for each group",
            )
        names.add(group.name)
        device = build_device(group.device)
        if kinds.setdefault(device.name, device) != device:
            message = f"{who} contains two different devices with the name {device.name!r}"
            raise ConfigurationError(
                message, "use unique names, because costs refer to a device by its name"
            )
    _check_total(description, sum(group.count for group in description.groups))
    groups = tuple(_build_device_pool(who, group) for group in description.groups)
    devices = tuple(
        device
        for group in description.groups
        for device in (build_device(group.device),) * group.count
    )
    joining = build_level(outer, len(groups))
    full = math.prod(level.size for level in groups[0].levels) == groups[0].size
    if len(set(groups)) == len(set(devices)) == 1 and full:
        return Cluster(description.name, devices, (*groups[0].levels, joining))
    return Cluster(description.name, devices, (joining,), groups)


def _build_device_pool(who: str, group: GroupDescription) -> DevicePool:
    """Return the pool of the devices of `group`, with as many levels of links as are required to
    connect them. `who` names the cluster in errors.
    """
    if not group.levels:
        hint = "describe the links in a node, or set the group's device to a preset"
        raise ConfigurationError(
            f"group {group.name} of {who} describes no levels, expected one or more", hint
        )
    levels: list[Level] = []
    members = group.count
    for level in group.levels:
        size = members if level.size is None else level.size
        if level.size is None and level is not group.levels[-1]:
            raise _missing_size_error(level, f"group {group.name} of {who}")
        if levels and members == 1:
            break
        levels.append(build_level(level, min(size, members)))
        members = -(-members // size)
    if members > 1:
        held = math.prod(level.size for level in levels)
        message = (
            f"group {group.name} of {who} consists of {group.count} "
            f"{plural(group.count, 'device')}, but its levels connect only {held}"
        )
        raise InfeasibleError(message, "use fewer devices, or add a level to the group")
    return DevicePool(group.name, group.count, tuple(levels))


def _check_total(description: ClusterDescription, total: int) -> None:
    if total > MAX_DEVICES:
        hint = f"use {MAX_DEVICES} devices or fewer"
        raise ConfigurationError(
            f"cluster {description.name} consists of {total} {plural(total, 'device')}", hint
        )


def _level_sizes(
    description: ClusterDescription,
    count: int | None,
    nodes: int | None,
    devices_per_node: int | None,
) -> list[int]:
    """Return, for each level such as node or cluster, the number of members of the level below in
    one group. An outermost level without a size gets the size that `count` devices require.
    """
    sizes = [level.size for level in description.levels]
    if devices_per_node is not None:
        sizes[0] = devices_per_node
    if nodes is not None and len(sizes) > 1:
        sizes[1] = nodes
    elif nodes is not None and nodes > 1:
        message = (
            f"cluster {description.name} describes no link between nodes, so it cannot have "
            f"cluster.nodes {nodes}"
        )
        raise ConfigurationError(message, "omit cluster.nodes, or describe a second level")
    for level, size in zip(description.levels[:-1], sizes, strict=False):
        if size is None:
            raise _missing_size_error(level, f"cluster {description.name}")
    fixed = [size or 1 for size in sizes[:-1]]
    last = sizes[-1]
    return [*fixed, max(1, -(-(count or 1) // math.prod(fixed))) if last is None else last]


def _missing_size_error(level: LevelDescription, who: str) -> ConfigurationError:
    return ConfigurationError(
        f"level {level.name} of {who} lacks a size",
        hint="set the size of each level except the outermost",
    )


_CONFIGS_FOLDER = Path(__file__).parent


def cluster_names() -> tuple[str, ...]:
    """Return the names of the cluster presets in alphabetical order."""
    return tuple(sorted(path.stem for path in (_CONFIGS_FOLDER / "clusters").glob("*.yaml")))


def cluster_preset(name: str, where: str = "") -> ClusterDescription:
    """Return the preset `name`. Raise ConfigurationError, with `where` and similar names, if there
    is no such preset.
    """
    if name not in cluster_names():
        family = [each for each in cluster_names() if each.startswith(f"{name}-")]
        hint = (
            f"did you mean {' or '.join(map(repr, family))}?"
            if family
            else similar_name_hint(name, cluster_names())
        )
        raise ConfigurationError(f"cluster preset {name!r} is unknown", hint, where)
    return read_cluster(_preset_file(name))


def preset_text(name: str) -> str:
    """Return the YAML text of the preset `name`. Raises ConfigurationError as `cluster_preset`
    does.
    """
    cluster_preset(name)
    return _preset_file(name).read_text(encoding="utf-8")


def _preset_file(name: str) -> Path:
    return _CONFIGS_FOLDER / "clusters" / f"{name}.yaml"


def read_cluster(path: str | Path) -> ClusterDescription:
    """Return the cluster description in a YAML file. Raise ConfigurationError with `file:line`."""
    return with_presets(convert(read_file(path), ClusterDescription), str(path))


def with_presets(description: ClusterDescription, where: str) -> ClusterDescription:
    """Return the description with each preset name replaced by the preset's device. Groups without
    levels get the levels of that preset. Raise ConfigurationError, with `where`, for an unknown
    preset or a preset with several device types.
    """
    groups = []
    for group in description.groups:
        if isinstance(group.device, str):
            preset = cluster_preset(group.device, where)
            if preset.device is None:
                message = (
                    f"the device of group {group.name} is the preset {group.device}, which "
                    "consists of several device types"
                )
                raise ConfigurationError(message, "use a preset with one device type", where)
            group = replace(group, device=preset.device, levels=group.levels or preset.levels)
        groups.append(group)
    return replace(description, groups=tuple(groups))


def is_cluster(path: str | Path) -> bool:
    """True if a YAML file describes a cluster instead of a configuration: if it has a key `device`,
    `levels` or `groups`.
    """
    document = read_file(path).value
    return isinstance(document, dict) and not {"device", "levels", "groups"}.isdisjoint(document)
