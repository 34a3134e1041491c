"""`autopipe checkpoint`: look at checkpoints, check them, export trained weights. None of it needs torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import click
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopipe.backends.torch.checkpoint import (
    MANIFEST,
    Checkpoint,
    Reader,
    StoredParameter,
    StoredTensor,
    checkpoint_path,
    committed_steps,
    numpy_type,
    read_checkpoint,
)
from autopipe.cli.options import standard_options
from autopipe.cli.output import Output, bytes_text, facts_table, plain_table
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import DType, Value
from autopipe.ir.layout import whole
from autopipe.passes.export import Numbers
from autopipe.passes.frontend.load import load


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A committed checkpoint and the folder in which it lies."""

    path: Path
    checkpoint: Checkpoint

    @property
    def bytes(self) -> int:
        """Of its files, but for the manifest."""
        return sum(file.size for file in self.checkpoint.files)


def found_paths(folder: Path, step: int | None) -> list[Path]:
    """The folders of the committed checkpoints in `folder`, oldest first; that of `step` alone where it is given.

    `folder` may also be one checkpoint's own. Raises ConfigurationError where there is none.
    """
    if (folder / MANIFEST).is_file() and step is None:
        return [folder]
    if not folder.is_dir():
        raise ConfigurationError("there is no such folder", where=str(folder))
    steps = committed_steps(folder)
    if not steps:
        raise ConfigurationError(
            "there is no committed checkpoint", hint="autopipe launch --checkpoint DIR saves them", where=str(folder)
        )
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps))
        raise ConfigurationError(f"there is no checkpoint of step {step}", hint=f"there are {known}", where=str(folder))
    return [checkpoint_path(folder, each) for each in (steps if step is None else [step])]


def newest(folder: Path, step: int | None) -> FoundCheckpoint:
    """The newest checkpoint in `folder`, or that of `step`."""
    path = found_paths(folder, step)[-1]
    return FoundCheckpoint(path, read_checkpoint(path))


_STEP = click.option("--step", type=click.IntRange(min=0), metavar="N", help="Of these steps [the newest].")


@click.group()
def checkpoint() -> None:
    """Look at checkpoints, check every byte of them, write trained weights into an ONNX file.

    DIR is the folder that `autopipe launch --checkpoint DIR` saved to.

    \b
    Example:
      autopipe checkpoint inspect ckpt
      autopipe checkpoint export ckpt -o trained.onnx
    """


@checkpoint.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@_STEP
@standard_options
def inspect(output: Output, folder: Path, step: int | None) -> None:
    """Say which checkpoints are in DIR, and what one of them holds: parameters, their shapes and shards.

    \b
    Example:
      autopipe checkpoint inspect ckpt --step 20
    """
    from autopipe.backends.torch.checkpoint import read_checkpoint

    paths = found_paths(folder, None)
    chosen = found_paths(folder, step)[-1]
    found = [FoundCheckpoint(path, read_checkpoint(path)) for path in paths]
    shown = next(each for each in found if each.path == chosen)
    output.result(as_json(found, shown), *screen(found, shown))


@checkpoint.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Of these steps alone [all].")
@standard_options
def verify(output: Output, folder: Path, step: int | None) -> None:
    """Read every byte of the checkpoints in DIR: sizes and SHA-256, and each element of each tensor stored once.

    Says which file is damaged, and ends with 5.

    \b
    Example:
      autopipe checkpoint verify ckpt
    """
    from autopipe.backends.torch.checkpoint import check_checkpoint, read_checkpoint
    from autopipe.ir.errors import LaunchError

    whole: list[FoundCheckpoint] = []
    damage: list[LaunchError] = []
    for path in found_paths(folder, step):
        try:
            found = FoundCheckpoint(path, read_checkpoint(path))
            with output.progress(f"reading {path.name}", total=found.bytes) as bar:
                check_checkpoint(path, found.checkpoint, bar.advance)
        except LaunchError as error:
            damage.append(error)
            output.line(f"{path.name}: damaged")
            continue
        whole.append(found)
        output.line(f"{step_line(found)}: whole")
    if damage:
        raise damage[0]
    output.result({"folder": folder, "whole": True, "checkpoints": [step_json(each) for each in whole]})


@checkpoint.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("-o", "--output", "target", type=click.Path(path_type=Path), required=True, help="ONNX file to write.")
@_STEP
@click.option("--model", type=click.Path(path_type=Path), metavar="FILE", help="The model [where it was trained].")
@standard_options
def export(output: Output, folder: Path, target: Path, step: int | None, model: Path | None) -> None:
    """Write the model that was trained, as it was given, with the weights of a checkpoint in DIR.

    Shards of all ranks are put together a piece at a time. Weights of more than 1.5 GiB lie in a second file beside
    the model's, FILE.data.

    \b
    Example:
      autopipe checkpoint export ckpt -o trained.onnx
    """
    from autopipe.backends.torch.checkpoint import check_checkpoint
    from autopipe.cli.output import bytes_text, check_writable
    from autopipe.passes.export import write_trained

    found = newest(folder, step)
    check_writable(target)
    path = model_of(found, model)
    with output.progress("reading", total=found.bytes) as bar:
        check_checkpoint(found.path, found.checkpoint, bar.advance)
    numbers = numbers_of(found)
    with output.progress("writing", total=sum(each.value.bytes for each in numbers.values())) as bar:
        written = write_trained(path, target, numbers, bar.advance)
    data = {
        "path": target,
        "files": written.files,
        "model": path,
        "step": found.checkpoint.step,
        "parameters": len(numbers),
        "replaced": written.replaced,
        "added": written.added,
        "bytes": written.bytes,
    }
    beside = f" and {written.files[1].name}" if len(written.files) > 1 else ""
    output.result(
        data,
        f"{target}{beside}: {len(numbers)} parameters after {found.checkpoint.step} steps,"
        f" {bytes_text(written.bytes)} of weights",
    )


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
    about = facts_table()
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
    table = plain_table("parameter", "type and shape", "shards", "optimizer's state")
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
