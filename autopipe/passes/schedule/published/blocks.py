"""The five placements of the Tessel paper as block graphs, and published schedules for any block
graph.

A block is one phase of one stage; a block graph has the blocks of one micro-batch. For shape x,
which has two pipelines, it has the blocks of a group of two micro-batches, and "micro-batch" then
means this group. A published schedule assigns each block a slot on its grid. The slots define the
order on each device, and each block starts as early as that order permits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autopipe.ir.block_schedule import Block, BlockGraph, BlockSchedule
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.passes.schedule.published.base import first_slot, forward_and_backward_slots
from autopipe.passes.schedule.tessel.model import earliest_starts, with_observed_period

SHAPES = ("v", "x", "m", "nn", "k")
"""Names of the placement shapes. Upper and lower case are equivalent."""


@dataclass(frozen=True, slots=True)
class _ForwardPart:
    """A part of the forward of one micro-batch, on one device or on all devices."""

    name: str
    devices: tuple[int, ...]
    after: tuple[int, ...]
    """Indices of the parts that this part depends on."""
    memory: int = 1


def shape_blocks(
    name: str,
    devices: int,
    train: bool,
    memory: int | None = None,
    forward: int = 1,
    backward: int = 3,
) -> BlockGraph:
    """Return the blocks of one micro-batch for the placement shape `name` on an even number of
    devices.

    The shapes are the placements of Lin et al., "Tessel" (HPCA 2024), section VI:

    - v: GPT, one stage per device, backwards in reverse order;
    - x: Chimera, two pipelines in opposite directions, so that the blocks are those of two
      micro-batches;
    - m and nn: GPT and mT5 with large embeddings sharded over all devices;
    - k: Flava, two branches followed by a cross encoder sharded over all devices.

    A stage on one device takes time `forward` and adds 1 to the memory in use; its backward takes
    time `backward` and frees this memory. A block on all devices takes time 1 in both directions.
    It changes no memory, except for shape k, in which its forward adds 1 and its backward frees 1.
    Without `train` there are only forwards, and they change no memory. `memory` is the memory limit
    of each device, None for no limit.

    Raises ConfigurationError for an unknown shape or an odd number of devices.
    """
    if name.lower() not in SHAPES:
        raise ConfigurationError(
            f"shape {name!r} is unknown", hint=f"use one of {', '.join(SHAPES)}"
        )
    if devices < 2 or devices % 2:
        raise ConfigurationError(
            f"shape {name} requires an even number of devices, at least 2, but the number is "
            f"{devices}"
        )
    pieces = _forward_parts(name.lower(), devices)
    last = 2 * len(pieces) - 1

    def block(
        piece: _ForwardPart, phase: str, time: int, memory: int, after: Sequence[int]
    ) -> Block:
        """Return the block of one phase ("F" or "B") of a part. `after` are the indices of the
        blocks that it depends on.
        """
        is_sharded = len(piece.devices) > 1
        block_name = f"{phase}{piece.name}"
        if is_sharded:
            block_name = f"TP{phase.lower()}{piece.name}"
        return Block(block_name, piece.devices, 1 if is_sharded else time, memory, tuple(after))

    blocks = [
        block(piece, "F", forward, piece.memory if train else 0, piece.after) for piece in pieces
    ]
    # The backwards are in reverse order. A backward waits for the backwards of the parts that
    # depend on its part. If no part depends on its part, it waits for the forward of its part.
    for index, piece in reversed(list(enumerate(pieces))) if train else ():
        after = sorted(
            last - other for other, each in enumerate(pieces) if index in each.after
        ) or [index]
        blocks.append(block(piece, "B", backward, -piece.memory, after))
    graph = BlockGraph(devices, tuple(blocks), (memory,) * devices, 2 if name.lower() == "x" else 1)
    graph.verify()
    return graph


def _forward_parts(name: str, devices: int) -> list[_ForwardPart]:
    """Return the parts of the forward of one micro-batch for a placement shape."""
    every = tuple(range(devices))
    half = devices // 2
    if name == "k":  # Two branches on half of the devices each, then a block on all devices.
        branches = [_ForwardPart(str(d), (d,), () if d in (0, half) else (d - 1,)) for d in every]
        return [*branches, _ForwardPart("0", every, (half - 1, devices - 1))]
    if name == "x":
        # Two independent chains. Names must differ, so the names of the chain that starts on the
        # last device continue at str(devices).
        mirrored = [
            _ForwardPart(str(devices + d), (devices - 1 - d,), (devices + d - 1,) if d else ())
            for d in every
        ]
        return [*_chain_parts(devices, ()), *mirrored]
    return _chain_parts(devices, {"v": (), "m": (0,), "nn": (0, half)}[name])


def _chain_parts(devices: int, sharded_before: Sequence[int]) -> list[_ForwardPart]:
    """Return a chain with one part per device. A part on all devices comes directly before the part
    of each device in `sharded_before`.
    """
    pieces: list[_ForwardPart] = []
    for device in range(devices):
        if device in sharded_before:
            after = (len(pieces) - 1,) if pieces else ()
            pieces.append(
                _ForwardPart(
                    str(sharded_before.index(device)), tuple(range(devices)), after, memory=0
                )
            )
        pieces.append(_ForwardPart(str(device), (device,), (len(pieces) - 1,) if pieces else ()))
    return pieces


@dataclass(frozen=True, slots=True)
class BlockChain:
    """A chain of blocks that visits devices one by one and, in training, visits them again in
    reverse order.
    """

    devices: tuple[int, ...]
    """Device of each stage, in the order of the forwards."""
    forwards: tuple[int, ...]
    """Index of each stage's forward in the blocks of the graph."""
    backwards: tuple[int, ...]
    """Index of each stage's backward in the blocks of the graph; () without training."""
    shared: tuple[tuple[int, int, bool], ...]
    """The blocks on several devices, as (block, neighbour, before). `neighbour` is a block of a
    stage, and `before` is True if the block runs just before it, False if just after it.
    """


