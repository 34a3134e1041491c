"""Receive buffers that are used again and again."""

from __future__ import annotations

import torch


class RecvBufferPool:
    """The buffers of one channel in one direction, all of one shape; made when first needed.

    A buffer is free when nothing but the ring holds its memory: no view of it, no operator that keeps it for backward,
    no message that forwards it. `size` is how many a step holds at once; where a view lives longer, what comes
    meanwhile has memory of its own. On a GPU the stream that writes a message first waits for all that was launched
    before its receive was posted, so for the last reader too.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._buffers: list[torch.Tensor] = []

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A free buffer, as a tensor of its own without history."""
        for place, buffer in enumerate(self._buffers):
            if _holders(buffer) == 1:
                self._buffers.append(self._buffers.pop(place))
                return buffer.detach()
        found = torch.empty(shape, dtype=dtype, device=device)
        if len(self._buffers) < self._size:
            self._buffers.append(found)
            return found.detach()
        return found


def _holders(tensor: torch.Tensor) -> int:
    """How many tensors share the memory of one."""
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1  # The storage's own object is one more.
