"""A rank's parameters: its own blocks only, read from the ONNX file by offset or drawn from the seed.

Element i of a drawn parameter is made from word i of the stream of the seed and the parameter's name, so that any
sharding, in any element type, holds what one device would. A block is runs of neighbouring elements, drawn a piece at a
time by several threads.
"""

from __future__ import annotations

import hashlib
import math
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
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.philox import WordReader, Words, as_uniform, box_muller_normal, key_of
from autopipe.ir.errors import ConfigurationError, LaunchError
from autopipe.ir.graph import DType, FileSlice, Fill, FoldedSlice, Initializer, Parameter
from autopipe.ir.layout import Box

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ContiguousRanges:
    """Runs of `length` elements each, in the tensor's order; together they are a block, row-major."""

    first: int  # Place of the block's first element in the tensor.
    length: int
    counts: tuple[int, ...]  # Extents of the grid in which the runs lie, outer to inner; () for one run.
    strides: tuple[int, ...]  # Elements of the tensor from one run to the next, along each of those dimensions.

    @property
    def count(self) -> int:
        return math.prod(self.counts) if self.length else 0

    def places(self, start: int, stop: int) -> Places:
        """Where runs [start, stop) begin in the tensor, int64, ascending."""
        found = np.full(stop - start, self.first, np.int64)
        left = np.arange(start, stop, dtype=np.int64)
        for extent, stride in zip(reversed(self.counts), reversed(self.strides), strict=True):
            left, index = np.divmod(left, extent)
            found += index * stride
        return found


def contiguous_ranges(shape: tuple[int, ...], box: Box) -> ContiguousRanges:
    """The runs of a block of a tensor of `shape`: as long, and as few, as there are."""
    first, length, stride = 0, 1, 1
    outer: list[tuple[int, int]] = []
    for extent, start, stop in reversed(list(zip(shape, box.starts, box.stops, strict=True))):
        if length == stride:  # All that lies below is in the block.
            length *= stop - start
        else:
            outer.insert(0, (stop - start, stride))
        first += start * stride
        stride *= extent
    return ContiguousRanges(first, length, tuple(each for each, _ in outer), tuple(each for _, each in outer))


_PARAMETER_STREAM: Final = 1
PIECE: Final = 1 << 16  # Words drawn at a time: half a MiB, so that the passes over them stay in a core's cache.
SKIP: Final = 512  # Words that are drawn as fast as they are skipped.


def init_shard(parameter: Parameter, box: Box, seed: int, threads: int = 1) -> torch.Tensor:
    """The numbers of a block of a drawn parameter, on the CPU, in the parameter's element type."""
    value, storage = parameter.value, parameter.storage
    assert isinstance(storage, Initializer)
    block = torch.empty(box.shape, dtype=torch_dtype(value.dtype))
    if storage.scheme in ("zeros", "ones"):
        return block.fill_(float(storage.scheme == "ones"))
    key = key_of(seed, (_PARAMETER_STREAM, _number_of(value.name)))
    runs, flat = contiguous_ranges(value.shape, box), block.view(-1)
    sharing = threads if len(flat) > PIECE else 1

    def draw(thread: int) -> None:
        for place, words in _pieces(runs, key, thread, sharing):
            unscaled = box_muller_normal(words) if storage.scheme == "normal" else as_uniform(words) * 2.0 - 1.0
            numbers = (unscaled * storage.scale).astype(np.float32)
            if not block.is_floating_point():  # Bytes: those below zero are counted from the largest.
                numbers = np.floor(numbers).astype(np.int64).astype(value.dtype.stored)
            flat[place : place + len(numbers)] = torch.from_numpy(numbers)

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
        places, found = runs.places(start, min(start + together, runs.count)), []
        for near in np.split(places, np.flatnonzero(np.diff(places) > apart) + 1):  # Runs that are read as one.
            words = reader.read(int(near[0]), int(near[-1] - near[0]) + runs.length)
            if len(near) > 1:
                words = words[((near - near[0])[:, None] + np.arange(runs.length)).reshape(-1)]
            found.append(words)
        yield start * runs.length, np.concatenate(found)


