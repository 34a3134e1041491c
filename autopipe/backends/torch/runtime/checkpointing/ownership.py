"""Who writes what: every block of every parameter once, by one of those who hold it, and about as much by each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from autopipe.backends.torch.runtime.buckets import buckets_of_rank
from autopipe.backends.torch.runtime.checkpointing.optimizer_state import boxes_of
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.graph import DType
from autopipe.ir.layout import Box
from autopipe.ir.problem import Optimizer

_LEAST_BYTES = 2**20
"""Smaller blocks are not cut up among their holders."""
_PIECES = 16
"""About as many pieces a rank as make loads even where all hold everything; more would only swell the manifest."""


@dataclass(frozen=True, slots=True)
class WriteBlock:
    """A block of a parameter that a rank writes; `number` tells the parameter's pieces apart."""

    parameter: int
    number: int
    box: Box


@dataclass(frozen=True, slots=True)
class _Held:
    """A block, the ranks that hold it, and its bytes with what the optimizer keeps of it.

    `shared` says that, where the optimizer's state is shared out, that of this block is.
    """

    parameter: int
    box: Box
    ranks: tuple[int, ...]
    size: int
    shared: bool


def write_blocks(manifest: Manifest) -> tuple[tuple[WriteBlock, ...], ...]:
    """The pieces that each rank writes, by rank: the same on all ranks, since all know who holds what.

    Blocks of a parameter are equal or apart (`autopipe.passes.lower.shard`), so that none is written twice. What
    is updated in shares is written by who has the share. Of the rest the largest piece goes first, to whichever of its
    holders has least to write.
    """
    numbers = [0] * len(manifest.parameters)
    found: list[list[WriteBlock]] = [[] for _ in range(manifest.world_size)]
    blocks = _held(manifest)
    if manifest.optimizer["shard"]:
        for rank, pieces in enumerate(found):
            pieces.extend(_shares(manifest, rank, numbers))
        blocks = [block for block in blocks if not block.shared]
    piece_bytes = max(_LEAST_BYTES, sum(block.size for block in blocks) // (manifest.world_size * _PIECES))
    parts_of_blocks = []
    for block in blocks:
        parts = list(_parts(block.box, min(len(block.ranks), block.size // piece_bytes)))
        for part in parts:
            piece = WriteBlock(block.parameter, numbers[block.parameter], part)
            parts_of_blocks.append((piece, block.ranks, block.size // len(parts)))
            numbers[block.parameter] += 1
    load = [0] * manifest.world_size
    for piece, ranks, size in sorted(parts_of_blocks, key=lambda each: -each[2]):
        rank = min(ranks, key=lambda holder: load[holder])
        load[rank] += size
        found[rank].append(piece)
    return tuple(tuple(sorted(each, key=lambda piece: (piece.parameter, piece.number))) for each in found)


def _shares(manifest: Manifest, rank: int, numbers: list[int]) -> Iterator[WriteBlock]:
    """The pieces of a rank's shares, numbered on from those that each parameter has."""
    own = {shard.parameter: shard for shard in manifest.shards[rank]}
    for bucket in buckets_of_rank(manifest, rank):
        for run in bucket.runs(rank):
            for box in boxes_of(run, own[run.parameter]):
                yield WriteBlock(run.parameter, numbers[run.parameter], box)
                numbers[run.parameter] += 1


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
        dtype = DType(entry.dtype)
        element = dtype.itemsize * (1 + states * entry.trainable)
        shared = len(ranks) > 1 and entry.trainable and dtype.is_floating
        found.append(_Held(parameter, box, tuple(ranks), box.elements * element, shared))
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