def _block_chains(graph: BlockGraph, schedule: str) -> tuple[BlockChain, ...]:
    """Return the chains of which a block graph consists, in the order of their first blocks. Raises
    InfeasibleError, which names `schedule`, if the graph does not consist of chains.
    """
    chains: list[list[int]] = []
    for index in graph.order:
        after = graph.blocks[index].after
        chain = next((each for each in chains if after == (each[-1],)), None)
        if chain is not None:
            chain.append(index)
        elif after:
            name = graph.blocks[index].name
            raise _rejection(schedule, f"block {name!r} starts a branch")
        else:
            chains.append([index])
    found = []
    for chain in chains:
        stages = [index for index in chain if len(graph.blocks[index].devices) == 1]
        path = [graph.blocks[index].devices[0] for index in stages]
        count = len(path) if len(set(path)) == len(path) else len(path) // 2
        devices = path[:count]
        returned = path[count:]
        if not path or len(set(devices)) < count or returned not in ([], devices[::-1]):
            raise _rejection(
                schedule, f"devices {path} are not visited once forward and once in reverse"
            )
        # Up to the last forward, the neighbour of a block on several devices is the block of the
        # next stage. After the last forward, it is the block of the previous stage.
        last_forward = chain.index(stages[count - 1])
        shared = []
        for position, index in enumerate(chain):
            if index not in stages:
                before = position < last_forward
                candidates = chain[position:] if before else chain[position::-1]
                neighbour = next(other for other in candidates if other in stages)
                shared.append((index, neighbour, before))
        found.append(
            BlockChain(
                tuple(devices),
                tuple(stages[:count]),
                tuple(reversed(stages[count:])),
                tuple(shared),
            )
        )
    return tuple(found)


def _rejection(schedule: str, reason: str) -> InfeasibleError:
    """Return the error for blocks that a schedule of chains cannot run. `reason` is a clause."""
    return InfeasibleError(
        f"schedule {schedule} requires chains of stages, but {reason}",
        hint="use schedule tessel, which supports any blocks",
        where="blocks",
    )


SlottedBlocks = Iterator[tuple[int, int, int]]
"""Triples (slot, micro-batch, index of the block). On each device, blocks run in the order of their
slots, which are integers.
"""


def block_schedule_names() -> tuple[str, ...]:
    """Return the names of the published schedules that support block graphs, in
    alphabetical order.
    """
    return tuple(sorted(_SLOTS))