def torch_dtype(dtype: DType) -> torch.dtype:
    found = getattr(torch, dtype.held)
    assert isinstance(found, torch.dtype)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """ONNX's name of an element type, which is torch's."""
    return str(dtype).removeprefix("torch.")


def tensor_of(array: np.ndarray, dtype: str) -> torch.Tensor:
    """A tensor on the array's memory; of types that numpy does not know, the array holds the bits."""
    if dtype == "bfloat16" or dtype.startswith("float8"):
        bits = torch.from_numpy(array.view(np.int16 if dtype == "bfloat16" else np.uint8))
        return bits.view(torch_dtype(DType(dtype)))
    return torch.from_numpy(array)


def load_parameters(
    manifest: Manifest,
    rank: int,
    device: torch.device,
    seed: int,
    narrow: torch.dtype | None = None,
    valued: bool = True,
) -> dict[int, torch.Tensor]:
    """The rank's blocks by parameter index, on `device`, gradients enabled for the trainable ones when training; as
    `narrow`, where that is given, those that stages read in 16 bits. Not `valued`, they are tensors of their shapes and
    types that nothing is read or drawn for."""
    found: dict[int, torch.Tensor] = {}
    threads = processors_of_this_rank()
    for shard in manifest.shards[rank]:
        parameter = manifest.parameters[shard.parameter]
        dtype = torch_dtype(parameter.value.dtype)
        if narrow is not None and shard.parameter in manifest.low_precision:
            dtype = narrow
        if valued:
            tensor = read_block(manifest.model, parameter, shard.box, seed, threads).to(dtype).to(device)
        else:
            tensor = torch.empty(shard.box.shape, dtype=dtype, device=device)
        tensor.requires_grad_(manifest.train and parameter.trainable and tensor.is_floating_point())
        found[shard.parameter] = tensor
    return found


def read_block(model: Path, parameter: Parameter, box: Box, seed: int, threads: int = 1) -> torch.Tensor:
    """One block of one parameter of the ONNX file `model`, on the CPU. Raises ConfigurationError where the file is not
    there, LaunchError where it cannot be read or is too short."""
    storage, name, dtype, shape = parameter.storage, parameter.value.name, parameter.value.dtype, parameter.value.shape
    if isinstance(storage, Fill):
        return torch.full(box.shape, storage.value, dtype=torch_dtype(dtype))
    if not isinstance(storage, FileSlice):
        return init_shard(parameter, box, seed, threads)
    path = model.parent / storage.file if storage.file else model
    stored = dtype.stored
    rows = storage.rows if isinstance(storage, FoldedSlice) else ()
    extent = (storage.length // stored.itemsize,) if rows else shape or (1,)
    try:
        whole = np.memmap(path, dtype=stored, mode="r", offset=storage.offset, shape=extent)
    except FileNotFoundError as error:
        raise ConfigurationError(
            "the model's file is not there, and its weights are needed",
            hint="name it with --model FILE, or put it back",
            where=str(path),
        ) from error
    except (OSError, ValueError) as error:
        raise LaunchError(f"parameter {name!r} cannot be read: {error}", where=str(path)) from error
    if isinstance(storage, FoldedSlice) and rows:
        begins = np.asarray(rows[slice(box.starts[0], box.stops[0])], dtype=np.int64)
        block = np.array(whole[begins[:, None] + storage.step * np.arange(box.starts[1], box.stops[1])])
    else:
        block = np.array(whole[box.slices] if shape else whole.reshape(()))
    numbers = tensor_of(block, dtype.value)
    if not isinstance(storage, FoldedSlice) or not storage.form:
        return numbers
    return (-numbers if storage.form == "log of the negative" else numbers).log()  # Its exponential is stored.


def load_constants(folder: Path, names: set[str], device: torch.device) -> dict[str, torch.Tensor]:
    with np.load(folder / "constants.npz", allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in sorted(names)}
    return {
        name: tensor_of(array, array.dtype.names[0] if array.dtype.names else array.dtype.name).to(device)
        for name, array in arrays.items()
    }


class Arguments(SimpleNamespace):
    """Argument `p` of a forward: parameters `w…`, constants `c…`, `device`, `group`, `weight_grads`, `random`,
    `running`, and `training`, which is false in a validation."""
