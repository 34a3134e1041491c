"""The buckets in which a rank's gradients are added up over ranks."""

from __future__ import annotations

from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.graph import DType
from autopipe.ir.program import Block, Bucket, buckets_of


def buckets_of_rank(manifest: Manifest, rank: int) -> tuple[Bucket, ...]:
    """Buckets of the trained blocks that the rank holds together with others, in the order of their exchanges."""
    found = []
    for shard in manifest.shards[rank]:
        entry = manifest.parameters[shard.parameter]
        dtype = DType(entry.dtype)
        if len(shard.ranks) > 1 and entry.trainable and dtype.is_floating:
            found.append(Block(shard.parameter, shard.elements, entry.dtype, dtype.itemsize, shard.ranks, shard.home))
    return buckets_of(found)
