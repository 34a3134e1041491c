"""The schema of a placement given by hand: the blocks of one unit, for schedule search without a
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from autopipe.configs.schema import convert
from autopipe.configs.yaml_source import Place, read_file
from autopipe.ir.block_schedule import Block, BlockGraph
from autopipe.ir.codec import AtLeast, AtMost, Origin
from autopipe.ir.errors import ConfigurationError, nearest, quote
from autopipe.ir.words import plural

MOST_DEVICES = 4096
MOST_BLOCKS = 20_000
MOST = 10**12
"""Largest time and memory: sums over all blocks of all units stay far below 2^63."""
Amount = Annotated[int, AtLeast(0), AtMost(MOST)]


@dataclass(frozen=True, slots=True)
class BlockDescription:
    name: str
    """Its name, which no other block has."""
    devices: tuple[Annotated[int, AtLeast(0)], ...]
    """The device it runs on, or several that run it together."""
    time: Annotated[int, AtLeast(1), AtMost(MOST)]
    """How long it takes, in units of your choice."""
    memory: Annotated[int, AtLeast(-MOST), AtMost(MOST)] = 0
    """Change of the memory in use on each of its devices when it starts; below 0 where it frees."""
    after: tuple[str, ...] = ()
    """Names of the blocks of the same unit that must have ended before it starts."""
    delays: tuple[Amount, ...] = ()
    """For each of `after` the time that what it sends is under way; none without it."""
    place: Annotated[Place, Origin("name")] = field(default=Place("a placement"), compare=False)
    """Where the name was written."""


@dataclass(frozen=True, slots=True)
class PlacementDescription:
    format: Literal["autopipe.placement/1"]
    """Format of the file."""
    devices: Annotated[int, AtLeast(1), AtMost(MOST_DEVICES)]
    """Number of devices."""
    blocks: tuple[BlockDescription, ...]
    """The blocks of one unit, in any order."""
    memory: Amount | tuple[Amount, ...] | None = None
    """Room on a device: one number for all, or a list with one for each; `null` for no limit."""
    micro_batches_per_unit: Annotated[int, AtLeast(1), AtMost(2**20)] = 1
    """Micro-batches that one unit stands for."""


def read_placement(path: str | Path) -> BlockGraph:
    """The blocks described in a YAML file. Raises ConfigurationError with `file:line`."""
    document = read_file(path)
    description = convert(document, PlacementDescription)
    top = str(document.place)
    index = _indices(description.blocks, top)
    devices = description.devices
    memory = description.memory
    blocks = tuple(_block(block, index, devices) for block in description.blocks)
    rooms = memory if isinstance(memory, tuple) else (memory,) * devices
    if len(rooms) != devices:
        message = (
            f"memory has {len(rooms)} {plural(len(rooms), 'number')} for {devices} "
            f"{plural(devices, 'device')}"
        )
        raise ConfigurationError(message, "give one for each device, or one number for all", top)
    graph = BlockGraph(devices, blocks, rooms, description.micro_batches_per_unit)
    try:
        graph.verify()
    except ConfigurationError as error:  # a circle: all else has been checked with its line
        waiting = min(set(range(len(graph.blocks))) - set(graph.order))
        place = description.blocks[waiting].place
        raise ConfigurationError(
            error.message, "remove one of their `after`", str(place)
        ) from error
    return graph


def _indices(blocks: Sequence[BlockDescription], top: str) -> dict[str, int]:
    if not 0 < len(blocks) <= MOST_BLOCKS:
        raise ConfigurationError(
            f"there are {len(blocks)} {plural(len(blocks), 'block')}",
            f"1 to {MOST_BLOCKS} are taken",
            top,
        )
    index: dict[str, int] = {}
    for position, block in enumerate(blocks):
        if block.name in index:
            first = blocks[index[block.name]].place.line
            message = f"two blocks are called {quote(block.name)} (the first in line {first})"
            raise ConfigurationError(message, "give each a name of its own", str(block.place))
        index[block.name] = position
    return index


def _block(described: BlockDescription, index: dict[str, int], devices: int) -> Block:
    name = f"block {quote(described.name)}"
    place = str(described.place)
    if not described.devices:
        raise ConfigurationError(f"{name} is on no device", "name at least one", place)
    if len(set(described.devices)) < len(described.devices):
        raise ConfigurationError(
            f"{name} names a device twice: {list(described.devices)}", "name each once", place
        )
    if max(described.devices) >= devices:
        message = f"{name} is on device {max(described.devices)}, but there are {devices}"
        raise ConfigurationError(message, f"devices are numbered 0 to {devices - 1}", place)
    for other in described.after:
        if other not in index:
            message = f"{name} comes after {quote(other)}, which is no block"
            raise ConfigurationError(message, nearest(other, index), place)
    if described.delays and len(described.delays) != len(described.after):
        message = (
            f"{name} has {len(described.delays)} {plural(len(described.delays), 'delay')} for "
            f"{len(described.after)} "
            f"{plural(len(described.after), 'block')} before it"
        )
        raise ConfigurationError(message, "give one for each of `after`, or none", place)
    after = tuple(index[other] for other in described.after)
    return Block(
        described.name, described.devices, described.time, described.memory, after, described.delays
    )
