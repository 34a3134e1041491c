"""The numbers of a tensor, read a block at a time from wherever they are."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from autopipe.ir.graph import Value
from autopipe.ir.layout import Box

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

    def transposed(self, name: str) -> Numbers:
        """A matrix's numbers with rows and columns changed over."""
        shape = self.value.shape[::-1]
        return Numbers(Value(name, self.value.dtype, shape), lambda box: self.read(_flipped(box)).T)

    def repeated(self, name: str, rows: int) -> Numbers:
        """`rows` times the only row."""
        shape = (rows, *self.value.shape[1:])

        def read(box: Box) -> npt.NDArray[np.generic]:
            row = self.read(Box((0, *box.starts[1:]), (1, *box.stops[1:])))
            return np.broadcast_to(row, box.shape)

        return Numbers(Value(name, self.value.dtype, shape), read)


def _flipped(box: Box) -> Box:
    return Box(box.starts[::-1], box.stops[::-1])


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
