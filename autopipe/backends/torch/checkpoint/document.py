"""Manifests as JSON: written with their own digest, refused where a byte of them has changed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from autopipe.backends.torch.checkpoint.folder import MANIFEST, advice
from autopipe.backends.torch.checkpoint.form import (
    FORMAT,
    Block,
    Checkpoint,
    StoredFile,
    StoredGenerator,
    StoredParameter,
    StoredTensor,
)
from autopipe.ir.errors import LaunchError
from autopipe.ir.layout import Box


def read_checkpoint(path: Path) -> Checkpoint:
    """The manifest of the checkpoint in folder `path`. Raises LaunchError where it is damaged or of another format."""
    where = str(path / MANIFEST)
    try:
        document = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise LaunchError(f"not a checkpoint of format {FORMAT}", hint=advice(path), where=where)
        if document.pop("sha256", None) != _digest(document):
            raise LaunchError("the checkpoint is damaged: its manifest has changed", hint=advice(path), where=where)
        return parsed(document)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise LaunchError(f"the checkpoint is damaged: {error!r}", hint=advice(path), where=where) from error


def text_of(checkpoint: Checkpoint) -> str:
    """Text of `manifest.json`."""
    document = document_of(checkpoint)
    return json.dumps(document | {"sha256": _digest(document)}) + "\n"


def _digest(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()


def document_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The manifest as a JSON object, without its digest."""
    return {
        "format": FORMAT,
        "model": {"path": checkpoint.model, "sha256": checkpoint.model_digest},
        "plan": checkpoint.plan,
        "world_size": checkpoint.world_size,
        "step": checkpoint.step,
        "samples": checkpoint.samples,
        "seed": checkpoint.seed,
        "optimizer": checkpoint.optimizer,
        "files": [{"name": each.name, "bytes": each.size, "sha256": each.sha256} for each in checkpoint.files],
        "parameters": [
            {
                "name": each.name,
                "trainable": each.trainable,
                "value": _tensor_form(each.value),
                "state": {name: _tensor_form(tensor) for name, tensor in each.state},
                "scalars": dict(each.scalars),
            }
            for each in checkpoint.parameters
        ],
        "random": [
            {"rank": each.rank, "device": each.device, "state": _tensor_form(each.state)} for each in checkpoint.random
        ],
    }


def _tensor_form(tensor: StoredTensor) -> dict[str, Any]:
    return {
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "blocks": [
            {
                "starts": block.box.starts,
                "stops": block.box.stops,
                "file": block.file,
                "offset": block.offset,
                "key": block.key,
            }
            for block in tensor.blocks
        ],
    }


def parsed(document: dict[str, Any]) -> Checkpoint:
    """The manifest that a JSON object says. Raises KeyError, TypeError or ValueError where it is none."""
    return Checkpoint(
        model=str(document["model"]["path"]),
        model_digest=str(document["model"]["sha256"]),
        plan=str(document["plan"]),
        world_size=int(document["world_size"]),
        step=int(document["step"]),
        samples=int(document["samples"]),
        seed=int(document["seed"]),
        optimizer=dict(document["optimizer"]),
        files=tuple(StoredFile(_plain(each["name"]), each["bytes"], each["sha256"]) for each in document["files"]),
        parameters=tuple(
            StoredParameter(
                each["name"],
                bool(each["trainable"]),
                _tensor(each["value"]),
                tuple((name, _tensor(tensor)) for name, tensor in each["state"].items()),
                tuple((name, float(value)) for name, value in each["scalars"].items()),
            )
            for each in document["parameters"]
        ),
        random=tuple(
            StoredGenerator(each["rank"], each["device"], _tensor(each["state"])) for each in document["random"]
        ),
    )


def _tensor(form: dict[str, Any]) -> StoredTensor:
    return StoredTensor(
        form["dtype"],
        tuple(form["shape"]),
        tuple(
            Block(Box(tuple(each["starts"]), tuple(each["stops"])), each["file"], each["offset"], each["key"])
            for each in form["blocks"]
        ),
    )


def _plain(name: str) -> str:
    """A file's name, if it leads nowhere else."""
    if Path(name).name != name or name == "..":
        raise ValueError(f"{name!r} is no file of the checkpoint")
    return name
