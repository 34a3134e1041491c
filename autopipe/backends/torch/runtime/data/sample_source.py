"""The interface of sources of samples. It needs no torch, so that data is checked before torch is
loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from autopipe.backends.torch.runtime.data.sample_order import Position
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.program import InputRange

Slices = tuple[tuple[int, int], ...]
"""A block of a tensor: (start, stop) in each dimension."""


class Source(ABC):
    """Where samples come from, in the order of their numbers, which run on from step to step. This
    one has no end; `left_over` are the samples at an epoch's end that fill no batch, which training
    leaves out.
    """

    left_over = 0

    def __init__(self, manifest: Manifest, begin: Position) -> None:
        self._manifest = manifest
        self._begin = begin

    def sample(self, step: int) -> int:
        """The number of a step's first sample."""
        return self._begin.samples + (step - self._begin.steps) * self._manifest.batch_size

    def count(self, step: int) -> int:
        """Samples that a step has: 0 where the data has ended, less than a batch where it is filled
        up behind them.
        """
        return self._manifest.batch_size

    def epoch(self, step: int) -> int:
        """The epoch, counted from 1, of a step whose data was read."""
        return 1

    @abstractmethod
    def rows(self, entry: InputRange, start: int, stop: int) -> np.ndarray:
        """Samples [start, stop) of an input, along its batch axis; the whole value where it has
        none. `start` says the step either way. Only samples that `count` counts are asked for.
        """
