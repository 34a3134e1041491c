"""`autopipe checkpoint`: shows checkpoints, verifies them, and exports trained weights. It does not
import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import RenderableType
from rich.text import Text

from autopipe.api.checkpoints import (
    ExportedTensors,
    ExportSettings,
    FoundCheckpoint,
    checkpoints_data,
    export_weights,
    found_paths,
    import_weights,
    names_text,
    tensor_bytes,
    verify_checkpoint,
)
from autopipe.backends.torch.checkpoint import Checkpoint, read_checkpoint
from autopipe.cli.options import FORCE, PATH, standard_options
from autopipe.cli.output import Output, facts_table, plain_table
from autopipe.configs.yaml_source import BYTES
from autopipe.ir.errors import LaunchError
from autopipe.ir.layout import full_slice
from autopipe.ir.words import bytes_text, plural

_FOLDER_ARGUMENT = click.argument("folder", metavar="DIR", type=PATH)
_STEP_OPTION = click.option(
    "--step",
    type=click.IntRange(min=0),
    metavar="N",
    help="Number of completed steps of the checkpoint [the newest].",
)
_MAX_LISTED_PARAMETERS = 60
"""Maximum number of parameters listed. Further ones are only counted."""
_DIGEST_CHARACTERS = 12
"""Number of characters of a digest that are shown to distinguish plans."""


# In the oldest supported click, `ParamType` is not generic at run time, so `ParamType[int]` is
# evaluated by type checkers only.
if TYPE_CHECKING:
    _IntegerType = click.ParamType[int]
else:
    _IntegerType = click.ParamType


class SizeType(_IntegerType):
    """A size in bytes with a unit, for example 5GB or 512MiB, as in the YAML files."""

    name = "size"

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        size = BYTES.parse(str(value))
        if size is None or size < 1:
            self.fail(f"{value!r} is no {BYTES.noun} such as 5GB", parameter, context)
        return int(size)


@click.group()
def checkpoint() -> None:
    """Show and check checkpoints, and export and import trained weights.

    DIR is the folder that `autopipe launch --checkpoint DIR` wrote.

    \b
    Example:
      autopipe checkpoint inspect ckpt
      autopipe checkpoint export ckpt -o trained.onnx
    """


@checkpoint.command()
@_FOLDER_ARGUMENT
@_STEP_OPTION
@standard_options
def inspect(output: Output, folder: Path, step: int | None) -> None:
    """List the checkpoints in DIR, and the parameters of one of them with their shapes and shards.

    \b
    Example:
      autopipe checkpoint inspect ckpt --step 20
    """
    paths = found_paths(folder, None)
    chosen = found_paths(folder, step)[-1]
    found = [FoundCheckpoint(path, read_checkpoint(path)) for path in paths]
    one = next(each for each in found if each.path == chosen)
    output.result(checkpoints_data(found, one), *checkpoints_screen(found, one.checkpoint))


@checkpoint.command()
@_FOLDER_ARGUMENT
@click.option(
    "--step",
    type=click.IntRange(min=0),
    metavar="N",
    help="Check only the checkpoint after N completed steps [all checkpoints].",
)
@standard_options
def verify(output: Output, folder: Path, step: int | None) -> None:
    """Check all files of the checkpoints in DIR: their sizes and SHA-256 digests, and that each
    element of each tensor is stored once.

    If a file is damaged, the command names it and returns the exit code 5.

    \b
    Example:
      autopipe checkpoint verify ckpt
    """
    intact: list[FoundCheckpoint] = []
    damage: list[LaunchError] = []
    for path in found_paths(folder, step):
        try:
            found = verify_checkpoint(path, output)
        except LaunchError as error:
            damage.append(error)
            output.line(f"{path.name}: damaged")
            continue
        intact.append(found)
        output.line(f"{_checkpoint_text(found)}: whole")
    if damage:
        raise damage[0]
    output.result({"folder": folder, "whole": True, "checkpoints": [each.data for each in intact]})


@checkpoint.command()
@_FOLDER_ARGUMENT
@click.option(
    "-o", "--output", "target", type=PATH, required=True, help="ONNX or safetensors file to write."
)
@_STEP_OPTION
@click.option(
    "--model",
    type=PATH,
    metavar="FILE",
    help="Path of the original ONNX file [as during training].",
)
@click.option(
    "--ema", is_flag=True, help="Write the moving averages of the weights (training.ema_decay)."
)
@click.option(
    "--max-shard-size",
    type=SizeType(),
    metavar="SIZE",
    help="Maximum size of a .safetensors file, such as 5GB.",
)
@FORCE
@standard_options
def export(output: Output, /, folder: Path, target: Path, **values: Any) -> None:
    """Write the original model with the weights of a checkpoint in DIR. If the name of the output
    ends in .safetensors, write only the weights, with the names and layouts of the PyTorch module.

    The shards of all ranks are joined in pieces, so memory for the whole model is not needed.
    Weights of more than 1.5 GiB are written to a second file, FILE.data. With --max-shard-size,
    weights that do not fit in FILE.safetensors are written to several files of at most this size
    and an index, FILE.safetensors.index.json, as in Hugging Face's libraries.

    \b
    Example:
      autopipe checkpoint export ckpt -o trained.onnx
      autopipe checkpoint export ckpt -o trained.safetensors
    """
    found = export_weights(folder, target, ExportSettings(**values), output)
    if isinstance(found, ExportedTensors):
        _report_tensors(found, output)
        return
    beside = f" and {found.files[1].name}" if len(found.files) > 1 else ""
    what = (
        f"{found.parameters} {plural(found.parameters, 'parameter')} after {found.step} "
        f"{plural(found.step, 'step')}, {bytes_text(found.bytes)} of weights"
    )
    names = ("path", "files", "model", "step", "parameters", "replaced", "added", "bytes")
    data = {name: getattr(found, name) for name in names}
    output.report(data, f"{target}{beside}: {what}")


def _report_tensors(found: ExportedTensors, output: Output) -> None:
    """Print the files with trained tensors, and the names that the module does not expect."""
    if found.absent:
        output.note(
            f"not written, as the model's file holds no tensor of these names of the module: "
            f"{names_text(found.absent)}; load_state_dict needs strict=False"
        )
    if found.others:
        output.note(f"written, but no part of the module's state_dict: {names_text(found.others)}")
    files = found.files
    shards = f" in {len(files) - 1} {plural(len(files) - 1, 'file')}" if len(files) > 1 else ""
    names = ("files", "step", "parameters", "bytes", "absent", "others")
    output.report(
        {"path": files[-1], **{name: getattr(found, name) for name in names}},
        f"{files[-1]}: {found.parameters} {plural(found.parameters, 'tensor')} after "
        f"{found.step} {plural(found.step, 'step')}, {bytes_text(found.bytes)}{shards}",
    )


@checkpoint.command(name="import")
@click.argument("weights", metavar="FILE", type=PATH)
@click.option(
    "--model",
    type=PATH,
    required=True,
    metavar="MODEL",
    help="ONNX file that receives the weights.",
)
@click.option("-o", "--output", "target", type=PATH, required=True, help="ONNX file to write.")
@click.option(
    "--partial", is_flag=True, help="Ignore tensors that exist only in FILE or only in MODEL."
)
@FORCE
@standard_options
def import_command(
    output: Output, weights: Path, model: Path, target: Path, partial: bool, force: bool
) -> None:
    """Write a copy of MODEL with the weights of FILE. The names and layouts of the
    tensors in FILE are those of the parameters of the PyTorch module.

    FILE is a safetensors file, the index of several safetensors files
    (model.safetensors.index.json), or an ONNX file. A tensor that exists only in FILE or only in
    MODEL is an error. With --partial, such tensors are ignored, and MODEL keeps its own weights.

    \b
    Example:
      autopipe checkpoint import trained.safetensors --model gpt.onnx -o started.onnx
    """
    found = import_weights(weights, model, target, is_partial=partial, force=force, events=output)
    names = ("path", "files", "parameters", "missing", "unused")
    output.report(
        {name: getattr(found, name) for name in names},
        f"{target}: {found.parameters} {plural(found.parameters, 'parameter')} from {weights}",
    )


def _checkpoint_text(found: FoundCheckpoint) -> str:
    held = found.checkpoint
    ranks = (
        "1 rank" if held.world_size == 1 else f"{held.world_size} {plural(held.world_size, 'rank')}"
    )
    return (
        f"step {held.step}: {held.samples:,} {plural(held.samples, 'sample')}, {ranks}, "
        f"{bytes_text(found.bytes)}"
    )


def checkpoints_screen(
    found: Sequence[FoundCheckpoint], held: Checkpoint
) -> Iterator[RenderableType]:
    yield from (Text(_checkpoint_text(each)) for each in found)
    values = sum(tensor_bytes(each.value) for each in held.parameters)
    state = sum(tensor_bytes(tensor) for each in held.parameters for _, tensor in each.state)
    elements = sum(full_slice(each.value.shape).elements for each in held.parameters)
    total = (
        f"{elements:,} in {len(held.parameters):,} {plural(len(held.parameters), 'tensor')}, "
        f"{bytes_text(values)}"
    )
    about = facts_table()
    facts = {
        "of step": held.step,
        "model": held.model,
        "plan": held.plan[:_DIGEST_CHARACTERS],
        "seed": held.seed,
        "optimizer": " ".join(f"{key}={value}" for key, value in held.optimizer.items()),
        "parameters": total + (f"; the optimizer's state, {bytes_text(state)}" if state else ""),
    }
    for name, fact in facts.items():
        about.add_row(name, Text(str(fact)))
    table = plain_table("parameter", "type and shape", "shards", "optimizer's state")
    for each in held.parameters[:_MAX_LISTED_PARAMETERS]:
        kept = ", ".join(name for name, _ in each.state)
        size = bytes_text(sum(tensor_bytes(tensor) for _, tensor in each.state))
        table.add_row(
            Text(each.name),
            f"{each.value.dtype}{list(each.value.shape)}",
            str(len(each.value.blocks)),
            f"{kept} ({size})" if kept else "" if each.trainable else "not trained",
        )
    yield from (Text(""), about, Text(""), table)
    left = len(held.parameters) - _MAX_LISTED_PARAMETERS
    if left > 0:
        yield Text(f"and {left} more; --json lists all")
