"""Forwards that are run again for their backward, since they kept nothing but their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RandomState:
    """Where torch's random generators stood before a forward."""

    device: torch.device
    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @staticmethod
    def now(device: torch.device) -> RandomState:
        """Where they stand."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return RandomState(device, torch.get_rng_state(), cuda)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers once more, then go on from where the generators are."""
        with torch.random.fork_rng([self.device] if self.cuda is not None else []):
            torch.set_rng_state(self.cpu)
            if self.cuda is not None:
                torch.cuda.set_rng_state(self.cuda, self.device)
            yield
