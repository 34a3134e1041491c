"""A source of random samples, which are drawn on the device that uses them."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from autopipe.backends.torch.runtime.data.input_checks import numpy_dtype, rows_per_sample
from autopipe.backends.torch.runtime.data.sample_order import START_OF_RUN, RunProgress
from autopipe.backends.torch.runtime.data.sample_source import BlockRanges, SampleSource
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.random_numbers.normal_numbers import standard_normal
from autopipe.backends.torch.runtime.random_numbers.philox import Purpose, integers_below, key_of
from autopipe.backends.torch.runtime.random_numbers.random_tensors import draw_block
from autopipe.ir.layout import TensorSlice
from autopipe.ir.program import InputBounds, InputRange

_CPU = torch.device("cpu")


class RandomSource(SampleSource):
    """Random values within the range of each input, for any number of steps. A sample has equal
    values on all ranks and devices.

    Each input has a Philox key. Element i of the input over all samples, with the batch axis moved
    to the front and in row-major order, is computed from the random 32-bit word number i of this
    key.
    """

    def __init__(self, manifest: Manifest, seed: int, begin: RunProgress = START_OF_RUN) -> None:
        super().__init__(manifest, begin)
        self._keys = {
            entry.value.name: key_of(seed, Purpose.BATCH, index)
            for index, entry in enumerate(manifest.inputs)
        }

    def rows(self, entry: InputRange, start: int, stop: int) -> np.ndarray:
        box = [(0, size) for size in entry.value.shape]
        if entry.batch_axis is not None:
            box[entry.batch_axis] = (0, (stop - start) * rows_per_sample(entry, self._manifest))
        return self.block(entry, start, tuple(box), _CPU).numpy().astype(numpy_dtype(entry))

    def block(
        self, entry: InputRange, sample: int, box: BlockRanges, device: torch.device
    ) -> torch.Tensor:
        """Return the slice `box` of a micro-batch of an input, on `device`. `sample` is the number
        of the micro-batch's first sample. The values are int64 if random values of the input are
        integers, otherwise float32.
        """
        axis = entry.batch_axis
        shape = entry.value.shape
        if axis is not None:
            skipped = sample * rows_per_sample(entry, self._manifest)
            start, stop = box[axis]
            box = ((skipped + start, skipped + stop), *box[:axis], *box[axis + 1 :])
            shape = (skipped + stop, *shape[:axis], *shape[axis + 1 :])
        region = TensorSlice(tuple(start for start, _ in box), tuple(stop for _, stop in box))
        key = self._keys[entry.value.name]
        dtype = torch.float32 if entry.below is None else torch.int64
        if not entry.drawn:
            found = draw_block(
                shape, region, key, partial(_values_from_words, below=entry.below), dtype, device
            )
        else:
            words = draw_block(shape, region, key, _identity, torch.int32, device)
            found = _values_from_words(words, entry.below)
            for bounds in entry.drawn:
                part = _bounded_slices(bounds, axis, region)
                least = max(0, bounds.least) if bounds.below > 0 else bounds.least
                found[part] = (integers_below(words[part], bounds.below - least) + least).to(dtype)
        return found.movedim(0, axis).contiguous() if axis else found


def _values_from_words(words: torch.Tensor, below: int | None) -> torch.Tensor:
    """Return one value for each random 32-bit word in `words` (int32): an integer in [0, below), or
    a standard normal number if `below` is None.
    """
    return standard_normal(words) if below is None else integers_below(words, below)


def _identity(words: torch.Tensor) -> torch.Tensor:
    """Return `words`, random 32-bit words, unchanged. `draw_block` gets this function if the words
    are converted to values later.
    """
    return words


def _bounded_slices(
    bounds: InputBounds, axis: int | None, region: TensorSlice
) -> tuple[slice, ...]:
    """Return the slices of the elements of `region` to which `bounds` apply, relative to `region`.
    `region` is a slice of an input whose batch axis `axis` was moved to the front; None if the
    input has no batch axis.
    """
    sides = list(zip(bounds.starts, bounds.stops, strict=True))
    found = []
    if axis is not None:
        del sides[axis]
        found.append(slice(None))
    own = zip(region.starts, region.stops, strict=True)
    if axis is not None:
        next(own)
    for (least, below), (start, stop) in zip(sides, own, strict=True):
        begin = max(least, start)
        found.append(slice(begin - start, max(begin, min(below, stop)) - start))
    return tuple(found)
