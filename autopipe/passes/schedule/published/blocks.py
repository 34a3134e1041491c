"""Blocks as Tessel's paper has them: its five placements, and published schedules on any blocks.

A published schedule gives each device's order by its own grid of slots; every block runs as soon as
that allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autopipe.ir.block_schedule import Block, BlockGraph, BlockSchedule
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.passes.schedule.published.base import first_slot, there_and_back
from autopipe.passes.schedule.tessel.model import in_order, observed_state

SHAPES = ("v", "x", "m", "nn", "k")
"""Their names; case does not matter."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a unit's forward, with the indices of the parts that it waits for."""

    name: str
    devices: tuple[int, ...]
    after: tuple[int, ...]
    memory: int = 1


def shape(
    name: str,
    devices: int,
    train: bool,
    memory: int | None = None,
    forward: int = 1,
    backward: int = 3,
) -> BlockGraph:
    """The blocks of one unit of a shape on an even number of devices.

    The shapes are the placements of Lin et al., "Tessel" (HPCA 2024), section VI: GPT on a V,
    Chimera's X, GPT and mT5 with large embeddings split over all devices (M and NN), and Flava's
    two branches that meet in a cross encoder split over all devices (K).

    A stage's forward takes `forward` and adds 1 to the memory in use, its backward takes `backward`
    and frees it. A block on all devices takes 1, forward and backward, and changes no memory but on
    K, whose cross encoder adds 1 and frees it. Without training there are forwards alone, and
    memory does not change. `memory` is the room on each device. A unit of X is two micro-batches.
    Raises ConfigurationError.
    """
    if name.lower() not in SHAPES:
        raise ConfigurationError(
            f"there is no shape called {name!r}", hint=f"there are: {', '.join(SHAPES)}"
        )
    if devices < 2 or devices % 2:
        raise ConfigurationError(f"shapes stand on an even number of devices, not on {devices}")
    pieces = _pieces(name.lower(), devices)
    last = 2 * len(pieces) - 1

    def block(piece: _Piece, phase: str, time: int, memory: int, after: Sequence[int]) -> Block:
        wide = len(piece.devices) > 1
        named = f"TP{phase.lower()}{piece.name}" if wide else f"{phase}{piece.name}"
        return Block(named, piece.devices, 1 if wide else time, memory, tuple(after))

    blocks = [block(each, "F", forward, each.memory if train else 0, each.after) for each in pieces]
    # Backwards in reverse: each after the backwards of what its forward feeds and, at the end,
    # after its forward.
    for index, piece in reversed(list(enumerate(pieces))) if train else ():
        after = sorted(
            last - other for other, each in enumerate(pieces) if index in each.after
        ) or [index]
        blocks.append(block(piece, "B", backward, -piece.memory, after))
    graph = BlockGraph(devices, tuple(blocks), (memory,) * devices, 2 if name.lower() == "x" else 1)
    graph.verify()
    return graph


def _pieces(name: str, devices: int) -> list[_Piece]:
    every = tuple(range(devices))
    half = devices // 2
    if name == "k":  # Two branches, each on half of the devices, that meet in a block on all.
        branches = [_Piece(str(d), (d,), () if d in (0, half) else (d - 1,)) for d in every]
        return [*branches, _Piece("0", every, (half - 1, devices - 1))]
    if (
        name == "x"
    ):  # Two independent chains; of the one that begins on the last device come stages from `devices` on.
        mirrored = [
            _Piece(str(devices + d), (devices - 1 - d,), (devices + d - 1,) if d else ())
            for d in every
        ]
        return [*_chain(devices, ()), *mirrored]
    return _chain(devices, {"v": (), "m": (0,), "nn": (0, half)}[name])


def _chain(devices: int, splits: Sequence[int]) -> list[_Piece]:
    """A stage a device, one after the other; before those of `splits` a block on all devices."""
    pieces: list[_Piece] = []
    for device in range(devices):
        if device in splits:
            after = (len(pieces) - 1,) if pieces else ()
            pieces.append(_Piece(str(splits.index(device)), tuple(range(devices)), after, memory=0))
        pieces.append(_Piece(str(device), (device,), (len(pieces) - 1,) if pieces else ()))
    return pieces


@dataclass(frozen=True, slots=True)
class Pipe:
    """A chain of blocks that goes over devices one by one and, in training, comes back the same
    way. Of each stage the device and, as indices into the graph's blocks, forward and backward
    (none without training).
    """

    devices: tuple[int, ...]
    forwards: tuple[int, ...]
    backwards: tuple[int, ...]
    shared: tuple[tuple[int, int, bool], ...]
    """(block on several devices, block of a stage that it stands beside, True where it comes before
    that one).
    """


