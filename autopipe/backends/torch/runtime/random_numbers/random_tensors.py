"""Blocks of random tensors, drawn on any device without the rest of the tensor.

Element i of a tensor is made from word i of the tensor's key, in row-major order. A block is a set
of contiguous runs, drawn a piece at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from autopipe.backends.torch.runtime.random_numbers.philox import WORDS_PER_BLOCK, Rows, draw_words
from autopipe.ir.layout import TensorSlice

Positions = npt.NDArray[np.int64]
Key = tuple[int, int]

PIECE: Final = {"cpu": 1 << 17, "cuda": 1 << 25}
"""Words drawn at a time: on a CPU as many as a core's cache holds with their intermediate results,
on a GPU as many as keep it busy.
"""


@dataclass(frozen=True, slots=True)
class ContiguousRuns:
    """Runs of `length` elements each, in the tensor's order. Together they are a block,
    row-major.
    """

    first: int
    """Position of the block's first element in the tensor."""
    length: int
    counts: tuple[int, ...]
    """Sizes of the grid in which the runs lie, outer to inner; () for one run."""
    strides: tuple[int, ...]
    """Elements of the tensor from one run to the next, along each of those dimensions."""

    @property
    def count(self) -> int:
        return math.prod(self.counts) if self.length else 0

    def positions(self, start: int, stop: int) -> Positions:
        """Return the positions in the tensor at which runs [start, stop) begin, ascending."""
        found = np.full(stop - start, self.first, np.int64)
        left = np.arange(start, stop, dtype=np.int64)
        for size, stride in zip(reversed(self.counts), reversed(self.strides), strict=True):
            left, index = np.divmod(left, size)
            found += index * stride
        return found


def contiguous_runs(shape: tuple[int, ...], box: TensorSlice) -> ContiguousRuns:
    """Return the runs of a block of a tensor of `shape`, as few and as long as possible."""
    first = 0
    length = 1
    stride = 1
    outer: list[tuple[int, int]] = []
    for size, start, stop in reversed(list(zip(shape, box.starts, box.stops, strict=True))):
        if length == stride:  # The block contains all dimensions below.
            length *= stop - start
        else:
            outer.insert(0, (stop - start, stride))
        first += start * stride
        stride *= size
    return ContiguousRuns(
        first, length, tuple(each for each, _ in outer), tuple(each for _, each in outer)
    )


def draw_block(
    shape: tuple[int, ...],
    box: TensorSlice,
    key: Key,
    make: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    device: torch.device,
    threads: int = 1,
) -> Tensor:
    """Return the block `box` of a random tensor of `shape`. `make` returns an element for each
    word, elementwise.
    """
    block = torch.empty(box.shape, dtype=dtype, device=device)
    flat = block.view(-1)
    runs = contiguous_runs(shape, box)
    piece = PIECE.get(device.type, PIECE["cuda"])
    workers = threads if device.type == "cpu" and len(flat) > piece else 1

    def draw(worker: int) -> None:
        with torch.no_grad():
            for place, starts, length in _pieces(runs, piece, worker, workers):
                words = _words_of_runs(starts, length, key, device)
                flat[place : place + words.numel()] = make(words).reshape(-1)

    if workers == 1:
        draw(0)
    else:
        with ThreadPoolExecutor(
            workers
        ) as pool:  # Torch releases the interpreter's lock while an operator runs.
            list(pool.map(draw, range(workers)))
    return block


def _pieces(
    runs: ContiguousRuns, piece: int, worker: int, workers: int
) -> Iterator[tuple[int, Positions, int]]:
    """Yield every `workers`-th piece of a block, from number `worker` on: (place, starts, length).

    place: index of the piece's first element in the block.
    starts: positions in the tensor at which the piece's runs begin.
    length: elements of each of these runs.
    """
    if runs.length > piece:
        per_run = -(-runs.length // piece)
        for number in range(worker, runs.count * per_run, workers):
            run, part = divmod(number, per_run)
            skipped = part * piece
            yield (
                run * runs.length + skipped,
                runs.positions(run, run + 1) + skipped,
                min(piece, runs.length - skipped),
            )
        return
    together = max(1, piece // max(runs.length, 1))
    for start in range(worker * together, runs.count, workers * together):
        yield (
            start * runs.length,
            runs.positions(start, min(start + together, runs.count)),
            runs.length,
        )


def _words_of_runs(starts: Positions, length: int, key: Key, device: torch.device) -> Tensor:
    """Return the words of runs that begin at `starts`, int32 [runs, length]."""
    first, lead = np.divmod(starts, WORDS_PER_BLOCK)
    blocks = -(-(int(lead.max()) + length) // WORDS_PER_BLOCK)
    if len(first) == 1:
        first_blocks = torch.full((1,), int(first[0]), dtype=torch.int64, device=device)
    else:
        first_blocks = torch.from_numpy(first).to(device)
    words = draw_words(Rows.of(first_blocks), 0, blocks, key)
    if np.all(lead == lead[0]):
        skipped = int(lead[0])
        return words[:, skipped : skipped + length]
    within = torch.from_numpy(lead).to(device)[:, None] + torch.arange(length, device=device)
    return words.gather(1, within)