def schedule_blocks(name: str, graph: BlockGraph, micro_batches: int) -> BlockSchedule:
    """Return the schedule of a block graph for `micro_batches` micro-batches under the published
    schedule `name`.

    Raises ConfigurationError if the schedule does not support block graphs or the blocks are
    malformed, and InfeasibleError if the schedule cannot run these blocks or a device needs more
    memory than its limit.
    """
    if name not in _SLOTS:
        raise ConfigurationError(
            f"schedule {name!r} does not support blocks",
            hint=f"use schedule {', '.join(block_schedule_names())} or tessel",
        )
    if micro_batches < 1:
        raise ConfigurationError(
            f"the number of micro-batches is {micro_batches}, expected at least 1"
        )
    graph.verify()
    shared = next((block.name for block in graph.blocks if len(block.devices) > 1), None)
    if shared is not None and name in ("1f1b", "chimera"):
        raise InfeasibleError(
            f"schedule {name} requires blocks on one device each",
            hint="use schedule 1f1b_plus or tessel",
            where=f"block {shared!r}",
        )
    position = {index: position for position, index in enumerate(graph.order)}
    slots = sorted(
        _SLOTS[name](graph, micro_batches), key=lambda each: (each[0], each[1], position[each[2]])
    )
    starts = earliest_starts(
        graph, micro_batches, [(micro_batch, index) for _, micro_batch, index in slots]
    )
    schedule = with_observed_period(graph, starts)
    for device, (peak, limit) in enumerate(zip(schedule.peak_memory, graph.memory, strict=True)):
        if limit is not None and peak > limit:
            raise InfeasibleError(
                f"schedule {name} requires the memory {peak}, above the limit of {limit}",
                where=f"device {device}",
            )
    return schedule


def _gpipe(graph: BlockGraph, micro_batches: int) -> SlottedBlocks:
    """Yield (slot, micro-batch, block) such that all forwards come before all other blocks.
    Forwards are the blocks that add memory, and all blocks on which these depend. If no block adds
    memory, all blocks count as forwards.
    """
    forward = {index for index, block in enumerate(graph.blocks) if block.memory > 0}
    for index in reversed(graph.order):
        if index in forward:
            forward.update(graph.blocks[index].after)
    for micro_batch in range(micro_batches):
        for position, index in enumerate(graph.order):
            first = 0 if index in forward or not forward else micro_batches + len(graph.blocks)
            yield first + micro_batch + position, micro_batch, index


def _one_f_one_b_plus(graph: BlockGraph, micro_batches: int) -> SlottedBlocks:
    """Yield (slot, micro-batch, block) of 1F1B. The time slots, of which each block on one device
    takes one, are doubled so that they are even. A block on several devices gets the odd number
    before or after the slot of its neighbour (`BlockChain.shared`).

    Lin et al., "Tessel" (HPCA 2024), section VI-A. Without backwards, micro-batches start one time
    slot apart.
    """
    chains = _block_chains(graph, "1f1b_plus")
    if len(chains) > 1:
        raise InfeasibleError(
            f"schedule 1f1b requires 1 chain of stages, but the blocks form {len(chains)}",
            where="blocks",
        )
    for micro_batch in range(micro_batches):
        first = 2 * micro_batch if chains[0].backwards else micro_batch
        slots = forward_and_backward_slots(chains[0].forwards, chains[0].backwards, first)
        slot_of = {index: slot for slot, index in slots}
        yield from ((2 * slot, micro_batch, index) for index, slot in slot_of.items())
        yield from (
            (2 * slot_of[neighbour] + (-1 if before else 1), micro_batch, index)
            for index, neighbour, before in chains[0].shared
        )


def _chimera(graph: BlockGraph, micro_batches: int) -> SlottedBlocks:
    """Yield (slot, micro-batch, block) for two chains of blocks in opposite directions, in which
    each block takes one time slot. Each chain runs micro-batches in groups of half the number of
    devices, as in schedule Chimera.
    """
    chains = _block_chains(graph, "chimera")
    if (
        len(chains) != 2
        or chains[0].devices != chains[1].devices[::-1]
        or len(chains[0].devices) % 2
    ):
        raise InfeasibleError(
            "schedule chimera requires two chains in opposite directions over the same even "
            "number of devices",
            hint="use shape x",
            where="blocks",
        )
    depth = len(chains[0].devices)
    group = depth // 2 if chains[0].backwards else micro_batches
    for micro_batch in range(micro_batches):
        for chain in chains:
            slots = forward_and_backward_slots(
                chain.forwards, chain.backwards, first_slot(micro_batch, depth, group)
            )
            yield from ((slot, micro_batch, index) for slot, index in slots)


_SLOTS: dict[str, Callable[[BlockGraph, int], SlottedBlocks]] = {
    "1f1b": _one_f_one_b_plus,
    "1f1b_plus": _one_f_one_b_plus,
    "chimera": _chimera,
    "gpipe": _gpipe,
}