def _pipes_of(graph: BlockGraph, schedule: str) -> tuple[Pipe, ...]:
    """The pipes of a graph, in the order of their first blocks. Raises InfeasibleError where it is
    anything else.
    """
    chains: list[list[int]] = []
    for index in graph.order:
        after = graph.blocks[index].after
        chain = next((each for each in chains if after == (each[-1],)), None)
        if chain is not None:
            chain.append(index)
        elif after:
            raise _refusal(schedule, f"block {graph.blocks[index].name!r} makes a branch")
        else:
            chains.append([index])
    found = []
    for chain in chains:
        stages = [index for index in chain if len(graph.blocks[index].devices) == 1]
        path = [graph.blocks[index].devices[0] for index in stages]
        there = len(path) if len(set(path)) == len(path) else len(path) // 2
        devices = path[:there]
        back = path[there:]
        if not path or len(set(devices)) < there or back not in ([], devices[::-1]):
            raise _refusal(schedule, f"devices {path} are not passed once there and once back")
        # A block on several devices stands beside a stage: up to the last forward the next one,
        # then the one before.
        turn = chain.index(stages[there - 1])
        shared = []
        for place, index in enumerate(chain):
            if index not in stages:
                near = chain[place:] if place < turn else chain[place::-1]
                shared.append(
                    (index, next(other for other in near if other in stages), place < turn)
                )
        found.append(
            Pipe(
                tuple(devices),
                tuple(stages[:there]),
                tuple(reversed(stages[there:])),
                tuple(shared),
            )
        )
    return tuple(found)


def _refusal(schedule: str, reason: str) -> InfeasibleError:
    return InfeasibleError(
        f"schedule {schedule} runs chains of stages, but {reason}",
        hint="tessel takes any blocks",
        where="blocks",
    )


Slots = Iterator[tuple[int, int, int]]
"""(slot, unit, block)."""


def block_schedule_names() -> tuple[str, ...]:
    return tuple(sorted(_SLOTS))


def schedule_blocks(name: str, graph: BlockGraph, units: int) -> BlockSchedule:
    """`units` units of blocks under the named schedule. Raises ConfigurationError where there is no
    such schedule or the blocks are malformed, InfeasibleError where the schedule has no place for
    them or memory is too small, with the device and what it would need.
    """
    if name not in _SLOTS:
        raise ConfigurationError(
            f"schedule {name!r} does not take blocks",
            hint=f"these do: {', '.join(block_schedule_names())}, tessel",
        )
    if units < 1:
        raise ConfigurationError(f"there must be 1 unit or more, not {units}")
    graph.verify()
    shared = next((block.name for block in graph.blocks if len(block.devices) > 1), None)
    if shared is not None and name in ("1f1b", "chimera"):
        reason = f"schedule {name} runs blocks of one device each"
        raise InfeasibleError(reason, hint="take 1f1b_plus or tessel", where=f"block {shared!r}")
    place = {index: position for position, index in enumerate(graph.order)}
    slots = sorted(_SLOTS[name](graph, units), key=lambda each: (each[0], each[1], place[each[2]]))
    starts = in_order(graph, units, [(unit, index) for _, unit, index in slots])
    schedule = observed_state(graph, starts)
    for device, (peak, room) in enumerate(zip(schedule.peak_memory, graph.memory, strict=True)):
        if room is not None and peak > room:
            raise InfeasibleError(
                f"schedule {name} needs memory {peak} where there is {room}",
                where=f"device {device}",
            )
    return schedule


def _gpipe(graph: BlockGraph, units: int) -> Slots:
    """All forwards, then the rest. Forwards are the blocks that add memory, and those that one of
    them waits for.
    """
    forward = {index for index, block in enumerate(graph.blocks) if block.memory > 0}
    for index in reversed(graph.order):
        if index in forward:
            forward.update(graph.blocks[index].after)
    for unit in range(units):
        for place, index in enumerate(graph.order):
            first = 0 if index in forward or not forward else units + len(graph.blocks)
            yield first + unit + place, unit, index


def _one_f_one_b_plus(graph: BlockGraph, units: int) -> Slots:
    """1F1B's grid, with what several devices run together between its slots, beside its
    neighbour's. Lin et al., "Tessel" (HPCA 2024), section VI-A. Forwards alone follow one another
    closely.
    """
    pipes = _pipes_of(graph, "1f1b_plus")
    if len(pipes) > 1:
        raise InfeasibleError(
            "schedule 1f1b runs one chain of stages, but these blocks are several", where="blocks"
        )
    for unit in range(units):
        first = 2 * unit if pipes[0].backwards else unit
        slot = {
            index: place
            for place, index in there_and_back(pipes[0].forwards, pipes[0].backwards, first)
        }
        yield from ((2 * place, unit, index) for index, place in slot.items())
        yield from (
            (2 * slot[near] + (-1 if before else 1), unit, index)
            for index, near, before in pipes[0].shared
        )


def _chimera(graph: BlockGraph, units: int) -> Slots:
    """Two opposite pipes on the grid, in groups of half as many units as there are devices: see
    `Chimera`.
    """
    pipes = _pipes_of(graph, "chimera")
    if len(pipes) != 2 or pipes[0].devices != pipes[1].devices[::-1] or len(pipes[0].devices) % 2:
        raise InfeasibleError(
            (
                "schedule chimera runs two chains over the same even number of devices, in "
                "opposite "
                "directions"
            ),
            hint="shape x is such",
            where="blocks",
        )
    depth = len(pipes[0].devices)
    group = depth // 2 if pipes[0].backwards else units
    for unit in range(units):
        for pipe in pipes:
            slots = there_and_back(pipe.forwards, pipe.backwards, first_slot(unit, depth, group))
            yield from ((slot, unit, index) for slot, index in slots)


_SLOTS: dict[str, Callable[[BlockGraph, int], Slots]] = {
    "1f1b": _one_f_one_b_plus,
    "1f1b_plus": _one_f_one_b_plus,
    "chimera": _chimera,
    "gpipe": _gpipe,
}
