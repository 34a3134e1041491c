"""The schema of a placement file: the blocks of one micro-batch, for schedule search without a
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
from autopipe.ir.codec import AtLeast, AtMost, PositionOfKey
from autopipe.ir.errors import ConfigurationError, quote, similar_name_hint
from autopipe.ir.words import plural

MAX_DEVICES = 4096
MAX_BLOCKS = 20_000
MAX_TIME_OR_MEMORY = 10**12
"""Maximum time and memory of a block. Sums over all blocks and micro-batches stay below 2^63."""
Amount = Annotated[int, AtLeast(0), AtMost(MAX_TIME_OR_MEMORY)]


@dataclass(frozen=True, slots=True)
class BlockDescription:
    name: str
    """Unique name of the block."""
    devices: tuple[Annotated[int, AtLeast(0)], ...]
    """Device of the block, or several devices that run it together."""
    time: Annotated[int, AtLeast(1), AtMost(MAX_TIME_OR_MEMORY)]
    """Duration in an arbitrary unit."""
    memory: Annotated[int, AtLeast(-MAX_TIME_OR_MEMORY), AtMost(MAX_TIME_OR_MEMORY)] = 0
    """Change of used memory on each device when the block starts; negative to free memory."""
    after: tuple[str, ...] = ()
    """Names of blocks of the same micro-batch that must end before this block starts."""
    delays: tuple[Amount, ...] = ()
    """Delay after each block of `after`, such as the time of a message. Default: no delays."""
    place: Annotated[Place, PositionOfKey("name")] = field(
        default=Place("a placement"), compare=False
    )
    """File and line of the name."""


@dataclass(frozen=True, slots=True)
class PlacementDescription:
    format: Literal["autopipe.placement/1"]
    """Format of the file."""
    devices: Annotated[int, AtLeast(1), AtMost(MAX_DEVICES)]
    """Number of devices."""
    blocks: tuple[BlockDescription, ...]
    """The blocks of one micro-batch, in any order."""
    memory: Amount | tuple[Amount, ...] | None = None
    """Memory limit: one number for all devices or a list with one per device; `null` for none."""
    micro_batches_per_unit: Annotated[int, AtLeast(1), AtMost(2**20)] = 1
    """Number of micro-batches that run as one group, if one run of the blocks has several."""


def read_placement(path: str | Path) -> BlockGraph:
    """Return the blocks of a YAML file. Raise ConfigurationError with `file:line`."""
    document = read_file(path)
    description = convert(document, PlacementDescription)
    top = str(document.place)
    index = _block_indices(description.blocks, top)
    devices = description.devices
    memory = description.memory
    blocks = tuple(_build_block(block, index, devices) for block in description.blocks)
    rooms = memory if isinstance(memory, tuple) else (memory,) * devices
    if len(rooms) != devices:
        message = (
            f"memory lists {len(rooms)} {plural(len(rooms), 'number')}, but the number of "
            f"devices is {devices}"
        )
        raise ConfigurationError(
            message, "set one number per device, or one number for all devices", top
        )
    graph = BlockGraph(devices, blocks, rooms, description.micro_batches_per_unit)
    try:
        graph.verify()
    except ConfigurationError as error:
        # `verify` raises this error only for a cycle of blocks, because the checks above report all
        # other errors.
        waiting = min(set(range(len(graph.blocks))) - set(graph.order))
        place = description.blocks[waiting].place
        raise ConfigurationError(
            error.message, "remove one of these blocks from the list `after` of another", str(place)
        ) from error
    return graph


def _block_indices(blocks: Sequence[BlockDescription], top: str) -> dict[str, int]:
    if not 0 < len(blocks) <= MAX_BLOCKS:
        raise ConfigurationError(
            f"the file describes {len(blocks)} {plural(len(blocks), 'block')}, expected 1 to "
            f"{MAX_BLOCKS}",
            f"describe 1 to {MAX_BLOCKS} blocks",
            top,
        )
    index: dict[str, int] = {}
    for position, block in enumerate(blocks):
        if block.name in index:
            first = blocks[index[block.name]].place.line
            message = f"two blocks have the name {quote(block.name)}, the first in line {first}"
            raise ConfigurationError(message, "use a unique name for each block", str(block.place))
        index[block.name] = position
    return index


def _build_block(described: BlockDescription, index: dict[str, int], devices: int) -> Block:
    name = f"block {quote(described.name)}"
    place = str(described.place)
    if not described.devices:
        raise ConfigurationError(f"{name} is on no device", "list one device or more", place)
    if len(set(described.devices)) < len(described.devices):
        raise ConfigurationError(
            f"{name} lists a device twice: {list(described.devices)}",
            "list each device once",
            place,
        )
    if max(described.devices) >= devices:
        message = (
            f"{name} is on device {max(described.devices)}, but the number of devices is {devices}"
        )
        raise ConfigurationError(message, f"use devices 0 to {devices - 1}", place)
    for other in described.after:
        if other not in index:
            message = f"{name} comes after {quote(other)}, which is not a block"
            raise ConfigurationError(message, similar_name_hint(other, index), place)
    if described.delays and len(described.delays) != len(described.after):
        message = (
            f"{name} lists {len(described.delays)} {plural(len(described.delays), 'delay')} for "
            f"{len(described.after)} {plural(len(described.after), 'block')} in `after`"
        )
        raise ConfigurationError(
            message, "list one delay for each block in `after`, or omit `delays`", place
        )
    after = tuple(index[other] for other in described.after)
    return Block(
        described.name, described.devices, described.time, described.memory, after, described.delays
    )
