"""Whether a program can go on from a checkpoint: same model and kind of optimizer, whatever the plans are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopipe.backends.torch.checkpoint.form import Checkpoint
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.errors import ConfigurationError


def check_identity(checkpoint: Checkpoint, manifest: Manifest, path: Path) -> None:
    """Raise ConfigurationError, with the first difference, unless the checkpoint is of the program's model."""
    difference = next(_differences(checkpoint, manifest), None)
    if difference is not None:
        hint = "choose another --checkpoint folder"
        raise ConfigurationError(f"the checkpoint is of another {difference}", hint=hint, where=str(path))


def _differences(checkpoint: Checkpoint, manifest: Manifest) -> Iterator[str]:
    saved = {each.name: each for each in checkpoint.parameters}
    held = {shard.parameter for shards in manifest.shards for shard in shards}
    for index in sorted(held):
        ours = manifest.parameters[index]
        theirs = saved.get(ours.name)
        if theirs is None:
            yield f"model: it has no parameter {ours.name!r}"
        elif (theirs.value.dtype, theirs.value.shape) != (ours.dtype, ours.shape):
            there, here = (f"{each.dtype} {list(each.shape)}" for each in (theirs.value, ours))
            yield f"model: its parameter {ours.name!r} is {there}, the program's is {here}"
    for name in sorted(saved.keys() - {each.name for each in manifest.parameters}):
        yield f"model: it has a parameter {name!r}, the program has none"
    if checkpoint.model_digest != manifest.model_digest:
        theirs_, ours_ = (each[:12] or "unknown" for each in (checkpoint.model_digest, manifest.model_digest))
        yield f"model: {checkpoint.model} had digest {theirs_}, the program's {manifest.model} has {ours_}"
    theirs_, ours_ = _kind(checkpoint.optimizer), _kind(manifest.optimizer)
    if theirs_ != ours_:
        yield f"optimizer: {theirs_}, the program's is {ours_}"


def _kind(optimizer: dict[str, Any]) -> str:
    """What the optimizer keeps depends on this; learning rates and the like may change as a run goes on."""
    return f"{optimizer['name']} with momentum" if _keeps_momentum(optimizer) else str(optimizer["name"])


def _keeps_momentum(optimizer: dict[str, Any]) -> bool:
    return bool(optimizer["name"] == "sgd" and optimizer.get("momentum"))
