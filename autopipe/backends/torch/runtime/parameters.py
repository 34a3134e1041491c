"""A rank's parameters: its own blocks only, read from the ONNX file by offset or drawn from the seed.

Element i of a drawn parameter is made from word i of the stream that the seed and the parameter's name stand for,
whatever the plan, the rank and the element type, so that any sharding holds what one device would. A block is runs of
neighbouring elements, drawn a piece at a time by several threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from autopipe.backends.torch.runtime.host import processors_of_this_rank
from autopipe.backends.torch.runtime.manifest import Manifest, ParameterEntry, ShardEntry
from autopipe.backends.torch.runtime.philox import WordReader, Words, as_uniform, box_muller_normal, key_of
from autopipe.ir.errors import ConfigurationError, LaunchError

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ContiguousRanges:
    """Runs of `length` elements each, in the tensor's order; together they are the block, row-major."""

    first: int
    """Place of the block's first element in the tensor."""
    length: int
    counts: tuple[int, ...]
    """Extents of the grid in which the runs lie, outer to inner; () for one run."""
    strides: tuple[int, ...]
    """Elements of the tensor from one run to the next, along each of those dimensions."""
    count: int

    def places(self, start: int, stop: int) -> Places:
        """Where runs [start, stop) begin in the tensor, int64, ascending."""
        found = np.full(stop - start, self.first, np.int64)
        left = np.arange(start, stop, dtype=np.int64)
        for extent, stride in zip(reversed(self.counts), reversed(self.strides), strict=True):
            left, index = np.divmod(left, extent)
            found += index * stride
        return found


def contiguous_ranges(shape: tuple[int, ...], starts: tuple[int, ...], stops: tuple[int, ...]) -> ContiguousRanges:
    """The runs of block [starts, stops) of a tensor of `shape`: as long, and as few, as there are."""
    first, length, stride, count = 0, 1, 1, 1
    outer: list[tuple[int, int]] = []
    for extent, start, stop in reversed(list(zip(shape, starts, stops, strict=True))):
        if length == stride:  # All that lies below is in the block.
            length *= stop - start
        else:
            outer.insert(0, (stop - start, stride))
            count *= stop - start
        first += start * stride
        stride *= extent
    counts, strides = tuple(each for each, _ in outer), tuple(each for _, each in outer)
    return ContiguousRanges(first, length, counts, strides, count if length else 0)


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
    key = key_of(seed, (_PARAMETER_STREAM, _number_of(entry.name)))
    runs, flat = contiguous_ranges(entry.shape, shard.starts, shard.stops), block.view(-1)
    sharing = threads if len(flat) > PIECE else 1

    def draw(thread: int) -> None:
        for place, words in _pieces(runs, key, thread, sharing):
            normal = entry.storage.scheme == "normal"
            numbers = (box_muller_normal(words) if normal else as_uniform(words) * 2.0 - 1.0) * entry.storage.scale
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


def _pieces(runs: ContiguousRanges, key: Words, thread: int, threads: int) -> Iterator[tuple[int, Words]]:
    """Every `threads`-th piece of the block from number `thread` on: its place in the block, and its words."""
    reader = WordReader(key)
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


def _gathered(reader: WordReader, places: npt.NDArray[np.int64], length: int, apart: int) -> Words:
    """The words of several runs, one after the other; runs that begin no further than `apart` are read as one."""
    borders = np.flatnonzero(np.diff(places) > apart) + 1
    found = []
    for near in np.split(places, borders):
        words = reader.read(int(near[0]), int(near[-1] - near[0]) + length)
        if len(near) > 1:
            words = words[((near - near[0])[:, None] + np.arange(length)).reshape(-1)]
        found.append(words)
    return np.concatenate(found)


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def load_parameters(
    manifest: Manifest, rank: int, device: torch.device, seed: int, valued: bool = True
) -> dict[int, torch.Tensor]:
    """The rank's blocks by parameter index, on `device`, gradients enabled for the trainable ones when training.

    Not `valued`, they are tensors of their shapes and types that nothing is read or drawn for.
    """
    found: dict[int, torch.Tensor] = {}
    threads = processors_of_this_rank()
    for shard in manifest.shards[rank]:
        entry = manifest.parameters[shard.parameter]
        if valued:
            tensor = read_block(manifest.model.parent, manifest.model, entry, shard, seed, threads).to(device)
        else:
            tensor = torch.empty(shard.shape, dtype=torch_dtype(entry.dtype), device=device)
        tensor.requires_grad_(manifest.train and entry.trainable and tensor.is_floating_point())
        found[shard.parameter] = tensor
    return found


def read_block(
    folder: Path, model: Path, entry: ParameterEntry, shard: ShardEntry, seed: int, threads: int = 1
) -> torch.Tensor:
    """One block of one parameter on the CPU.

    Raises ConfigurationError where the model's file is not there, LaunchError where it cannot be read or is too short.
    """
    if entry.storage.kind == "fill":
        return torch.full(shard.shape, entry.storage.value, dtype=torch_dtype(entry.dtype))
    if entry.storage.kind == "draw":
        return init_shard(entry, shard, seed, threads)
    path = folder / entry.storage.file if entry.storage.file else model
    stored = np.dtype("<u2" if entry.dtype == "bfloat16" else entry.dtype).newbyteorder("<")
    place = entry.storage
    extent = (place.length // stored.itemsize,) if place.rows else entry.shape or (1,)
    try:
        whole = np.memmap(path, dtype=stored, mode="r", offset=place.offset, shape=extent)
    except FileNotFoundError as error:
        raise ConfigurationError(
            "the model's file is not there, and its weights are needed",
            hint="put it back, or plan and generate the program again",
            where=str(path),
        ) from error
    except (OSError, ValueError) as error:
        raise LaunchError(f"parameter {entry.name!r} cannot be read: {error}", where=str(path)) from error
    region = tuple(slice(start, stop) for start, stop in zip(shard.starts, shard.stops, strict=True))
    if place.rows:
        begins = np.asarray(place.rows[region[0]], dtype=np.int64)
        block = np.array(whole[begins[:, None] + place.step * np.arange(region[1].start, region[1].stop)])
    else:
        block = np.array(whole[region] if entry.shape else whole.reshape(()))
    numbers = _brain_floats(block) if entry.dtype == "bfloat16" else torch.from_numpy(block)
    if not place.form:
        return numbers
    return (-numbers if place.form == "log of the negative" else numbers).log()  # Its exponential is stored.


def _brain_floats(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def load_constants(folder: Path, names: set[str], device: torch.device) -> dict[str, torch.Tensor]:
    with np.load(folder / "constants.npz", allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in sorted(names)}
    return {
        name: (_brain_floats(array) if array.dtype.kind == "V" else torch.from_numpy(array)).to(device)
        for name, array in arrays.items()
    }


class Arguments(SimpleNamespace):
    """Argument `p` of a forward: parameters `w…`, constants `c…`, `device`, `group`, `weight_grads`, `random`."""
