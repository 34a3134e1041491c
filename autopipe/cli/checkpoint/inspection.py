"""Contents of checkpoints, for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopipe.backends.torch.checkpoint.format import Checkpoint, StoredParameter, StoredTensor, numpy_type
from autopipe.cli.checkpoint.chosen import FoundCheckpoint
from autopipe.cli.figures import bytes_text
from autopipe.ir.layout import whole

SHOWN: Final = 60
"""Parameters listed before the rest is only counted."""
DIGITS: Final = 12
"""Characters of a digest that tell plans apart."""


def step_json(found: FoundCheckpoint) -> dict[str, object]:
    """A checkpoint without its parameters."""
    checkpoint = found.checkpoint
    return {
        "path": found.path,
        "step": checkpoint.step,
        "samples": checkpoint.samples,
        "world_size": checkpoint.world_size,
        "files": len(checkpoint.files),
        "bytes": found.bytes,
    }


def step_line(found: FoundCheckpoint) -> str:
    """The same in a line."""
    checkpoint = found.checkpoint
    ranks = "1 rank" if checkpoint.world_size == 1 else f"{checkpoint.world_size} ranks"
    return f"step {checkpoint.step}: {checkpoint.samples:,} samples, {ranks}, {bytes_text(found.bytes)}"


def as_json(all_found: Sequence[FoundCheckpoint], shown: FoundCheckpoint) -> dict[str, object]:
    """All checkpoints of a folder, and everything of the one that is shown."""
    checkpoint = shown.checkpoint
    return {
        "checkpoints": [step_json(each) for each in all_found],
        **step_json(shown),
        "model": {"path": checkpoint.model, "sha256": checkpoint.model_digest},
        "plan": checkpoint.plan,
        "seed": checkpoint.seed,
        "optimizer": checkpoint.optimizer,
        "parameters": [_parameter_json(each, checkpoint) for each in checkpoint.parameters],
    }


def _parameter_json(parameter: StoredParameter, checkpoint: Checkpoint) -> dict[str, object]:
    return {
        "name": parameter.name,
        "dtype": parameter.value.dtype,
        "shape": parameter.value.shape,
        "trainable": parameter.trainable,
        "bytes": _bytes(parameter.value),
        "state": {name: {"dtype": each.dtype, "bytes": _bytes(each)} for name, each in parameter.state},
        "shards": [
            {"starts": block.box.starts, "stops": block.box.stops, "file": checkpoint.files[block.file].name}
            for block in parameter.value.blocks
        ],
    }


def screen(all_found: Sequence[FoundCheckpoint], shown: FoundCheckpoint) -> Iterator[RenderableType]:
    """The checkpoints, a line each, and the one that is shown."""
    for each in all_found:
        yield Text(step_line(each))
    checkpoint = shown.checkpoint
    about = Table(box=None, show_header=False, pad_edge=False)
    about.add_column(style="bold", no_wrap=True)
    about.add_column(overflow="fold")
    for name, text in (
        ("of step", str(checkpoint.step)),
        ("model", checkpoint.model),
        ("plan", checkpoint.plan[:DIGITS]),
        ("seed", str(checkpoint.seed)),
        ("optimizer", " ".join(f"{key}={value}" for key, value in checkpoint.optimizer.items())),
        ("parameters", _total(checkpoint)),
    ):
        about.add_row(name, Text(text))
    yield Text("")
    yield about
    yield Text("")
    yield _parameters(checkpoint)
    left = len(checkpoint.parameters) - SHOWN
    if left > 0:
        yield Text(f"and {left} more; --json lists all")


def _parameters(checkpoint: Checkpoint) -> Table:
    table = Table("parameter", "type and shape", "shards", "optimizer's state", box=None, pad_edge=False)
    for each in checkpoint.parameters[:SHOWN]:
        state = sum(_bytes(tensor) for _, tensor in each.state)
        kept = ", ".join(name for name, _ in each.state)
        table.add_row(
            Text(each.name),
            f"{each.value.dtype}{list(each.value.shape)}",
            str(len(each.value.blocks)),
            f"{kept} ({bytes_text(state)})" if kept else "" if each.trainable else "not trained",
        )
    return table


def _total(checkpoint: Checkpoint) -> str:
    values = sum(_bytes(each.value) for each in checkpoint.parameters)
    state = sum(_bytes(tensor) for each in checkpoint.parameters for _, tensor in each.state)
    elements = sum(whole(each.value.shape).elements for each in checkpoint.parameters)
    text = f"{elements:,} in {len(checkpoint.parameters):,} tensors, {bytes_text(values)}"
    return text + (f"; the optimizer's state, {bytes_text(state)}" if state else "")


def _bytes(tensor: StoredTensor) -> int:
    return whole(tensor.shape).elements * numpy_type(tensor.dtype).itemsize
