"""Messages under way."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
import torch.distributed as dist


@dataclass(slots=True)
class PendingRecv:
    """A tensor that is being received."""

    work: dist.Work | None
    buffer: torch.Tensor
    device: torch.device
    sent: torch.Tensor | None = None
    """Tensor sent by the same exchange, which must stay alive until it is done."""

    def wait(self) -> torch.Tensor:
        """The tensor, once it is there. Over NCCL it is the device's current stream that waits."""
        if self.work is not None:
            self.work.wait()
            self.work = self.sent = None  # Gloo would wait a second time for ever.
        return self.buffer if self.buffer.device == self.device else self.buffer.to(self.device, non_blocking=True)


@dataclass(slots=True)
class PendingReduce:
    """Tensors of all ranks, [ranks, ...], to be added up, or reduced by maximum, once they are there."""

    rows: PendingRecv
    how: dist.ReduceOp.RedOpType

    def wait(self) -> torch.Tensor:
        """The sum; added up in the order of ranks, so that all have the same."""
        rows = self.rows.wait()
        if self.how == dist.ReduceOp.MAX:
            return rows.amax(0)
        return rows.sum(0, dtype=rows.dtype)


@dataclass(slots=True)
class PendingSend:
    """A tensor that is being sent; it must not change or go away before it is gone."""

    work: dist.Work | None
    tensor: torch.Tensor | None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.bytes = 0 if self.tensor is None else self.tensor.nbytes

    def is_gone(self) -> bool:
        """True if it has been sent."""
        return self.work is None or self.work.is_completed()

    def wait(self) -> None:
        """Wait until it has been sent, and let it go; several threads may."""
        with self._lock:
            if self.work is not None:
                self.work.wait()
                self.work = None  # Gloo would wait a second time for ever.
            self.tensor = None
