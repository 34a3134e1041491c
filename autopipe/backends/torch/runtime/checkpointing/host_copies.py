"""Copies of tensors in the host's memory, so that a step may change the tensors while the copies are written."""

from __future__ import annotations

import torch

from autopipe.backends.torch.checkpoint.shard_file import Content


class HostCopies:
    """Copies by key, in buffers that the next ones overwrite; page-locked where the tensors are on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._buffers: dict[str, torch.Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        """Start to copy; what a GPU does after this call leaves the copies as they are."""
        for key in self._buffers.keys() - tensors.keys():
            del self._buffers[key]
        for key, tensor in tensors.items():
            self._buffer(key, tensor).copy_(tensor.detach(), non_blocking=True)
        if self._cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _buffer(self, key: str, like: torch.Tensor) -> torch.Tensor:
        known = self._buffers.get(key)
        if known is None or known.shape != like.shape or known.dtype is not like.dtype:
            # Pinned pages where a copy runs beside the GPU's work; a generator's state is on the host already.
            known = torch.empty(like.shape, dtype=like.dtype, pin_memory=self._cuda)
            self._buffers[key] = known
        return known

    def contents(self) -> list[Content]:
        """Wait for the copies, and give them as what a file holds."""
        if self._copied is not None:
            self._copied.synchronize()
        return [
            Content(key, dtype_name(buffer), tuple(buffer.shape), bytes_of(buffer))
            for key, buffer in self._buffers.items()
        ]


def dtype_name(tensor: torch.Tensor) -> str:
    """ONNX's name of a tensor's element type, which is torch's."""
    return str(tensor.dtype).removeprefix("torch.")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the host that lies in one piece."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
