"""From a checkpoint to what an export needs: the model's file, and each parameter's numbers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from autopipe.backends.torch.checkpoint.read import Reader
from autopipe.cli.checkpoint.chosen import FoundCheckpoint
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import DType, Value
from autopipe.passes.export import Numbers
from autopipe.passes.frontend.load import load


def model_of(found: FoundCheckpoint, model: Path | None) -> Path:
    """The ONNX file that was trained: `model`, or the one that the checkpoint names.

    Raises ConfigurationError where it is not there, or is another model.
    """
    path = Path(found.checkpoint.model) if model is None else model
    if not path.is_file():
        hint = "give it with --model FILE" if model is None else ""
        raise ConfigurationError("the model that was trained is not there", hint=hint, where=str(path))
    if load(path).digest != found.checkpoint.model_digest:
        raise ConfigurationError(
            "this is not the model that the checkpoint was trained from",
            hint="give the very file that was planned with --model FILE; only its weights may differ",
            where=str(path),
        )
    return path


def numbers_of(found: FoundCheckpoint) -> dict[str, Numbers]:
    """Each parameter's trained numbers, by name."""
    reader = Reader(found.path, found.checkpoint)
    return {
        each.name: Numbers(
            Value(each.name, DType(each.value.dtype), each.value.shape),
            partial(reader.read, each.value),
        )
        for each in found.checkpoint.parameters
    }
