"""The devices a plan is made for and the links between them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopipe.ir.costs import Affine, ExchangeCost, TaskCosts
from autopipe.ir.errors import ConfigurationError, InfeasibleError

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp64")
"""The precisions a device may state a peak for."""

OPERATOR_CLASSES = ("matmul", "convolution", "elementwise", "normalization", "reduction", "memory", "recurrent")
"""The classes of operators that reach different fractions of what the hardware can do."""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator (or one processor socket) as a roofline model sees it."""

    name: str
    """The product, such as `V100-SXM2-16GB`."""

    memory_bytes: int
    """Memory a program may use, in bytes."""

    peak_flops: tuple[tuple[str, float], ...]
    """FLOP/s by precision, one multiply-add counted as two."""

    bandwidth_bytes_per_s: float
    """Bytes a second between the device and its own memory."""

    launch_latency_s: float
    """Seconds from one kernel's end to the next one's start, when each is launched by itself."""

    efficiency: tuple[tuple[str, float], ...]
    """Fraction of the peak (or of the bandwidth) reached, by operator class; above 0, at most 1."""

    tasks: TaskCosts | None = None
    """What tasks take besides their operators, where that was measured."""

    def peak(self, precision: str) -> float:
        """FLOP/s in `precision`; a narrower one that the device has no units for runs at the rate of fp32.

        Raises ConfigurationError where neither is stated.
        """
        stated = dict(self.peak_flops)
        if precision in stated:
            return stated[precision]
        if precision in ("tf32", "fp16", "bf16") and "fp32" in stated:
            return stated["fp32"]
        raise ConfigurationError(
            f"device {self.name} states no peak FLOP/s for {precision}",
            hint=f"stated: {', '.join(stated) or 'none'}",
        )

    def fraction(self, operator_class: str) -> float:
        """Fraction of the peak (or of the bandwidth) that operators of this class reach.

        Raises ConfigurationError where the device does not state it.
        """
        stated = dict(self.efficiency)
        if operator_class not in stated:
            raise ConfigurationError(
                f"device {self.name} states no efficiency for operators of class {operator_class}",
                hint=f"stated: {', '.join(stated) or 'none'}",
            )
        return stated[operator_class]


@dataclass(frozen=True, slots=True)
class Link:
    """A way between two devices: sending n bytes takes `latency_s + n / bandwidth_bytes_per_s`."""

    latency_s: float
    """Seconds before the first byte arrives."""

    bandwidth_bytes_per_s: float
    """Bytes a second that one device sends to another, in one direction."""

    def seconds(self, size_bytes: float) -> float:
        """Time to send `size_bytes` bytes from one device to another."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the hierarchy: `size` groups of the level below (devices, at the lowest) joined by `link`."""

    name: str
    """What the level forms, such as `node` or `cluster`."""

    size: int
    """How many members of the level below one group holds."""

    link: Link
    """The link between two members."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices 0, 1, ... filled into nodes in order, nodes into the levels above.

    Where the number of devices is not a multiple of a level's extent, the last group of that level is partly filled.
    """

    name: str
    """The preset or the file it comes from."""

    devices: tuple[Device, ...]
    """One entry a device, in order of their indices."""

    levels: tuple[Level, ...]
    """From the innermost (devices in a node) to the outermost (nodes in the cluster)."""

    collectives: tuple[ExchangeCost, ...] = ()
    """What collectives of ranks in one node take, where that was measured."""

    post: Affine | None = None
    """What posting either end of a message takes of its device's own time, where that was measured."""

    def __post_init__(self) -> None:
        if not self.devices or not self.levels:
            raise ConfigurationError(f"cluster {self.name} needs at least one device and one level")
        if any(level.size < 1 for level in self.levels):
            raise ConfigurationError(f"cluster {self.name} has a level of size below 1")
        places = math.prod(level.size for level in self.levels)
        if places < len(self.devices):
            raise ConfigurationError(
                f"cluster {self.name} has {len(self.devices)} devices but its levels hold only {places}"
            )

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def devices_per_node(self) -> int:
        """Number of devices in a full node."""
        return self.levels[0].size

    @property
    def node_count(self) -> int:
        """Number of nodes that hold a device."""
        return -(-self.size // self.devices_per_node)

    def node(self, device: int) -> int:
        """Index of the node that holds `device`."""
        return self._index(device) // self.devices_per_node

    def level(self, first: int, second: int) -> Level | None:
        """The level of the smallest group that holds both devices; None for one and the same device."""
        low, high = self._index(first), self._index(second)
        if low == high:
            return None
        for level in self.levels[:-1]:
            low, high = low // level.size, high // level.size
            if low == high:
                return level
        return self.levels[-1]

    def link(self, first: int, second: int) -> Link:
        """The link between two devices; a device reaches itself at the bandwidth of its memory, without latency."""
        level = self.level(first, second)
        return level.link if level is not None else Link(0.0, self.devices[first].bandwidth_bytes_per_s)

    def slowest_link(self, group: Sequence[int]) -> Link:
        """The link of least bandwidth (of most latency among equals) between any two devices of `group`."""
        members = sorted(set(group))
        if not members:
            raise ConfigurationError("an empty group of devices has no link")
        if len(members) == 1:
            return self.link(members[0], members[0])
        # Wherever two members part at some level, so do two members that are neighbours in order of index.
        links = {self.link(first, second) for first, second in itertools.pairwise(members)}
        return min(links, key=lambda link: (link.bandwidth_bytes_per_s, -link.latency_s))

    def take(self, count: int) -> Cluster:
        """The first `count` devices; each level keeps the places still needed.

        Raises InfeasibleError where there are fewer, ConfigurationError for a count below 1.
        """
        if count < 1:
            raise ConfigurationError(f"cannot plan for {count} devices", hint="give at least 1")
        if count > self.size:
            raise InfeasibleError(
                f"cluster {self.name} has {self.size} devices, {count - self.size} fewer than the {count} asked for"
            )
        levels = []
        members = count
        for level in self.levels:
            levels.append(replace(level, size=min(level.size, members)))
            members = -(-members // level.size)
        return replace(self, devices=self.devices[:count], levels=tuple(levels))

    def _index(self, device: int) -> int:
        if not 0 <= device < self.size:
            raise ConfigurationError(
                f"cluster {self.name} has no device {device}", hint=f"devices are 0 to {self.size - 1}"
            )
        return device
