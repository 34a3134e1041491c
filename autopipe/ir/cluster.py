"""Clusters: devices and the links between them, and the GPU memory that NCCL's buffers occupy."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise

from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.measured_costs import AffineTime, ExchangeCost, TaskCosts
from autopipe.ir.words import plural

_NCCL_BUFFER_BYTES_PER_CHANNEL = 524_288 + 4_915_200 + 4_194_304
"""Bytes of receive buffers per channel (one CTA of a kernel) of an NCCL communicator, for the
protocols LL, LL128 and Simple: DEFAULT_LL_BUFFSIZE, DEFAULT_LL128_BUFFSIZE and DEFAULT_BUFFSIZE
(NCCL_BUFFSIZE) in src/init.cc and src/include/device.h of NCCL 2.21. NCCL allocates the buffers of
a connection at the first use of the connection (NCCL_RUNTIME_CONNECT).
"""
MAX_P2P_CTAS = 32
"""Maximum number of CTAs (thread blocks) of all P2P communicators of a rank together. Each CTA of a
kernel that waits for a message occupies one multiprocessor, and large GPUs have about a hundred
multiprocessors.
"""
_MAX_CHANNELS_PER_GROUP = 24
"""Maximum number of channels of the communicator of a process group. NCCL opens 24 channels with
NVSwitch, 12 with the NVLinks of a V100, and 2 with PCIe only.
"""
_PROCESS_GROUPS_PER_RANK = 3
"""Number of process groups with collectives per rank: the replicas of a stage, the devices of a
stage, and the devices with tied weights or all ranks.
"""


def max_nccl_buffer_bytes(ranks: int) -> int:
    """Return an upper bound of the bytes of NCCL's buffers on each of `ranks` ranks; 0 for one
    rank.
    """
    return (
        0
        if ranks < 2
        else (MAX_P2P_CTAS + _PROCESS_GROUPS_PER_RANK * _MAX_CHANNELS_PER_GROUP)
        * _NCCL_BUFFER_BYTES_PER_CHANNEL
    )


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator or a CPU: its roofline parameters and its measured costs.

    `peak_flops` has the FLOP/s per precision; a multiply-add counts as two operations. `efficiency`
    is the fraction of the peak, or of the memory bandwidth, that operators of each class reach.
    Measured costs are: `tasks`, the costs of a step except its operators; `collectives`, of ranks
    in one node; `post`, the CPU time for the first send or receive of a task; `follow`, the CPU
    time for each further one.
    """

    name: str
    memory_bytes: int
    peak_flops: tuple[tuple[str, float], ...]
    bandwidth_bytes_per_s: float
    launch_latency_s: float
    """Seconds between the end of a kernel and the start of the next one."""
    efficiency: tuple[tuple[str, float], ...]
    tasks: TaskCosts | None = None
    collectives: tuple[ExchangeCost, ...] = ()
    post: AffineTime | None = None
    follow: AffineTime | None = None
    context_bytes: int = 0
    """Bytes of GPU memory of the CUDA context."""
    host_launch_s: float = 0.0
    """Host time in seconds to launch one operator of an eager program. `cost/host.py` counts the
    operators. 0 if the host never limits the speed, for example because the device is the CPU.
    """

    def __hash__(self) -> int:
        # Devices are keys of many dicts, and a hash of all fields would be slow. The four fields of
        # this hash usually differ between device types.
        return hash((self.name, self.memory_bytes, self.peak_flops, self.bandwidth_bytes_per_s))

    def peak(self, precision: str) -> float:
        """Return the peak FLOP/s in `precision`. If tf32, fp16 or bf16 has no declared peak, return
        the peak of fp32. Raise ConfigurationError if that is not declared either.
        """
        declared = dict(self.peak_flops)
        narrow = (
            precision in ("tf32", "fp16", "bf16")
            and precision not in declared
            and "fp32" in declared
        )
        return self._declared_value(declared, "fp32" if narrow else precision, "peak FLOP/s for")

    def efficiency_of(self, operator_class: str) -> float:
        """Return the fraction of the peak or of the memory bandwidth that operators of the class
        `operator_class` reach. Raise ConfigurationError if it is not declared.
        """
        return self._declared_value(
            dict(self.efficiency), operator_class, "efficiency for operators of class"
        )

    def _declared_value(self, values: dict[str, float], name: str, what: str) -> float:
        """Return the value called `name`. Raise ConfigurationError if the device does not declare
        it; `what` names the kind of value.
        """
        if name not in values:
            hint = f"use one of {', '.join(values) or 'none'}"
            raise ConfigurationError(f"device {self.name} does not declare the {what} {name}", hint)
        return values[name]


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between two devices. A message of n bytes takes `latency_s + n /
    bandwidth_bytes_per_s` seconds.
    """

    latency_s: float
    bandwidth_bytes_per_s: float

    def seconds(self, size_bytes: float) -> float:
        """Return the seconds of a message of `size_bytes` bytes."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class Level:
    """A level of the cluster's hierarchy: `size` groups of the level below (for the innermost
    level, devices) that `link` connects.
    """

    name: str
    size: int
    link: Link


