"""Slices of random tensors, which are drawn on any device without the rest of the tensor.

Element i of a tensor, in row-major order, is computed from random word i of the tensor's key. A
slice consists of runs, sequences of elements that are contiguous in the tensor. It is drawn in
pieces: parts of a run, or several runs.
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

from autopipe.backends.torch.runtime.random_numbers.philox import (
    WORDS_PER_BLOCK,
    CounterRows,
    draw_words,
)
from autopipe.ir.layout import TensorSlice

Positions = npt.NDArray[np.int64]
Key = tuple[int, int]

PIECE_ELEMENTS: Final = {"cpu": 1 << 17, "cuda": 1 << 25}
"""Number of words that are drawn at a time, by device type. On a CPU, words and intermediate
results fit into the cache of a core; on a GPU, the number suffices to keep the GPU busy.
"""


@dataclass(frozen=True, slots=True)
class ContiguousRuns:
    """The runs that form a slice of a tensor, in row-major order. A run is a sequence of `length`
    elements that are contiguous in the tensor. The slice has one run per index of its outer
    dimensions, over which a run does not extend.
    """

    first: int
    """Position in the tensor of the slice's first element."""
    length: int
    counts: tuple[int, ...]
    """Sizes of the slice in its outer dimensions, from the outermost to the innermost; () if there
    is one run.
    """
    strides: tuple[int, ...]
    """For each outer dimension of the slice, the distance of neighbouring runs in the tensor, in
    elements.
    """

    @property
    def count(self) -> int:
        """Number of runs, sequences of contiguous elements, that form the slice."""
        return math.prod(self.counts) if self.length else 0

    def positions(self, start: int, stop: int) -> Positions:
        """Return the positions in the tensor at which the runs with indices [start, stop) begin, in
        ascending order, int64.
        """
        found = np.full(stop - start, self.first, np.int64)
        left = np.arange(start, stop, dtype=np.int64)
        for size, stride in zip(reversed(self.counts), reversed(self.strides), strict=True):
            left, index = np.divmod(left, size)
            found += index * stride
        return found


def contiguous_runs(shape: tuple[int, ...], box: TensorSlice) -> ContiguousRuns:
    """Return the runs (sequences of elements that are contiguous in the tensor) that form the slice
    `box` of a tensor of shape `shape`. The runs are as long as possible.
    """
    first = 0
    length = 1
    stride = 1
    outer: list[tuple[int, int]] = []
    for size, start, stop in reversed(list(zip(shape, box.starts, box.stops, strict=True))):
        # `length` equals `stride` if the slice contains all inner dimensions completely. Then a
        # contiguous run extends over this dimension as well.
        if length == stride:
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
    """Return the slice `box` of a random tensor of shape `shape`, with element type `dtype`. `make`
    maps random 32-bit words (int32) to elements, and must be elementwise. On a CPU, up to `threads`
    threads draw a large slice.
    """
    block = torch.empty(box.shape, dtype=dtype, device=device)
    flat = block.view(-1)
    runs = contiguous_runs(shape, box)
    piece = PIECE_ELEMENTS.get(device.type, PIECE_ELEMENTS["cuda"])
    workers = threads if device.type == "cpu" and len(flat) > piece else 1

    def draw(worker: int) -> None:
        """Draw all pieces of one worker."""
        with torch.no_grad():
            for place, starts, length in _pieces_of_worker(runs, piece, worker, workers):
                words = _words_of_runs(starts, length, key, device)
                flat[place : place + words.numel()] = make(words).reshape(-1)

    if workers == 1:
        draw(0)
    else:
        with ThreadPoolExecutor(
            workers
            # Threads run in parallel, because torch operators release the global interpreter lock.
        ) as pool:
            list(pool.map(draw, range(workers)))
    return block


def _pieces_of_worker(
    runs: ContiguousRuns, piece: int, worker: int, workers: int
) -> Iterator[tuple[int, Positions, int]]:
    """Yield (place, starts, length) for each piece of a slice that worker number `worker` of
    `workers` draws: each `workers`-th piece. A piece is a part of a run, or several runs; a run is
    a sequence of elements that are contiguous in the tensor. `piece` is the approximate number of
    elements of a piece.

    place: index in the slice of the piece's first element.
    starts: positions in the tensor at which the runs of the piece begin.
    length: number of elements of each of these runs.
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
    """Return the random words at the positions [start, start + length) of the key's sequence, for
    each start in `starts`; int32 [starts, length].
    """
    first, lead = np.divmod(starts, WORDS_PER_BLOCK)
    blocks = -(-(int(lead.max()) + length) // WORDS_PER_BLOCK)
    if len(first) == 1:
        first_blocks = torch.full((1,), int(first[0]), dtype=torch.int64, device=device)
    else:
        first_blocks = torch.from_numpy(first).to(device)
    words = draw_words(CounterRows.from_first(first_blocks), 0, blocks, key)
    if np.all(lead == lead[0]):
        skipped = int(lead[0])
        return words[:, skipped : skipped + length]
    within = torch.from_numpy(lead).to(device)[:, None] + torch.arange(length, device=device)
    return words.gather(1, within)
