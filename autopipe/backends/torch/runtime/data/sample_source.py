"""The interface of sources of samples. The module does not import torch, so that the launcher can
check data without loading torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from autopipe.backends.torch.runtime.data.sample_order import RunProgress
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.program import InputRange

BlockRanges = tuple[tuple[int, int], ...]
"""A slice of a tensor: (start, stop) for each dimension."""


class SampleSource(ABC):
    """A source of values for the graph inputs. Samples are numbered; the numbers increase from step
    to step, across epochs.

    The defaults of this class describe data that never end: one epoch, in which every step has a
    full batch. `skipped_samples` is the number of samples at the end of an epoch that are skipped
    because they do not fill a batch.
    """

    skipped_samples = 0

    def __init__(self, manifest: Manifest, begin: RunProgress) -> None:
        """`begin` is the position in the data at which this run starts or resumes."""
        self._manifest = manifest
        self._begin = begin

    def first_sample(self, step: int) -> int:
        """Return the number of the first sample of a step."""
        return self._begin.samples + (step - self._begin.steps) * self._manifest.batch_size

    def sample_count(self, step: int) -> int:
        """Return the number of samples that the data have for a step: 0 if the data have ended,
        less than a batch if filler samples must complete the batch.
        """
        return self._manifest.batch_size

    def epoch(self, step: int) -> int:
        """Return the epoch, counted from 1, of a step whose data were read."""
        return 1

    @abstractmethod
    def rows(self, entry: InputRange, start: int, stop: int) -> np.ndarray:
        """Return the values of samples [start, stop) of an input, in the input's numpy type, with
        the samples along its batch axis. If the input has no batch axis, return its full value for
        the step that contains sample `start`.

        Callers request samples of one step, and only samples that `sample_count` includes.
        """
