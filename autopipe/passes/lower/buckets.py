"""The buckets in which ranks exchange gradients of parameters at a step's end, and what that moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from autopipe.ir.graph import Parameter
from autopipe.ir.program import Block, Shard, buckets_of


def held_together(parameters: Sequence[Parameter], shards: Iterable[Shard]) -> Iterator[Block]:
    """The trained blocks among `shards` that several ranks hold."""
    for shard in shards:
        value = parameters[shard.parameter].value
        if len(shard.gradient_ranks) > 1 and parameters[shard.parameter].trainable and value.dtype.is_floating:
            dtype, ranks = value.dtype, shard.gradient_ranks
            yield Block(shard.parameter, shard.box.elements, dtype.value, dtype.itemsize, ranks, shard.home)


def end_bytes(parameters: Sequence[Parameter], shards: Sequence[Sequence[Shard]], shared: bool) -> Counter[str]:
    """Bytes by kind (`ir/traffic.py`) that all ranks exchange at the end of a step; `shards` are theirs by rank.

    What is `shared` out is filled up to equal shares: as much is scattered of gradients as is gathered of parameters.
    """
    total: Counter[str] = Counter()
    for rank, own in enumerate(shards):
        first = (shard for shard in own if shard.gradient_ranks[0] == rank)  # Each group once.
        blocks = tuple(held_together(parameters, first))
        if shared:
            size = sum(len(bucket.ranks) * bucket.bytes for bucket in buckets_of(blocks))
            total += Counter(gradient=size, parameter=size)
        else:
            total["gradient"] += sum(len(block.ranks) * block.elements * block.itemsize for block in blocks)
    return total
