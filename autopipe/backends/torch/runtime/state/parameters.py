"""Parameters of a rank: only its own shards, read from the ONNX file by offset or initialised from
the seed.

Element i of an initialised parameter is computed from word i of a random stream whose key depends
on the seed and the parameter's name. So every sharding starts from the values of one device, and
other element types round these values.
"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
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
    """Return a shard of a parameter that is initialised from the seed, on `device`, in the
    parameter's element type.
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
    """Return the initial values for random words: integers (int64) if `whole`, otherwise float32,
    which the caller rounds to the parameter's type.
    """
    if normal:
        numbers = standard_normal(words).mul_(float(np.float32(scale)))
    else:
        numbers = words.to(torch.float32).mul_(float(np.float32(scale * 2.0**-31)))
    return numbers.floor_().to(torch.int64) if whole else numbers


def _key_number(name: str) -> int:
    """Return a number derived from a hash of the name. A parameter's index depends on the graph,
    its name does not.
    """
    return int.from_bytes(
        hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:16], "little"
    )


def torch_dtype(dtype: DType) -> torch.dtype:
    found = getattr(torch, dtype.held)
    assert isinstance(found, torch.dtype)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of an element type, which ONNX and torch share."""
    return str(dtype).removeprefix("torch.")


def tensor_of(array: np.ndarray, dtype: str) -> torch.Tensor:
    """Return a tensor that shares memory with the array. For types unknown to numpy, the array
    holds the bits.
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
    """Return the rank's shards by parameter index, on `device`; trainable ones require gradients in
    training.

    `narrow` is the 16-bit type of the parameters in `manifest.low_precision`, None for the
    parameter's own type. Unless `valued`, the tensors are uninitialised.
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
    """Return one shard of one parameter of the ONNX file `model`.

    A shard that is read from the file is on the CPU, an initialised shard on `device`. Raise
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
    stored = dtype.stored
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
    numbers = tensor_of(block, dtype.value)
    if not isinstance(storage, FoldedSlice) or not storage.form:
        return numbers
    return (
        -numbers if storage.form == "log of the negative" else numbers
    ).log()  # The file stores the exponential or its negative.


def load_constants(folder: Path, names: set[str], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the constants of stages by name, from `constants.npz` of a program folder."""
    with np.load(folder / "constants.npz", allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in sorted(names)}
    return {
        name: tensor_of(array, array.dtype.names[0] if array.dtype.names else array.dtype.name).to(
            device
        )
        for name, array in arrays.items()
    }


class Arguments(SimpleNamespace):
    """Argument `p` of a forward: parameters `w…`, constants `c…`, `device`, `group`,
    `weight_grads`, `random`, `running`, and `training`, which is False in a validation.
    """
