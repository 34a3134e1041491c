"""A rank's block of a parameter, drawn: only its own numbers, a piece at a time, by several threads.

Element i of a parameter is made from word i of the stream that the seed and the parameter's name stand for, whatever
the plan, the rank and the element type, so that any sharding holds what one device would.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from autopipe.backends.torch.runtime import box_muller, philox
from autopipe.backends.torch.runtime.box_runs import ContiguousRanges, contiguous_ranges
from autopipe.backends.torch.runtime.manifest import ParameterEntry, ShardEntry

_PARAMETER_STREAM: Final = 1
PIECE: Final = 1 << 16
"""Words drawn at a time: half a MiB, so that the passes over them stay in a core's cache."""
SKIP: Final = 512
"""Words that are drawn as fast as they are skipped."""


def init_shard(entry: ParameterEntry, shard: ShardEntry, seed: int, threads: int = 1) -> torch.Tensor:
    """The numbers of a block of a drawn parameter, on the CPU, in the parameter's element type."""
    block = torch.empty(shard.shape, dtype=getattr(torch, entry.dtype))
    if entry.storage.scheme in ("zeros", "ones"):
        return block.fill_(float(entry.storage.scheme == "ones"))
    key = philox.key_of(seed, (_PARAMETER_STREAM, _number_of(entry.name)))
    runs, flat = contiguous_ranges(entry.shape, shard.starts, shard.stops), block.view(-1)
    sharing = threads if len(flat) > PIECE else 1

    def draw(thread: int) -> None:
        for place, words in _pieces(runs, key, thread, sharing):
            numbers = _numbers(entry.storage.scheme, words) * entry.storage.scale
            flat[place : place + len(numbers)] = torch.from_numpy(numbers.astype(np.float32))

    if sharing == 1:
        draw(0)
    else:
        with ThreadPoolExecutor(sharing) as pool:  # NumPy gives the interpreter free while it draws and computes.
            list(pool.map(draw, range(sharing)))
    return block


def _number_of(name: str) -> int:
    """A number that only this name has: indices differ from graph to graph, names do not."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:16], "little")


def _numbers(scheme: str, words: philox.Words) -> npt.NDArray[np.float64]:
    if scheme == "normal":
        return box_muller.normal(words)
    return philox.as_uniform(words) * 2.0 - 1.0


def _pieces(runs: ContiguousRanges, key: philox.Words, thread: int, threads: int) -> Iterator[tuple[int, philox.Words]]:
    """Every `threads`-th piece of the block from number `thread` on: its place in the block, and its words."""
    reader = philox.WordReader(key)
    if runs.length > PIECE:
        a_run = -(-runs.length // PIECE)
        for number in range(thread, runs.count * a_run, threads):
            run, part = divmod(number, a_run)
            skipped = part * PIECE
            (place,) = runs.places(run, run + 1)
            words = reader.read(int(place) + skipped, min(PIECE, runs.length - skipped))
            yield run * runs.length + skipped, words
        return
    apart = min(runs.strides[-1], runs.length + SKIP) if runs.strides else runs.length
    together = max(1, PIECE // max(apart, 1))
    for start in range(thread * together, runs.count, threads * together):
        places = runs.places(start, min(start + together, runs.count))
        yield start * runs.length, _gathered(reader, places, runs.length, apart)


def _gathered(reader: philox.WordReader, places: npt.NDArray[np.int64], length: int, apart: int) -> philox.Words:
    """The words of several runs, one after the other; runs that begin no further than `apart` are read as one."""
    borders = np.flatnonzero(np.diff(places) > apart) + 1
    found = []
    for near in np.split(places, borders):
        words = reader.read(int(near[0]), int(near[-1] - near[0]) + length)
        if len(near) > 1:
            words = words[((near - near[0])[:, None] + np.arange(length)).reshape(-1)]
        found.append(words)
    return np.concatenate(found)
