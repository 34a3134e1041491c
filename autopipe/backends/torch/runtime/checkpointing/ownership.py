"""Who writes what: every block of every parameter once, by one of those who hold it, and about as much by each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.dtype import DType
from autopipe.ir.layout import Box
from autopipe.ir.problem import Optimizer

_LEAST_BYTES = 2**20
"""Smaller blocks are not cut up among their holders."""
_PIECES = 16
"""About as many pieces a rank as make loads even where all hold everything; more would only swell the manifest."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a parameter that a rank writes; `number` tells the parameter's pieces apart."""

    parameter: int
    number: int
    box: Box


@dataclass(frozen=True, slots=True)
class _Held:
    """A block, the ranks that hold it, and its bytes with what the optimizer keeps of it."""

    parameter: int
    box: Box
    ranks: tuple[int, ...]
    size: int


def pieces_of(manifest: Manifest) -> tuple[tuple[Piece, ...], ...]:
    """The pieces that each rank writes, by rank: the same on all ranks, since all know who holds what.

    Blocks of a parameter are equal or apart (`autopipe.passes.lower.parameters`), so that none is written twice. The
    largest piece goes first, to whichever of its holders has least to write.
    """
    blocks = _held(manifest)
    piece_bytes = max(_LEAST_BYTES, sum(block.size for block in blocks) // (manifest.world_size * _PIECES))
    pieces = []
    numbers = [0] * len(manifest.parameters)
    for block in blocks:
        parts = list(_parts(block.box, min(len(block.ranks), block.size // piece_bytes)))
        for part in parts:
            pieces.append(
                (Piece(block.parameter, numbers[block.parameter], part), block.ranks, block.size // len(parts))
            )
            numbers[block.parameter] += 1
    load = [0] * manifest.world_size
    found: list[list[Piece]] = [[] for _ in range(manifest.world_size)]
    for piece, ranks, size in sorted(pieces, key=lambda each: -each[2]):
        rank = min(ranks, key=lambda holder: load[holder])
        load[rank] += size
        found[rank].append(piece)
    return tuple(tuple(sorted(each, key=lambda piece: (piece.parameter, piece.number))) for each in found)


def _held(manifest: Manifest) -> list[_Held]:
    """Every block of every parameter, once."""
    holders: dict[tuple[int, Box], list[int]] = {}
    for rank, shards in enumerate(manifest.shards):
        for shard in shards:
            holders.setdefault((shard.parameter, Box(shard.starts, shard.stops)), []).append(rank)
    states = Optimizer(manifest.optimizer["name"], momentum=manifest.optimizer["momentum"]).states
    found = []
    for (parameter, box), ranks in holders.items():
        entry = manifest.parameters[parameter]
        element = DType(entry.dtype).itemsize * (1 + states * entry.trainable)
        found.append(_Held(parameter, box, tuple(ranks), box.elements * element))
    return found


def _parts(box: Box, count: int) -> Iterator[Box]:
    """About `count` parts of a block, cut along its longest dimension."""
    extent = max(box.shape, default=1)
    axis = box.shape.index(extent) if box.shape else 0
    count = min(count, extent)
    if count < 2:
        yield box
        return
    cuts = [box.starts[axis] + extent * index // count for index in range(count + 1)]
    for start, stop in pairwise(cuts):
        starts = (*box.starts[:axis], start, *box.starts[axis + 1 :])
        yield Box(starts, (*box.stops[:axis], stop, *box.stops[axis + 1 :]))
