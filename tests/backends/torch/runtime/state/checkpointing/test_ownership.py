"""Who writes what: every element once, by a rank that holds it, and as much by each as there is to
share.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.state.checkpoint_state import assign_blocks_to_ranks
from autopipe.ir.layout import TensorSlice, full_slice
from autopipe.ir.program import ParameterShard
from tests.backends.torch.checkpoint.test_reading import boxes_of
from tests.backends.torch.runtime.state.checkpointing.saving import ADAMW, drawn, manifest_of

RANKS = 5


def manifest(shapes: list[tuple[int, ...]], random: Random) -> Manifest:
    """Parameters in random blocks, each held by some ranks."""
    parameters = tuple(
        drawn(f"w{index}", shape, random.random() < 0.8) for index, shape in enumerate(shapes)
    )
    shards: list[list[ParameterShard]] = [[] for _ in range(RANKS)]
    for index, shape in enumerate(shapes):
        ranks = random.sample(range(RANKS), RANKS)
        for box in boxes_of(shape, random)[:RANKS]:
            holders = tuple(ranks.pop() for _ in range(min(len(ranks), random.randrange(1, 3))))
            for rank in holders:
                shards[rank].append(ParameterShard(index, box, holders, None))
    other = manifest_of(1)
    form = {name: getattr(other, name) for name in Manifest.__dataclass_fields__}
    return Manifest(
        **form
        | {"world_size": RANKS, "parameters": parameters, "shards": tuple(map(tuple, shards))}
    )


@pytest.mark.parametrize("in_shares", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_every_element_that_is_held_is_written_once(seed: int, in_shares: bool) -> None:
    random = Random(seed)
    shapes = [
        random.choice([(), (3,), (4, 6), (2, 0), (512, 1024), (3, 300, 700)]) for _ in range(6)
    ]
    found = manifest(shapes, random)
    found = replace(found, optimizer=ADAMW | {"shard": in_shares})
    written = {index: np.zeros(shape, int) for index, shape in enumerate(shapes)}
    numbers = set()
    for rank, pieces in enumerate(assign_blocks_to_ranks(found)):
        held = {shard.parameter: shard.box for shard in found.shards[rank]}
        for piece in pieces:
            assert (
                piece.box.elements == 0 or piece.box.intersect(held[piece.parameter]) == piece.box
            )
            written[piece.parameter][_region(piece.box)] += 1
            numbers.add((piece.parameter, piece.number))
    assert len(numbers) == sum(len(pieces) for pieces in assign_blocks_to_ranks(found))
    for index, array in written.items():
        expected = np.zeros(shapes[index], int)
        for shards in found.shards:
            for shard in shards:
                if shard.parameter == index:
                    expected[_region(shard.box)] = 1
        np.testing.assert_array_equal(array, expected)


def _region(box: TensorSlice) -> tuple[slice, ...]:
    return tuple(slice(*each) for each in zip(box.starts, box.stops, strict=True))


def test_copies_are_shared_evenly() -> None:
    """As a data-parallel run of five ranks holds them: a large table and small ones."""
    shapes = [(1000, 1024), (512, 512), *[(64, 64)] * 40]
    everyone = tuple(range(RANKS))
    shards = tuple(
        ParameterShard(index, full_slice(shape), everyone, None)
        for index, shape in enumerate(shapes)
    )
    other = manifest([], Random(0))
    form = {name: getattr(other, name) for name in Manifest.__dataclass_fields__}
    parameters = tuple(drawn(f"w{index}", shape) for index, shape in enumerate(shapes))
    found = assign_blocks_to_ranks(
        Manifest(**form | {"parameters": parameters, "shards": (shards,) * RANKS})
    )
    loads = [sum(piece.box.elements for piece in pieces) for pieces in found]
    assert max(loads) < 1.05 * sum(loads) / RANKS
