"""True if the devices have room for the blocks at all, in whatever order they run.

Memory changes when blocks start, so what a device needs depends on the order of starts alone. Units that free no more
than they have allocated only add to one another's needs, so one unit's order decides.

The five placements that schedule search is measured on, as blocks.

Lin et al., "Tessel" (HPCA 2024), section VI: GPT on a V, Chimera's X, GPT and mT5 with large embeddings split over all
devices (M and NN), and Flava's two branches that meet in a cross encoder split over all devices (K).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopipe.ir.block_schedule import Block, BlockGraph
from autopipe.ir.errors import ConfigurationError, InfeasibleError

SHAPES = ("v", "x", "m", "nn", "k")
"""Their names; case does not matter."""

_ALL = 1
"""Time of a block that all devices run together."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a unit's forward, with the indices of the parts that it waits for."""

    name: str
    devices: tuple[int, ...]
    after: tuple[int, ...]
    memory: int = 1


def shape(
    name: str, devices: int, train: bool, memory: int | None = None, forward: int = 1, backward: int = 3
) -> BlockGraph:
    """The blocks of one unit of a shape on an even number of devices.

    A stage's forward takes `forward` and adds 1 to the memory in use, its backward takes `backward` and frees it. A
    block on all devices takes 1, forward and backward, and changes no memory but on K, whose cross encoder adds 1 and
    frees it. Without training there are forwards alone, and memory does not change. `memory` is the room on each
    device. A unit of X is two micro-batches. Raises ConfigurationError.
    """
    if name.lower() not in SHAPES:
        raise ConfigurationError(f"there is no shape called {name!r}", hint=f"there are: {', '.join(SHAPES)}")
    if devices < 2 or devices % 2:
        raise ConfigurationError(f"shapes stand on an even number of devices, not on {devices}")
    pieces = _PIECES[name.lower()](devices)
    blocks = [_forward_block(piece, forward, train) for piece in pieces]
    if train:
        blocks += _backward_blocks(pieces, backward)
    graph = BlockGraph(devices, tuple(blocks), (memory,) * devices, 2 if name.lower() == "x" else 1)
    graph.verify()
    return graph


def _forward_block(piece: _Piece, time: int, train: bool) -> Block:
    time = time if len(piece.devices) == 1 else _ALL
    return Block(_named(piece, "f"), piece.devices, time, piece.memory if train else 0, piece.after)


def _backward_blocks(pieces: Sequence[_Piece], time: int) -> list[Block]:
    """Backwards in reverse: each after the backwards of what its forward feeds and, at the end, after its forward."""
    count = len(pieces)
    place = {index: 2 * count - 1 - index for index in range(count)}
    blocks = []
    for index in reversed(range(count)):
        piece = pieces[index]
        fed = [place[other] for other in range(count) if index in pieces[other].after]
        length = time if len(piece.devices) == 1 else _ALL
        blocks.append(Block(_named(piece, "b"), piece.devices, length, -piece.memory, tuple(sorted(fed)) or (index,)))
    return blocks


def _named(piece: _Piece, phase: str) -> str:
    """`F3` and `B3` of a stage, `TPf0` and `TPb0` of a block on all devices."""
    return f"TP{phase}{piece.name}" if len(piece.devices) > 1 else f"{phase.upper()}{piece.name}"


def _chain(devices: int, splits: Sequence[int]) -> list[_Piece]:
    """A stage a device, one after the other; before those of `splits` a block on all devices."""
    pieces: list[_Piece] = []
    for device in range(devices):
        if device in splits:
            pieces.append(_Piece(str(splits.index(device)), tuple(range(devices)), _last(pieces), memory=0))
        pieces.append(_Piece(str(device), (device,), _last(pieces)))
    return pieces


def _last(pieces: Sequence[_Piece]) -> tuple[int, ...]:
    return (len(pieces) - 1,) if pieces else ()


def _v(devices: int) -> list[_Piece]:
    return _chain(devices, ())


def _m(devices: int) -> list[_Piece]:
    return _chain(devices, (0,))


