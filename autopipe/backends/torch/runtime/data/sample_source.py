"""The interface of sources of samples. This module does not import torch, so that data can be
checked before torch is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from autopipe.backends.torch.runtime.data.sample_order import RunProgress
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.program import InputRange

BlockRanges = tuple[tuple[int, int], ...]
"""A block of a tensor: (start, stop) for each dimension."""


class SampleSource(ABC):
    """Samples for the inputs of a graph. Sample numbers increase from step to step.

    The base class describes data without an end. `left_over` is the number of samples at the end of
    an epoch that do not fill a batch and that training skips.
    """

    left_over = 0

    def __init__(self, manifest: Manifest, begin: RunProgress) -> None:
        self._manifest = manifest
        self._begin = begin

    def sample(self, step: int) -> int:
        """Return the number of the first sample of a step."""
        return self._begin.samples + (step - self._begin.steps) * self._manifest.batch_size

    def count(self, step: int) -> int:
        """Return the number of samples of a step: 0 if the data has ended, less than a batch if the
        rest of the batch is filler samples.
        """
        return self._manifest.batch_size

    def epoch(self, step: int) -> int:
        """Return the epoch, counted from 1, of a step whose data was read."""
        return 1

    @abstractmethod
    def rows(self, entry: InputRange, start: int, stop: int) -> np.ndarray:
        """Return samples [start, stop) of an input, along its batch axis. If the input has no batch
        axis, return its full value.

        `start` determines the step in both cases. Callers request only samples that `count`
        includes.
        """
