"""Check that a program can resume from a checkpoint: same model and kind of optimizer, whatever the plans are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopipe.backends.torch.checkpoint.form import Checkpoint
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.errors import ConfigurationError

_DIGITS = 12
"""Of a digest, enough to tell two apart."""


def check_identity(checkpoint: Checkpoint, manifest: Manifest, path: Path) -> None:
    """Raise ConfigurationError, with the first difference, unless the checkpoint is of the program's model."""
    difference = next(_differences(checkpoint, manifest), None)
    if difference is not None:
        hint = "choose another --checkpoint folder"
        raise ConfigurationError(f"the checkpoint is of another {difference}", hint=hint, where=str(path))


def _differences(checkpoint: Checkpoint, manifest: Manifest) -> Iterator[str]:
    saved = {each.name: each.value for each in checkpoint.parameters}
    for index in sorted({shard.parameter for shards in manifest.shards for shard in shards}):
        entry = manifest.parameters[index]
        found = saved.get(entry.name)
        if found is None:
            yield f"model: it has no parameter {entry.name!r}"
        elif (found.dtype, found.shape) != (entry.dtype, entry.shape):
            there, here = (f"{each.dtype} {list(each.shape)}" for each in (found, entry))
            yield f"model: its parameter {entry.name!r} is {there}, the program's is {here}"
    for name in sorted(saved.keys() - {entry.name for entry in manifest.parameters}):
        yield f"model: it has a parameter {name!r}, the program has none"
    if checkpoint.model_digest != manifest.model_digest:
        there, here = (digest[:_DIGITS] or "none" for digest in (checkpoint.model_digest, manifest.model_digest))
        yield f"model: {checkpoint.model} had digest {there}, the program's {manifest.model} has {here}"
    there, here = _kind(checkpoint.optimizer), _kind(manifest.optimizer)
    if there != here:
        yield f"optimizer: {there}, the program's is {here}"


def _kind(optimizer: dict[str, Any]) -> str:
    """Settings of the optimizer that decide which state it keeps; learning rates and the like may change."""
    name = str(optimizer["name"])
    return f"{name} with momentum" if name == "sgd" and optimizer["momentum"] else name
