"""Who writes what: every block of every parameter once, by one of those who hold it, and about as much by each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.dtype import DType
from autopipe.ir.layout import Box
from autopipe.ir.problem import Optimizer

_PIECE_BYTES = 2**20
"""Smaller blocks are not cut up among their holders."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a parameter that a rank writes; `number` tells the parameter's pieces apart."""

    parameter: int
    number: int
    box: Box


def pieces_of(manifest: Manifest) -> tuple[tuple[Piece, ...], ...]:
    """The pieces that each rank writes, by rank: the same on all ranks, since all know who holds what.

    Blocks of a parameter are equal or apart (`autopipe.passes.lower.parameters`), so that none is written twice. The
    largest piece goes first, to whichever of its holders has least to write.
    """
    pieces = sorted(_pieces(manifest), key=lambda each: -each[2])
    load = [0] * manifest.world_size
    found: list[list[Piece]] = [[] for _ in range(manifest.world_size)]
    for piece, holders, size in pieces:
        rank = min(holders, key=lambda holder: load[holder])
        load[rank] += size
        found[rank].append(piece)
    return tuple(tuple(sorted(each, key=lambda piece: (piece.parameter, piece.number))) for each in found)


def _pieces(manifest: Manifest) -> Iterator[tuple[Piece, tuple[int, ...], int]]:
    """Every piece, the ranks that hold it, and its bytes with what the optimizer keeps of it."""
    holders: dict[int, dict[Box, list[int]]] = {}
    for rank, shards in enumerate(manifest.shards):
        for shard in shards:
            blocks = holders.setdefault(shard.parameter, {})
            blocks.setdefault(Box(shard.starts, shard.stops), []).append(rank)
    states = Optimizer(manifest.optimizer["name"], momentum=manifest.optimizer["momentum"]).states
    for parameter, blocks in sorted(holders.items()):
        entry = manifest.parameters[parameter]
        element = DType(entry.dtype).itemsize * (1 + states * entry.trainable)
        number = 0
        for box, ranks in blocks.items():
            for part in _parts(box, min(len(ranks), box.elements * element // _PIECE_BYTES)):
                yield Piece(parameter, number, part), tuple(ranks), part.elements * element
                number += 1


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
        yield Box(
            (*box.starts[:axis], start, *box.starts[axis + 1 :]), (*box.stops[:axis], stop, *box.stops[axis + 1 :])
        )
