"""Parameters of a rank. A rank reads only its shards: from the ONNX file, at their positions, or by
initialisation from the seed.

Element i of an initialised parameter, in row-major order, is computed from word i of a random
sequence whose key depends on the seed and the parameter's name. So the values do not depend on the
sharding. For element types other than float32 they are rounded.
"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch

from autopipe.backends.torch.runtime.host import core_count_of_this_rank
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.random_numbers.normal_numbers import standard_normal
from autopipe.backends.torch.runtime.random_numbers.philox import Purpose, key_of
from autopipe.backends.torch.runtime.random_numbers.random_tensors import draw_block
from autopipe.ir.errors import ConfigurationError, LaunchError
from autopipe.ir.graph import (
    DType,
    FileSlice,
    Fill,
    FoldedSlice,
    Initializer,
    Parameter,
    VarintSlice,
)
from autopipe.ir.layout import TensorSlice
from autopipe.ir.varints import low_bits_of_varints

_CPU: Final = torch.device("cpu")


def init_shard(
    parameter: Parameter, box: TensorSlice, seed: int, threads: int = 1, device: torch.device = _CPU
) -> torch.Tensor:
    """Return the slice `box` of a parameter that is initialised from the seed, on `device`, in the
    parameter's element type. On a CPU, up to `threads` threads compute it.
    """
    value = parameter.value
    storage = parameter.storage
    assert isinstance(storage, Initializer)
    dtype = torch_dtype(value.dtype)
    if storage.scheme in ("zeros", "ones"):
        return torch.full(box.shape, float(storage.scheme == "ones"), dtype=dtype, device=device)
    key = key_of(seed, Purpose.PARAMETER, _key_number(value.name))
    make = partial(
        _elements_from_words,
        normal=storage.scheme == "normal",
        scale=storage.scale,
        whole=not dtype.is_floating_point,
    )
    return draw_block(value.shape, box, key, make, dtype, device, threads)


def _elements_from_words(
    words: torch.Tensor, *, normal: bool, scale: float, whole: bool
) -> torch.Tensor:
    """Return an initial value for each random 32-bit word in `words` (int32): normal with standard
    deviation `scale` if `normal`, otherwise uniform in [-scale, scale]. The values are rounded down
    to int64 if `whole`; otherwise they are float32, which the caller converts to the parameter's
    type.
    """
    if normal:
        numbers = standard_normal(words).mul_(float(np.float32(scale)))
    else:
        numbers = words.to(torch.float32).mul_(float(np.float32(scale * 2.0**-31)))
    return numbers.floor_().to(torch.int64) if whole else numbers


def _key_number(name: str) -> int:
    """Return a 128-bit number for a parameter name, from its SHA-256 digest. Names are used instead
    of indices, because an index changes if other parts of the graph change.
    """
    return int.from_bytes(
        hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:16], "little"
    )


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return the torch type that holds elements of type `dtype`."""
    found = getattr(torch, dtype.torch_name)
    assert isinstance(found, torch.dtype)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of an element type without the prefix `torch.`, for example `float32`. ONNX
    uses the same names.
    """
    return str(dtype).removeprefix("torch.")


def tensor_from_array(array: np.ndarray, dtype: str) -> torch.Tensor:
    """Return a tensor of the element type `dtype` that shares memory with `array`. For types that
    numpy lacks, the array contains the bits of the elements.
    """
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
    """Return the shards of parameters of rank `rank`, on `device`, by parameter index. In training,
    floating-point shards of trainable parameters require gradients.

    If `narrow` is given, a 16-bit type, the parameters in `manifest.low_precision` are converted to
    it. If `valued` is False, the tensors are uninitialised.
    """
    found: dict[int, torch.Tensor] = {}
    threads = core_count_of_this_rank()
    for shard in manifest.shards[rank]:
        parameter = manifest.parameters[shard.parameter]
        dtype = torch_dtype(parameter.value.dtype)
        if narrow is not None and shard.parameter in manifest.low_precision:
            dtype = narrow
        if valued:
            tensor = (
                read_block(manifest.model, parameter, shard.box, seed, threads, device)
                .to(dtype)
                .to(device)
            )
        else:
            tensor = torch.empty(shard.box.shape, dtype=dtype, device=device)
        tensor.requires_grad_(manifest.train and parameter.trainable and tensor.is_floating_point())
        found[shard.parameter] = tensor
    return found


def read_block(
    model: Path,
    parameter: Parameter,
    box: TensorSlice,
    seed: int,
    threads: int = 1,
    device: torch.device = _CPU,
) -> torch.Tensor:
    """Return the slice `box` of a parameter of the ONNX file `model`.

    A slice that is read from a file is on the CPU; an initialised slice is on `device`. Raise
    ConfigurationError if the file does not exist, LaunchError if it cannot be read or is too short.
    """
    storage = parameter.storage
    name = parameter.value.name
    dtype = parameter.value.dtype
    shape = parameter.value.shape
    if isinstance(storage, Fill):
        return torch.full(box.shape, storage.value, dtype=torch_dtype(dtype))
    if isinstance(storage, Initializer):
        return init_shard(parameter, box, seed, threads, device)
    stored = dtype.storage_type
    rows = storage.rows if isinstance(storage, FoldedSlice) else ()
    extent = (storage.length // stored.itemsize,) if rows else shape or (1,)
    path = model.parent / storage.file if isinstance(storage, FileSlice) and storage.file else model
    whole: np.ndarray
    try:
        if isinstance(storage, VarintSlice):
            payload = np.memmap(
                path, dtype=np.uint8, mode="r", offset=storage.offset, shape=(storage.length,)
            )
            whole = low_bits_of_varints(payload).view(stored).reshape(extent)
        else:
            whole = np.memmap(path, dtype=stored, mode="r", offset=storage.offset, shape=extent)
    except FileNotFoundError as error:
        raise ConfigurationError(
            "the model file does not exist, but the program reads weights from it",
            hint="restore the file, or set its path with --model FILE",
            where=str(path),
        ) from error
    except (OSError, ValueError) as error:
        raise LaunchError(f"parameter {name!r} cannot be read: {error}", where=str(path)) from error
    if isinstance(storage, FoldedSlice) and rows:
        begins = np.asarray(rows[slice(box.starts[0], box.stops[0])], dtype=np.int64)
        block = np.array(
            whole[begins[:, None] + storage.step * np.arange(box.starts[1], box.stops[1])]
        )
    else:
        block = np.array(whole[box.slices] if shape else whole.reshape(()))
    numbers = tensor_from_array(block, dtype.value)
    if not isinstance(storage, FoldedSlice) or not storage.form:
        return numbers
    # If `storage.form` is set, the file contains exp(p) or -exp(p), which the model computes from
    # the parameter p. So p is the logarithm of the number or of its negative.
    return (-numbers if storage.form == "log of the negative" else numbers).log()


def load_constants(folder: Path, names: set[str], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the constants with these names, on `device`, from `constants.npz` in a program
    folder.
    """
    with np.load(folder / "constants.npz", allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in sorted(names)}
    return {
        name: tensor_from_array(
            array, array.dtype.names[0] if array.dtype.names else array.dtype.name
        ).to(device)
        for name, array in arrays.items()
    }