def _nn(devices: int) -> list[_Piece]:
    return _chain(devices, (0, devices // 2))


def _x(devices: int) -> list[_Piece]:
    """Two independent chains; stages from `devices` on belong to the one that begins on the last device."""
    mirrored = [
        _Piece(str(devices + step), (devices - 1 - step,), (devices + step - 1,) if step else ())
        for step in range(devices)
    ]
    return _chain(devices, ()) + mirrored


def _k(devices: int) -> list[_Piece]:
    """Two branches, each on half of the devices, that meet in a block on all."""
    half = devices // 2
    branches = []
    for device in range(devices):
        after = () if device in (0, half) else (device - 1,)
        branches.append(_Piece(str(device), (device,), after))
    return [*branches, _Piece("0", tuple(range(devices)), (half - 1, devices - 1))]


_PIECES = {"v": _v, "x": _x, "m": _m, "nn": _nn, "k": _k}


_MOST_STEPS = 1_000_000
"""Blocks looked at for one question, after which it stays open."""

_BESIDE = "while the others keep to their limits"

Room = Sequence[int | None]


def require_room(graph: BlockGraph, units: int) -> None:
    """Raise InfeasibleError, naming the device and the least that would do, where no order keeps the memory limits.

    The device is one that would not do on its own if there is any, otherwise one that would not do beside the limits of
    the others. Silence is no promise: questions that take too long stay open.
    """
    limited = [(device, room) for device, room in enumerate(graph.memory) if room is not None]
    for device, room in limited:
        if units * _kept(graph, device) > room:
            raise _too_little(device, room, units * _kept(graph, device), f"as {units} units leave as much in use")
    if not limited or (units > 1 and not all(_frees_its_own(graph, device) for device, _ in limited)):
        return
    if not least_room(graph, limited[0][0], graph.memory).exceeds(limited[0][1]):
        return
    for rooms, why in (((None,) * graph.devices, "whatever the order of blocks"), (graph.memory, _BESIDE)):
        for device, room in limited:
            least = least_room(graph, device, rooms)
            if least.exists and least.exceeds(room):
                raise _too_little(device, room, least.peak, why)
    raise InfeasibleError("no order of the blocks keeps to the memory limits of all devices", hint="raise several")


def _too_little(device: int, room: int, least: int, why: str) -> InfeasibleError:
    message = f"there is room for {room}, but {least} is the least that would do, {why}"
    return InfeasibleError(message, hint=f"give it a memory of {least} or more", where=f"device {device}")


def _kept(graph: BlockGraph, device: int) -> int:
    """Memory that a unit leaves in use on a device."""
    return sum(block.memory for block in graph.blocks if device in block.devices)


def _frees_its_own(graph: BlockGraph, device: int) -> bool:
    """True if each block that frees comes after blocks of its own that allocated as much: a unit is never below 0."""
    left = {index: block.memory for index, block in enumerate(graph.blocks) if device in block.devices}
    earlier: list[int] = [0] * len(graph.blocks)
    for index in graph.order:
        earlier[index] = 1 << index
        for other in graph.blocks[index].after:
            earlier[index] |= earlier[other]
        if left.get(index, 0) >= 0:
            continue
        for other in [each for each in left if left[each] > 0 and earlier[index] >> each & 1]:
            taken = min(left[other], -left[index])
            left[other] -= taken
            left[index] += taken
    return all(each >= 0 for each in left.values())


@dataclass(frozen=True, slots=True)
class LeastRoom:
    """The least peak of a device over all orders of one unit; a lower bound of it where it is not `proven`."""

    peak: int
    proven: bool = True
    exists: bool = True
    """True if there is an order at all that the other devices have room for."""

    def exceeds(self, room: int) -> bool:
        """True if it is proven that this room does not do."""
        return self.proven and (not self.exists or self.peak > room)


def least_room(graph: BlockGraph, device: int, rooms: Room) -> LeastRoom:
    """The least room that `device` needs for one unit, with `rooms` on the other devices (None for no limit).

    Best first over the sets of blocks that have started, which tell the memory in use. A block that allocates nowhere
    starts as soon as it can: that never does harm.
    """
    unit = _Unit(graph, device, rooms)
    heap = [(0, 0, unit.settled(0))]
    seen: set[int] = set()
    while heap:
        peak, _, started = heapq.heappop(heap)
        if started in seen:
            continue
        seen.add(started)
        if started == unit.everything:
            return LeastRoom(peak)
        if unit.steps > _MOST_STEPS:
            return LeastRoom(peak, proven=False)
        for used, following in unit.next_sets(started):
            if following not in seen:
                heapq.heappush(heap, (max(peak, used), -following.bit_count(), following))
    return LeastRoom(0, exists=False)


class _Unit:
    """The blocks of one unit as sets of bits."""

    def __init__(self, graph: BlockGraph, device: int, rooms: Room) -> None:
        self.graph, self.device, self.rooms = graph, device, rooms
        self.everything = (1 << len(graph.blocks)) - 1
        self.before = [sum(1 << other for other in set(block.after)) for block in graph.blocks]
        self.steps = 0

    def settled(self, started: int) -> int:
        """The set with all blocks that can start and allocate nowhere."""
        for index in self.graph.order:
            if self.graph.blocks[index].memory <= 0 and self._can_start(index, started):
                started |= 1 << index
        return started

    def next_sets(self, started: int) -> Iterator[tuple[int, int]]:
        """For each block that can start next: the memory then in use on the device, and the set that follows."""
        used = self._used(started)
        for index, block in enumerate(self.graph.blocks):
            if self._can_start(index, started) and self._fits(index, used):
                more = block.memory if self.device in block.devices else 0
                yield used[self.device] + more, self.settled(started | 1 << index)

    def _can_start(self, index: int, started: int) -> bool:
        self.steps += 1
        return not started >> index & 1 and self.before[index] & started == self.before[index]

    def _fits(self, index: int, used: list[int]) -> bool:
        block = self.graph.blocks[index]
        for device in block.devices:
            room = self.rooms[device]
            if device != self.device and room is not None and used[device] + block.memory > room:
                return False
        return True

    def _used(self, started: int) -> list[int]:
        used = [0] * self.graph.devices
        for index, block in enumerate(self.graph.blocks):
            if started >> index & 1:
                for device in block.devices:
                    used[device] += block.memory
        return used
