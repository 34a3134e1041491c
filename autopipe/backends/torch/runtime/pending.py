"""Messages under way."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
import torch.distributed as dist


@dataclass(slots=True)
class Arrival:
    """A tensor that is being received."""

    work: dist.Work | None
    buffer: torch.Tensor
    device: torch.device

    def wait(self) -> torch.Tensor:
        """The tensor, once it is there. Over NCCL it is the device's current stream that waits."""
        if self.work is not None:
            self.work.wait()
            self.work = None  # Gloo would wait a second time for ever.
        return self.buffer if self.buffer.device == self.device else self.buffer.to(self.device, non_blocking=True)


@dataclass(slots=True)
class Departure:
    """A tensor that is being sent; it must not change or go away before it is gone."""

    work: dist.Work | None
    tensor: torch.Tensor | None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def is_gone(self) -> bool:
        """Whether it has been sent."""
        return self.work is None or self.work.is_completed()

    def wait(self) -> None:
        """Wait until it has been sent, and let it go; several threads may."""
        with self._lock:
            if self.work is not None:
                self.work.wait()
                self.work = None  # Gloo would wait a second time for ever.
            self.tensor = None
