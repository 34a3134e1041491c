"""Lookups in a table of which each rank has some rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.backends.torch.runtime.operators.joint import ShardedAxis, own_places


def gather_part(table: Tensor, dim: int, indices: Tensor, group: ShardedAxis) -> Tensor:
    """`table` at `indices` along `dim`, of which this rank has a part; zeros for those that other ranks have."""
    places, mine = _places(indices, table.shape[dim], group)
    if dim == 0 and table.dim() == 2:
        found = F.embedding(places, table)
    else:
        shape = (*table.shape[:dim], *places.shape, *table.shape[dim + 1 :])
        found = table.index_select(dim, places.reshape(-1)).reshape(shape)
    return found.masked_fill(~mine.reshape(*mine.shape, *[1] * (table.dim() - dim - 1)), 0)


def gather_elements_part(table: Tensor, dim: int, indices: Tensor, group: ShardedAxis) -> Tensor:
    """`torch.gather` from a table of which this rank has a part along `dim`; zeros for what other ranks have."""
    places, mine = _places(indices, table.shape[dim], group)
    return table.gather(dim, places).masked_fill(~mine, 0)


def _places(indices: Tensor, rows: int, group: ShardedAxis) -> tuple[Tensor, Tensor]:
    """Where indices are in this rank's rows, and whether they are."""
    places = indices.to(torch.int64)
    places = torch.where(places < 0, places + rows * group.size, places)
    torch._assert_async(((places >= 0) & (places < rows * group.size)).all(), "an index is out of range")
    return own_places(places, rows, group)
