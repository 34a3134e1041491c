"""Lookups in a table of which each rank has some rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.backends.torch.runtime.operators.joint import Joint, own_places


def gather_part(table: Tensor, dim: int, indices: Tensor, group: Joint) -> Tensor:
    """`table` at `indices` along `dim`, of which this rank has a part; zeros for those that other ranks have."""
    rows = table.shape[dim]
    places = indices.to(torch.int64)
    places = torch.where(places < 0, places + rows * group.size, places)
    torch._assert_async(((places >= 0) & (places < rows * group.size)).all(), "an index is out of range")
    places, mine = own_places(places, rows, group)
    if dim == 0 and table.dim() == 2:
        found = F.embedding(places, table)
    else:
        shape = (*table.shape[:dim], *places.shape, *table.shape[dim + 1 :])
        found = table.index_select(dim, places.reshape(-1)).reshape(shape)
    return found.masked_fill(~mine.reshape(*mine.shape, *[1] * (table.dim() - dim - 1)), 0)