@dataclass(frozen=True, slots=True)
class DevicePool:
    """A pool of a mixed cluster: `size` consecutive devices with their own nodes and links."""

    name: str = field(compare=False)
    size: int
    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        _check_level_capacity(f"group {self.name}", self.size, self.levels)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices 0, 1, … in a hierarchy of levels, such as nodes. Each level divides the devices into
    groups, which are filled in order, so the last group of a level may be incomplete.

    A mixed cluster consists of pools (field `groups`) with nodes and links of their own. Its
    devices are those of the pools in order, and its one level connects the pools.
    """

    name: str
    devices: tuple[Device, ...]
    levels: tuple[Level, ...]
    """Levels from the innermost (devices in a node) to the outermost (nodes in the cluster). In a
    mixed cluster, the one level that connects the pools.
    """
    groups: tuple[DevicePool, ...] = ()
    """Pools of a mixed cluster; () if all nodes and links are equal."""
    allow_mixed_stages: bool = False
    """True if strategies may make stages with devices of different types. If false, only the user's
    constraints can make such a stage.
    """

    def __post_init__(self) -> None:
        _check_level_capacity(f"cluster {self.name}", len(self.groups or self.devices), self.levels)
        if self.groups and len(self.levels) != 1:
            raise ConfigurationError(
                (
                    f"cluster {self.name} connects its groups by {len(self.levels)} "
                    f"{plural(len(self.levels), 'level')}, expected 1"
                ),
                hint="describe one level",
            )
        if self.groups and sum(group.size for group in self.groups) != self.size:
            raise ConfigurationError(
                f"the sizes of the groups of cluster {self.name} do not add up to {self.size} "
                f"{plural(self.size, 'device')}"
            )

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.devices)

    def __hash__(self) -> int:
        # Clusters are keys of dicts, and hashing thousands of devices at each lookup would be slow.
        return hash((self.name, len(self.devices), self.levels, self.groups))

    @property
    def kinds(self) -> tuple[Device, ...]:
        """Distinct device types of the cluster, in order of first occurrence."""
        return self.device_types_among(range(self.size))

    def device_types_among(self, devices: Iterable[int]) -> tuple[Device, ...]:
        """Return the distinct device types of `devices`, in order of first occurrence."""
        # Equal devices are usually one object. Duplicate objects are removed first, because
        # comparisons of values are slow.
        found = {id(kind): kind for kind in map(self.devices.__getitem__, devices)}
        return tuple(dict.fromkeys(found.values()))

    @property
    def devices_per_node(self) -> int:
        """Number of devices in a full node. In a mixed cluster, the minimum over the pools."""
        return (
            min(group.levels[0].size for group in self.groups)
            if self.groups
            else self.levels[0].size
        )

    @property
    def node_count(self) -> int:
        """Number of nodes."""
        return self.node(self.size - 1) + 1

    def node(self, device: int) -> int:
        """Return the index of the node that contains `device`."""
        first, levels = self.part(device)
        before = sum(
            -(-group.size // group.levels[0].size)
            for group, start in self._pools_with_first_device()
            if start < first
        )
        return before + (device - first) // levels[0].size

    def part(self, device: int) -> tuple[int, tuple[Level, ...]]:
        """Return (first device, levels) of the pool that contains `device`. In a cluster without
        pools, return 0 and the levels of the cluster.
        """
        self._check_device(device)
        if not self.groups:
            return 0, self.levels
        group, start = next(
            (group, start)
            for group, start in self._pools_with_first_device()
            if device < start + group.size
        )
        return start, group.levels

    def level(self, first: int, second: int) -> Level | None:
        """Return the innermost level that connects two devices, or None if both are one device."""
        start, levels = self.part(first)
        if first == second:
            return None
        if self.groups and self.part(second)[0] != start:
            return self.levels[0]
        self._check_device(second)
        low = first - start
        high = second - start
        for level in levels[:-1]:
            low = low // level.size
            high = high // level.size
            if low == high:
                return level
        return levels[-1]

    def link(self, first: int, second: int) -> Link:
        """Return the link between two devices. The link of a device to itself has the bandwidth of
        its memory and no latency.
        """
        level = self.level(first, second)
        return (
            level.link
            if level is not None
            else Link(0.0, self.devices[first].bandwidth_bytes_per_s)
        )

    def slowest_link(self, group: Sequence[int]) -> Link:
        """Return the link with the lowest bandwidth between any two devices of `group`. Of links
        with equal bandwidth, return the one with the highest latency.
        """
        members = sorted(set(group))
        if not members:
            raise ConfigurationError("the slowest link of a group of 0 devices is undefined")
        if len(members) == 1:
            return self.link(members[0], members[0])
        # A comparison of neighbours in sorted order suffices: if two members are in different
        # groups of a level, then so are two neighbours between them, which use a link of this
        # level.
        return slowest_of(self.link(first, second) for first, second in pairwise(members))

    def take(self, count: int) -> Cluster:
        """Return the cluster of the first `count` devices, with the sizes of levels reduced
        accordingly. Raise InfeasibleError if there are fewer devices, and ConfigurationError if
        `count` is below 1.
        """
        if count < 1:
            raise ConfigurationError(
                f"the number of devices to plan for is {count}, expected 1 or more",
                hint="use one device or more",
            )
        if count > self.size:
            fewer = f"{count - self.size} fewer than the requested {count}"
            raise InfeasibleError(
                f"cluster {self.name} consists of {self.size} {plural(self.size, 'device')}, "
                f"{fewer}"
            )
        if not self.groups:
            return replace(
                self, devices=self.devices[:count], levels=_shrink_levels(self.levels, count)
            )
        kept = [
            (group, min(group.size, count - start))
            for group, start in self._pools_with_first_device()
            if start < count
        ]
        groups = tuple(
            replace(group, size=size, levels=_shrink_levels(group.levels, size))
            for group, size in kept
        )
        return replace(
            self,
            devices=self.devices[:count],
            levels=_shrink_levels(self.levels, len(groups)),
            groups=groups,
        )

    def with_bandwidth(self, factor: float, inside_nodes: bool) -> Cluster:
        """Return the cluster with the bandwidth of some links multiplied by `factor`: links inside
        nodes if `inside_nodes` is true, otherwise all other links.
        """

        def scale_levels(levels: tuple[Level, ...], first: int) -> tuple[Level, ...]:
            found = []
            for number, level in enumerate(levels, first):
                if (number == 0) == inside_nodes and level.size > 1:
                    bandwidth = factor * level.link.bandwidth_bytes_per_s
                    level = replace(
                        level, link=replace(level.link, bandwidth_bytes_per_s=bandwidth)
                    )
                found.append(level)
            return tuple(found)

        groups = tuple(
            replace(group, levels=scale_levels(group.levels, 0)) for group in self.groups
        )
        # The levels of a mixed cluster connect its pools and are outside of nodes. So their numbers
        # start at 1; number 0 is the level inside a node.
        return replace(self, groups=groups, levels=scale_levels(self.levels, 1 if groups else 0))

    def with_pool_order(self, order: Sequence[int]) -> tuple[Cluster, tuple[int, ...]]:
        """Return (cluster, devices): the mixed cluster with its pools in the order `order`, and for
        each of its devices the index of this device in the present cluster.
        """
        placed = list(self._pools_with_first_device())
        groups, starts = zip(*(placed[each] for each in order), strict=True)
        old = tuple(
            chain.from_iterable(
                range(at, at + group.size) for group, at in zip(groups, starts, strict=True)
            )
        )
        return replace(
            self, devices=tuple(self.devices[device] for device in old), groups=groups
        ), old

    def _pools_with_first_device(self) -> Iterable[tuple[DevicePool, int]]:
        """Return pairs (pool, index of its first device)."""
        starts = accumulate((group.size for group in self.groups), initial=0)
        return zip(self.groups, starts, strict=False)

    def _check_device(self, device: int) -> None:
        """Raise ConfigurationError if the cluster has no device with this index."""
        if not 0 <= device < self.size:
            raise ConfigurationError(
                f"device {device} does not exist in cluster {self.name}",
                f"use devices 0 to {self.size - 1}",
            )


def slowest_of(links: Iterable[Link]) -> Link:
    """Return the link with the lowest bandwidth. Of links with equal bandwidth, return the one with
    the highest latency.
    """
    return min(set(links), key=lambda link: (link.bandwidth_bytes_per_s, -link.latency_s))


def _check_level_capacity(who: str, count: int, levels: Sequence[Level]) -> None:
    """Raise ConfigurationError unless the levels can connect `count` devices or pools. `who` names
    the cluster or pool in the message.
    """
    if count < 1 or not levels:
        raise ConfigurationError(
            f"{who} requires a device and a level, but the number of devices is {count} and the "
            f"number of levels is {len(levels)}"
        )
    if any(level.size < 1 for level in levels):
        raise ConfigurationError(f"a level of {who} has a size below 1")
    places = math.prod(level.size for level in levels)
    if places < count:
        raise ConfigurationError(
            f"{who} consists of {count} devices or groups, but its levels connect only {places}"
        )


def _shrink_levels(levels: Sequence[Level], count: int) -> tuple[Level, ...]:
    """Return the levels with sizes that are no larger than `count` devices or pools require."""
    found = []
    for level in levels:
        found.append(replace(level, size=min(level.size, count)))
        count = -(-count // level.size)
    return tuple(found)


def usable_cpu_cores() -> int:
    """Return the number of CPU cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
