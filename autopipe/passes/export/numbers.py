"""The numbers of a tensor, read a block at a time from wherever they are."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from autopipe.ir.graph import DType, Value
from autopipe.ir.layout import Box
from autopipe.passes.frontend.folding import Folded

PIECE: Final = 1 << 24
"""Bytes held at a time."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """A tensor by name, element type and shape, and how to read a block of it.

    `read` gives little-endian elements in the block's shape; of bfloat16, the bits.
    """

    value: Value
    read: Callable[[Box], npt.NDArray[np.generic]]

    def pieces(self) -> Iterator[bytes]:
        """All of the tensor's bytes, row by row, no more than about PIECE at a time."""
        for box in _boxes(self.value.shape, PIECE // self.value.dtype.itemsize):
            yield self.read(box).tobytes()

    def renamed(self, name: str) -> Numbers:
        """The same numbers under another name."""
        return Numbers(dataclasses.replace(self.value, name=name), self.read)

    def computed(self, value: Value, folded: Folded) -> Numbers:
        """What an exporter had folded operators into, from the numbers of the parameter; what is only moved is read
        a block at a time, all else at once."""
        steps = folded.steps
        if not steps:
            return self.renamed(value.name)
        if len(steps) == 1 and steps[0].operator == "Transpose":
            order = steps[0].numbers
            return Numbers(value, lambda box: self.read(_back(box, order)).transpose(order))

        @functools.cache
        def whole() -> npt.NDArray[np.generic]:
            stored = self.read(Box((0,) * len(self.value.shape), self.value.shape))
            if not any(step.operator == "Exp" for step in steps):
                return folded.apply(stored)
            if value.dtype is not DType.BFLOAT16:
                return folded.apply(stored).astype(stored.dtype)
            bits = folded.apply((stored.astype(np.uint32) << 16).view(np.float32)).astype(np.float32).view(np.uint32)
            # Rounded to the nearest, ties to even.
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(stored.dtype)

        return Numbers(value, lambda box: whole()[tuple(map(slice, box.starts, box.stops))].reshape(box.shape))


def _back(box: Box, order: tuple[int, ...]) -> Box:
    """The block of a tensor that is this block of it transposed."""
    starts, stops = [0] * len(order), [0] * len(order)
    for place, axis in enumerate(order):
        starts[axis], stops[axis] = box.starts[place], box.stops[place]
    return Box(tuple(starts), tuple(stops))


def _boxes(shape: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Blocks of at most `limit` elements which, one after the other, are the tensor row by row."""
    if math.prod(shape) == 0:
        return
    axis = next((axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= limit), None)
    if axis is None:  # A scalar.
        yield Box((), ())
        return
    rows = max(1, limit // math.prod(shape[axis + 1 :]))
    rest = shape[axis + 1 :]
    for outer in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], rows):
            stop = min(start + rows, shape[axis])
            yield Box((*outer, start, *(0 for _ in rest)), (*(at + 1 for at in outer), stop, *rest))
