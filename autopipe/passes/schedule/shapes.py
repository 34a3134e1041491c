"""The five placements that schedule search is measured on, as blocks.

Lin et al., "Tessel" (HPCA 2024), section VI: GPT on a V, Chimera's X, GPT and mT5 with large embeddings split over all
devices (M and NN), and Flava's two branches that meet in a cross encoder split over all devices (K).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.ir.block_schedule import Block, BlockGraph
from autopipe.ir.errors import ConfigurationError

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
