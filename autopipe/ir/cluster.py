"""The devices a plan is made for and the links between them, and the memory of a GPU that no tensor
can have.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import Annotated

from autopipe.ir.codec import FormerKey
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.measured_costs import Affine, ExchangeCost, TaskCosts
from autopipe.ir.words import plural

_BUFFERS_BYTES = 524_288 + 4_915_200 + 4_194_304
"""Bytes that a communicator takes for each channel (a CTA of its kernels) to receive into, for the
protocols LL, LL128 and Simple: DEFAULT_LL_BUFFSIZE, DEFAULT_LL128_BUFFSIZE and DEFAULT_BUFFSIZE
(NCCL_BUFFSIZE) of NCCL 2.21's src/init.cc and src/include/device.h. Connections, and with them
buffers, are made when first used (NCCL_RUNTIME_CONNECT).
"""
MESSAGE_CTAS = 32
"""Blocks of threads that all of a rank's message communicators may use at once. A kernel that waits
for a message spins on a multiprocessor for each, of which large GPUs have about a hundred, while
the rank computes.
"""
_GROUP_CHANNELS = 24
"""Channels of a group's communicator, as many as NCCL opens at most: 24 with NVSwitch, 12 with a
V100's NVLinks, 2 with PCIe alone.
"""
_GROUPS = 3
"""Groups of a rank that sum or gather: one across replicas, one inside a stage, one of tied weights
or of all ranks.
"""


def nccl_bytes(ranks: int) -> int:
    """Bytes of NCCL's buffers on one of these ranks, at most."""
    return 0 if ranks < 2 else (MESSAGE_CTAS + _GROUPS * _GROUP_CHANNELS) * _BUFFERS_BYTES


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator (or one processor socket) as a roofline model sees it, and what was measured
    on it, if anything.

    `peak_flops` are FLOP/s by precision, a multiply-add counting two; `efficiency` is the fraction
    of the peak (or of the bandwidth to the device's own memory) that is reached, by operator class.
    Of measured costs, `tasks` are those besides operators, `collectives` of ranks in one node,
    `post` is the CPU time of posting a message at either end, `follow` that of each further message
    of the same task.
    """

    name: str
    memory_bytes: int
    peak_flops: tuple[tuple[str, float], ...]
    bandwidth_bytes_per_s: float
    launch_latency_s: float
    """Seconds from one kernel's end to the next one's start, when each is launched by itself."""
    efficiency: tuple[tuple[str, float], ...]
    tasks: TaskCosts | None = None
    collectives: tuple[ExchangeCost, ...] = ()
    post: Affine | None = None
    follow: Affine | None = None
    context_bytes: int = 0
    """Bytes of a GPU's memory that its process takes before any tensor: the CUDA context with its
    kernels.
    """
    host_launch_s: float = 0.0
    """Seconds of the host for one operator of an eager program, as `cost/host.py` counts operators.

    0 if the host's time does not count, for example because the host is the device."""

    def __hash__(self) -> int:
        # Devices are keys of many tables, and what tells them apart is at the front.
        return hash((self.name, self.memory_bytes, self.peak_flops, self.bandwidth_bytes_per_s))

    def peak(self, precision: str) -> float:
        """FLOP/s in `precision`; a narrower one that the device has no units for runs at the rate
        of fp32. Raises ConfigurationError where neither is stated.
        """
        stated = dict(self.peak_flops)
        narrow = (
            precision in ("tf32", "fp16", "bf16") and precision not in stated and "fp32" in stated
        )
        return self._stated(stated, "fp32" if narrow else precision, "peak FLOP/s for")

    def fraction(self, operator_class: str) -> float:
        """Of the peak or the bandwidth. Raises ConfigurationError where the device does not state
        it.
        """
        return self._stated(
            dict(self.efficiency), operator_class, "efficiency for operators of class"
        )

    def _stated(self, values: dict[str, float], name: str, what: str) -> float:
        if name not in values:
            hint = f"stated: {', '.join(values) or 'none'}"
            raise ConfigurationError(f"device {self.name} states no {what} {name}", hint)
        return values[name]


@dataclass(frozen=True, slots=True)
class Link:
    """A way between two devices: sending n bytes takes `latency_s + n / bandwidth_bytes_per_s`."""

    latency_s: float
    bandwidth_bytes_per_s: float

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the hierarchy: `size` groups of the level below (devices, at the lowest) joined
    by `link`.
    """

    name: str
    size: int
    link: Link


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring devices of a cluster that have nodes and links of their own."""

    name: str = field(compare=False)
    size: int
    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        _check_room(f"group {self.name}", self.size, self.levels)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices 0, 1, ... filled into nodes in order, nodes into the levels above. Where the number
    of devices is not a multiple of a level's extent, the last group of that level is partly filled.
    A cluster of `groups` holds each one's devices in order, and one level that joins the groups.
    """

    name: str
    devices: tuple[Device, ...]
    levels: tuple[Level, ...]
    """From the innermost (devices in a node) to the outermost (nodes in the cluster); with `groups`
    what joins them.
    """
    groups: tuple[Group, ...] = ()
    """Where nodes or links are not everywhere alike: the parts within which they are."""
    allow_mixed_stages: Annotated[bool, FormerKey("straddle")] = False
    """True if strategies may make stages whose devices are of different types. If it is false, only
    constraints can make such a stage.
    """

    def __post_init__(self) -> None:
        _check_room(f"cluster {self.name}", len(self.groups or self.devices), self.levels)
        if self.groups and len(self.levels) != 1:
            raise ConfigurationError(
                (
                    f"cluster {self.name} joins groups by {len(self.levels)} "
                    f"{plural(len(self.levels), 'level')}"
                ),
                hint="give one",
            )
        if self.groups and sum(group.size for group in self.groups) != self.size:
            raise ConfigurationError(
                f"the groups of cluster {self.name} do not hold its {self.size} "
                f"{plural(self.size, 'device')}"
            )

    @property
    def size(self) -> int:
        return len(self.devices)

    def __hash__(self) -> int:
        # Clusters are keys of tables, and thousands of devices would be hashed at each look-up.
        return hash((self.name, len(self.devices), self.levels, self.groups))

    @property
    def kinds(self) -> tuple[Device, ...]:
        return self.kinds_among(range(self.size))

    def kinds_among(self, devices: Iterable[int]) -> tuple[Device, ...]:
        """The kinds of some devices, in the order of the first of each."""
        # Devices of one kind are mostly one object, which need not be compared.
        found = {id(kind): kind for kind in map(self.devices.__getitem__, devices)}
        return tuple(dict.fromkeys(found.values()))

    @property
    def devices_per_node(self) -> int:
        """Number of devices in a full node, the smallest where groups have different ones."""
        return (
            min(group.levels[0].size for group in self.groups)
            if self.groups
            else self.levels[0].size
        )

    @property
    def node_count(self) -> int:
        return self.node(self.size - 1) + 1

    def node(self, device: int) -> int:
        first, levels = self.part(device)
        before = sum(
            -(-group.size // group.levels[0].size)
            for group, start in self._placed()
            if start < first
        )
        return before + (device - first) // levels[0].size

    def part(self, device: int) -> tuple[int, tuple[Level, ...]]:
        """The first device, and the levels, of the group that holds `device`; of the cluster where
        it has no groups.
        """
        self._check(device)
        if not self.groups:
            return 0, self.levels
        group, start = next(
            (group, start) for group, start in self._placed() if device < start + group.size
        )
        return start, group.levels

    def level(self, first: int, second: int) -> Level | None:
        """The level of the smallest group that holds both devices; None for one and the same
        device.
        """
        start, levels = self.part(first)
        if first == second:
            return None
        if self.groups and self.part(second)[0] != start:
            return self.levels[0]
        self._check(second)
        low = first - start
        high = second - start
        for level in levels[:-1]:
            low = low // level.size
            high = high // level.size
            if low == high:
                return level
        return levels[-1]

    def link(self, first: int, second: int) -> Link:
        """The link between two devices; a device reaches itself at the bandwidth of its memory,
        without latency.
        """
        level = self.level(first, second)
        return (
            level.link
            if level is not None
            else Link(0.0, self.devices[first].bandwidth_bytes_per_s)
        )

    def slowest_link(self, group: Sequence[int]) -> Link:
        """The link of least bandwidth (of most latency among equals) between any two devices of
        `group`.
        """
        members = sorted(set(group))
        if not members:
            raise ConfigurationError("an empty group of devices has no link")
        if len(members) == 1:
            return self.link(members[0], members[0])
        # Wherever two members part at some level, so do two members that are neighbours in order of
        # index.
        return slower(self.link(first, second) for first, second in pairwise(members))

    def take(self, count: int) -> Cluster:
        """The first `count` devices; each level keeps the places still needed. Raises
        InfeasibleError where there are fewer, ConfigurationError for a count below 1.
        """
        if count < 1:
            raise ConfigurationError(
                f"cannot plan for {count} {plural(count, 'device')}", hint="give at least 1"
            )
        if count > self.size:
            fewer = f"{count - self.size} fewer than the {count} asked for"
            raise InfeasibleError(
                f"cluster {self.name} has {self.size} {plural(self.size, 'device')}, {fewer}"
            )
        if not self.groups:
            return replace(self, devices=self.devices[:count], levels=_filled(self.levels, count))
        kept = [
            (group, min(group.size, count - start))
            for group, start in self._placed()
            if start < count
        ]
        groups = tuple(
            replace(group, size=size, levels=_filled(group.levels, size)) for group, size in kept
        )
        return replace(
            self,
            devices=self.devices[:count],
            levels=_filled(self.levels, len(groups)),
            groups=groups,
        )

    def with_bandwidth(self, factor: float, inside_nodes: bool) -> Cluster:
        """Return the cluster with `factor` times the bandwidth of the links inside its nodes, or of
        all other links.
        """

        def scaled(levels: tuple[Level, ...], first: int) -> tuple[Level, ...]:
            found = []
            for number, level in enumerate(levels, first):
                if (number == 0) == inside_nodes and level.size > 1:
                    bandwidth = factor * level.link.bandwidth_bytes_per_s
                    level = replace(
                        level, link=replace(level.link, bandwidth_bytes_per_s=bandwidth)
                    )
                found.append(level)
            return tuple(found)

        groups = tuple(replace(group, levels=scaled(group.levels, 0)) for group in self.groups)
        # What joins groups is a level above their nodes.
        return replace(self, groups=groups, levels=scaled(self.levels, 1 if groups else 0))

    def reordered(self, order: Sequence[int]) -> tuple[Cluster, tuple[int, ...]]:
        """The groups in another order, and for each device of that cluster its index in this
        one.
        """
        placed = list(self._placed())
        groups, starts = zip(*(placed[each] for each in order), strict=True)
        old = tuple(
            chain.from_iterable(
                range(at, at + group.size) for group, at in zip(groups, starts, strict=True)
            )
        )
        return replace(
            self, devices=tuple(self.devices[device] for device in old), groups=groups
        ), old

    def _placed(self) -> Iterable[tuple[Group, int]]:
        """The groups, each with its first device."""
        starts = accumulate((group.size for group in self.groups), initial=0)
        return zip(self.groups, starts, strict=False)

    def _check(self, device: int) -> None:
        if not 0 <= device < self.size:
            raise ConfigurationError(
                f"cluster {self.name} has no device {device}", f"devices are 0 to {self.size - 1}"
            )


def slower(links: Iterable[Link]) -> Link:
    """The link of least bandwidth, of most latency among equals."""
    return min(set(links), key=lambda link: (link.bandwidth_bytes_per_s, -link.latency_s))


def _check_room(who: str, count: int, levels: Sequence[Level]) -> None:
    """Raise ConfigurationError unless `count` devices, or groups, have places in the levels."""
    if count < 1 or not levels:
        raise ConfigurationError(f"{who} needs at least one device and one level")
    if any(level.size < 1 for level in levels):
        raise ConfigurationError(f"{who} has a level of size below 1")
    places = math.prod(level.size for level in levels)
    if places < count:
        raise ConfigurationError(
            f"{who} has {count} devices or groups, but its levels hold only {places}"
        )


def _filled(levels: Sequence[Level], count: int) -> tuple[Level, ...]:
    """The levels with the places that `count` members of the innermost need."""
    found = []
    for level in levels:
        found.append(replace(level, size=min(level.size, count)))
        count = -(-count // level.size)
    return tuple(found)


def own_cores() -> int:
    """Cores of this machine that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
