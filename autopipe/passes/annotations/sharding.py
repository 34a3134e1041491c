"""Multi-device annotations of a file, whatever they are read from or written to.
https://github.com/onnx/onnx/blob/main/docs/proposals/ONNXMultiDeviceProposal.md defines them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sharding:
    """How the devices hold one tensor that a node reads or writes.

    `cuts` says into how many equal blocks a dimension is cut, as (dimension, blocks), for those that are; negative
    dimensions count from the back. `devices` holds for each block the devices with a copy of it; blocks are counted
    along the last of `cuts` first.
    """

    tensor: str
    cuts: tuple[tuple[int, int], ...]
    devices: tuple[tuple[int, ...], ...]

    def group(self) -> frozenset[int]:
        """All devices that hold a block."""
        return frozenset(device for copies in self.devices for device in copies)

    def places(self, rank: int) -> tuple[tuple[int, dict[int, int]], ...]:
        """For each of `rank` dimensions the number of blocks, and by device which one it holds."""
        found: list[tuple[int, dict[int, int]]] = [(1, dict.fromkeys(self.group(), 0)) for _ in range(rank)]
        after = math.prod(blocks for _, blocks in self.cuts)
        for dimension, blocks in self.cuts:
            after //= blocks
            index = {device: block // after % blocks for block, copies in enumerate(self.devices) for device in copies}
            found[dimension] = (blocks, index)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Annotation:
    """Annotation of a node for one configuration: its pipeline stage and the layouts of tensors of its own."""

    node: int
    """Where it stands among the file's nodes."""
    stage: int | None
    shardings: tuple[Sharding, ...]


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to spread the model over `devices` devices. Devices are known by their numbers; they may have names."""

    name: str
    devices: int
    device_names: tuple[str, ...]
    annotations: tuple[Annotation, ...]
