"""A rank's parameters: its own blocks only, read from the ONNX file by offset or drawn from the seed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from autopipe.backends.torch.runtime.drawing import init_shard
from autopipe.backends.torch.runtime.manifest import Manifest, ParameterEntry, ShardEntry
from autopipe.backends.torch.runtime.processors import processors_of_this_rank
from autopipe.ir.errors import ConfigurationError, LaunchError

_NUMPY = {"bfloat16": np.dtype("<u2")}


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of an element type's name."""
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
    stored = _NUMPY.get(entry.dtype) or np.dtype(entry.dtype).newbyteorder("<")
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
    return _in_form(_brain_floats(block) if entry.dtype == "bfloat16" else torch.from_numpy(block), place.form)


def _in_form(numbers: torch.Tensor, form: str) -> torch.Tensor:
    """The parameter whose exponential, perhaps negated, is stored."""
    if not form:
        return numbers
    return (-numbers if form == "log of the negative" else numbers).log()


def _brain_floats(bits: np.ndarray) -> torch.Tensor:
    """The bfloat16 numbers of these two bytes each."""
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def load_constants(folder: Path, names: set[str], device: torch.device) -> dict[str, torch.Tensor]:
    """The constants called `names`, on `device`."""
    with np.load(folder / "constants.npz", allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in sorted(names)}
    return {
        name: (_brain_floats(array) if array.dtype.kind == "V" else torch.from_numpy(array)).to(device)
        for name, array in arrays.items()
    }


class Arguments(SimpleNamespace):
    """Argument `p` of a forward: parameters `w…`, constants `c…`, `device`, `group`, `weight_grads`, `random`."""
