"""`autopipe checkpoint`: shows checkpoints, verifies them, and exports trained weights. It does not
import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import RenderableType
from rich.text import Text

from autopipe.backends.torch.checkpoint import (
    AVERAGE,
    MANIFEST,
    Checkpoint,
    Reader,
    StoredTensor,
    check_checkpoint,
    checkpoint_path,
    committed_steps,
    numpy_type,
    read_checkpoint,
)
from autopipe.cli.options import FORCE, PATH, standard_options
from autopipe.cli.output import Output, facts_table, plain_table
from autopipe.configs.yaml_source import BYTES
from autopipe.ir.errors import ConfigurationError, LaunchError
from autopipe.ir.graph import DType, Value
from autopipe.ir.layout import full_slice
from autopipe.ir.output_kinds import ONNX, SAFETENSORS, SAFETENSORS_INDEX, OutputFile
from autopipe.ir.words import bytes_text, list_first, plural

if TYPE_CHECKING:
    from autopipe.passes.export import Numbers
    from autopipe.passes.module_state import ModuleState
    from autopipe.passes.weight_files import MatchedWeights

_FOLDER = click.argument("folder", metavar="DIR", type=PATH)
_STEP = click.option(
    "--step", type=click.IntRange(min=0), metavar="N", help="Of these steps [the newest]."
)
_MOST = 60
"""Maximum number of parameters listed. Further ones are only counted."""
_LISTED = 5
"""Maximum number of names in a message. Further ones are only counted."""
_DIGITS = 12
"""Number of characters of a digest that are shown to distinguish plans."""


# ParamType has no type argument at run time in the oldest click that is supported.
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


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    path: Path
    checkpoint: Checkpoint

    @property
    def bytes(self) -> int:
        """Size of the files of the checkpoint in bytes, without the manifest."""
        return sum(file.size for file in self.checkpoint.files)

    def __str__(self) -> str:
        held = self.checkpoint
        ranks = (
            "1 rank"
            if held.world_size == 1
            else f"{held.world_size} {plural(held.world_size, 'rank')}"
        )
        return (
            f"step {held.step}: {held.samples:,} {plural(held.samples, 'sample')}, {ranks}, "
            f"{bytes_text(self.bytes)}"
        )

    def form(self) -> dict[str, object]:
        """Return the properties of the checkpoint, without its parameters, for JSON output."""
        facts = {name: getattr(self.checkpoint, name) for name in ("step", "samples", "world_size")}
        return {
            "path": self.path,
            **facts,
            "files": len(self.checkpoint.files),
            "bytes": self.bytes,
        }


def found_paths(folder: Path, step: int | None) -> list[Path]:
    """Return the folders of the committed checkpoints in `folder`, the oldest first, or only that
    of `step`. `folder` may also be a checkpoint itself. Raise ConfigurationError if there is none.
    """
    if (folder / MANIFEST).is_file() and step is None:
        return [folder]
    if not folder.is_dir():
        raise ConfigurationError("there is no such folder", where=str(folder))
    steps = committed_steps(folder)
    if not steps:
        hint = "autopipe launch --checkpoint DIR saves them"
        raise ConfigurationError("there is no committed checkpoint", hint=hint, where=str(folder))
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps))
        raise ConfigurationError(
            f"there is no checkpoint of step {step}", hint=f"there are {known}", where=str(folder)
        )
    return [checkpoint_path(folder, each) for each in (steps if step is None else [step])]


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
@_FOLDER
@_STEP
@standard_options
def inspect(output: Output, folder: Path, step: int | None) -> None:
    """Say which checkpoints are in DIR, and what one of them holds: parameters, their shapes and
    shards.

    \b
    Example:
      autopipe checkpoint inspect ckpt --step 20
    """
    paths = found_paths(folder, None)
    chosen = found_paths(folder, step)[-1]
    found = [FoundCheckpoint(path, read_checkpoint(path)) for path in paths]
    one = next(each for each in found if each.path == chosen)
    output.result(as_json(found, one), *screen(found, one.checkpoint))


@checkpoint.command()
@_FOLDER
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Of these steps alone [all].")
@standard_options
def verify(output: Output, folder: Path, step: int | None) -> None:
    """Read every byte of the checkpoints in DIR: sizes and SHA-256, and each element of each tensor
    stored once.

    Says which file is damaged, and ends with 5.

    \b
    Example:
      autopipe checkpoint verify ckpt
    """
    intact: list[FoundCheckpoint] = []
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
        intact.append(found)
        output.line(f"{found}: whole")
    if damage:
        raise damage[0]
    output.result(
        {"folder": folder, "whole": True, "checkpoints": [each.form() for each in intact]}
    )


@checkpoint.command()
@_FOLDER
@click.option(
    "-o", "--output", "target", type=PATH, required=True, help="ONNX or safetensors file to write."
)
@_STEP
@click.option("--model", type=PATH, metavar="FILE", help="The model [where it was trained].")
@click.option(
    "--ema", is_flag=True, help="The averages of the weights (training.ema_decay) in their place."
)
@click.option(
    "--max-shard-size",
    type=SizeType(),
    metavar="SIZE",
    help="Bytes of a .safetensors file, such as 5GB.",
)
@FORCE
@standard_options
def export(
    output: Output,
    folder: Path,
    target: Path,
    step: int | None,
    model: Path | None,
    ema: bool,
    max_shard_size: int | None,
    force: bool,
) -> None:
    """Write the model that was trained, as it was given, with the weights of a checkpoint in DIR;
    or, to a file whose name ends in .safetensors, the weights alone, by the names and in the
    layouts of the module.

    Shards of all ranks are put together a piece at a time. Weights of more than 1.5 GiB lie in a
    second file beside the model's, FILE.data. With --max-shard-size, weights that do not fit in
    FILE.safetensors are written to files of at most that size and an index,
    FILE.safetensors.index.json, as Hugging Face's libraries do.

    \b
    Example:
      autopipe checkpoint export ckpt -o trained.onnx
      autopipe checkpoint export ckpt -o trained.safetensors
    """
    from autopipe.passes.export import Numbers, write_trained
    from autopipe.passes.module_state import counters_of, module_state
    from autopipe.passes.safetensors_files import is_safetensors

    chosen = found_paths(folder, step)[-1]
    held = read_checkpoint(chosen)
    if ema and not any(AVERAGE in dict(each.state) for each in held.parameters):
        hint = "plan with training.ema_decay, or leave out --ema"
        raise ConfigurationError(
            "the checkpoint holds no averages of weights", hint=hint, where=str(chosen)
        )
    weights_alone = is_safetensors(target)
    if max_shard_size is not None and not weights_alone:
        raise ConfigurationError(
            "--max-shard-size is for weights alone", "name a file that ends in .safetensors"
        )
    path = _model_of(held, model)
    if not weights_alone:
        OutputFile(target, ONNX, (chosen, path), force).check()
    with output.progress("reading", total=sum(file.size for file in held.files)) as bar:
        check_checkpoint(chosen, held, bar.advance)
    reader = Reader(chosen, held)
    numbers: dict[str, Numbers] = {}
    for each in held.parameters:
        value = Value(each.name, DType(each.value.dtype), each.value.shape)
        tensor = dict(each.state).get(AVERAGE, each.value) if ema else each.value
        numbers[each.name] = Numbers(value, partial(reader.read, tensor))
    if weights_alone:
        trainable = {each.name for each in held.parameters if each.trainable}
        state = module_state(path, numbers, trainable, held.forwards)
        sharded = ShardedOutput(target, max_shard_size, (chosen, path), force)
        _write_weights(output, sharded, state, held.step)
        return
    numbers |= counters_of(path, held.forwards)
    size = sum(each.value.bytes for each in numbers.values())
    with output.progress("writing", total=size) as bar:
        written = write_trained(path, target, numbers, bar.advance, force=force)
    told = {name: getattr(written, name) for name in ("replaced", "added", "bytes")}
    facts = {"files": written.files, "model": path, "step": held.step, "parameters": len(numbers)}
    beside = f" and {written.files[1].name}" if len(written.files) > 1 else ""
    what = (
        f"{len(numbers)} {plural(len(numbers), 'parameter')} after {held.step} "
        f"{plural(held.step, 'step')}, {bytes_text(written.bytes)} of weights"
    )
    output.report({"path": target, **facts, **told}, f"{target}{beside}: {what}")


@dataclass(frozen=True, slots=True)
class ShardedOutput:
    """Destination of exported weights: one safetensors file, or several files of at most `most`
    bytes with an index.
    """

    target: Path
    most: int | None
    inputs: tuple[Path, ...]
    force: bool


def _write_weights(output: Output, sharded: ShardedOutput, state: ModuleState, step: int) -> None:
    from autopipe.passes.safetensors_files import (
        INDEX_SUFFIX,
        safetensors_paths,
        shards_of,
        write_safetensors,
    )

    tensors = state.tensors
    paths = safetensors_paths(sharded.target, len(shards_of(tensors, sharded.most)))
    for path in paths:
        kind = SAFETENSORS_INDEX if path.name.endswith(INDEX_SUFFIX) else SAFETENSORS
        OutputFile(path, kind, sharded.inputs, sharded.force).check()
    with output.progress("writing", total=sum(each.value.bytes for each in tensors)) as bar:
        files, size = write_safetensors(sharded.target, tensors, bar.advance, sharded.most)
    facts = {
        "path": files[-1],
        "files": files,
        "step": step,
        "parameters": len(tensors),
        "bytes": size,
    }
    facts |= {"absent": state.absent, "others": state.others}
    if state.absent:
        output.note(
            f"not written, as the model's file holds no tensor of these names of the module: "
            f"{_listed(state.absent)}; load_state_dict needs strict=False"
        )
    if state.others:
        output.note(f"written, but no part of the module's state_dict: {_listed(state.others)}")
    shards = f" in {len(files) - 1} {plural(len(files) - 1, 'file')}" if len(files) > 1 else ""
    output.report(
        facts,
        f"{files[-1]}: {len(tensors)} {plural(len(tensors), 'tensor')} after "
        f"{step} {plural(step, 'step')}, {bytes_text(size)}{shards}",
    )


def _listed(names: Sequence[str]) -> str:
    """Return the first names, quoted, and the number of further names."""
    return list_first([repr(name) for name in names], _LISTED)


@checkpoint.command(name="import")
@click.argument("weights", metavar="FILE", type=PATH)
@click.option(
    "--model",
    type=PATH,
    required=True,
    metavar="MODEL",
    help="The ONNX file whose weights they become.",
)
@click.option("-o", "--output", "target", type=PATH, required=True, help="ONNX file to write.")
@click.option(
    "--partial", is_flag=True, help="Leave out tensors that only one of FILE and MODEL has."
)
@FORCE
@standard_options
def import_weights(
    output: Output, weights: Path, model: Path, target: Path, partial: bool, force: bool
) -> None:
    """Write MODEL with the weights of FILE, matched by the names of the module's parameters, in the
    module's layouts.

    FILE is a safetensors file, the index of several (model.safetensors.index.json), or an ONNX
    file. A tensor that only one of FILE and MODEL has is an error without --partial; with it,
    MODEL's parameter keeps its own weights.

    \b
    Example:
      autopipe checkpoint import trained.safetensors --model gpt.onnx -o started.onnx
    """
    from autopipe.passes.export import write_trained
    from autopipe.passes.weight_files import matched_weights

    OutputFile(target, ONNX, (weights, model), force).check()
    matched = matched_weights(weights, model)
    if not matched.numbers or ((matched.missing or matched.unused) and not partial):
        raise ConfigurationError(*_unmatched(matched, weights, model))
    if matched.missing:
        count = len(matched.missing)
        output.note(
            f"{count} {plural(count, 'parameter')} of {model} keep their weights, the first is "
            f"{matched.missing[0]!r}"
        )
    if matched.kept:
        output.note(
            f"no part of the module's state_dict, and keep their weights: {_listed(matched.kept)}"
        )
    if matched.unused:
        output.note(
            f"{len(matched.unused)} {plural(len(matched.unused), 'tensor is', 'tensors are')} "
            f"not in {model}, the first is {matched.unused[0]!r}"
        )
    if matched.passed_over:
        named = repr(matched.passed_over[0])
        output.note(
            f"{len(matched.passed_over)} {plural(len(matched.passed_over), 'tensor')} "
            f"of which {model} needs nothing, the first is {named}"
        )
    with output.progress(
        "writing", total=sum(each.value.bytes for each in matched.numbers.values())
    ) as bar:
        written = write_trained(model, target, matched.numbers, bar.advance, force=force)
    facts = {"path": target, "files": written.files, "parameters": len(matched.numbers)}
    told = (
        f"{target}: {len(matched.numbers)} {plural(len(matched.numbers), 'parameter')} from "
        f"{weights}"
    )
    output.report(facts | {"missing": matched.missing, "unused": matched.unused}, told)


def _unmatched(matched: MatchedWeights, weights: Path, model: Path) -> tuple[str, str]:
    """Return the message and the hint of the error that the checkpoint file or the model has
    tensors that the other one lacks.
    """
    parts = []
    if matched.missing:
        count = (
            f"{len(matched.missing)} of {len(matched.missing) + len(matched.numbers)} "
            f"{plural(len(matched.missing) + len(matched.numbers), 'parameter')}"
        )
        parts.append(f"{weights} lacks {count}, the first is {matched.missing[0]!r}")
    if matched.unused:
        count = f"{len(matched.unused)} of the tensors of {weights}"
        parts.append(f"{model} lacks {count}, the first is {matched.unused[0]!r}")
    if not parts:
        parts.append(f"{weights} and {model} have no tensor in common")
    hint = (
        "--partial leaves out what only one side has"
        if matched.numbers
        else "autopipe inspect -v lists the model's"
    )
    return "; ".join(parts), hint


def _model_of(held: Checkpoint, model: Path | None) -> Path:
    """Return the ONNX file that was trained: `model`, or the file that the checkpoint names. Raise
    ConfigurationError if it does not exist or is another model.
    """
    from autopipe.passes.frontend.load import load
    from autopipe.passes.weight_files import are_one_model

    trained = Path(held.model)
    path = trained if model is None else model
    if not path.is_file():
        hint = "give it with --model FILE" if model is None else ""
        raise ConfigurationError(
            "the model that was trained is not there", hint=hint, where=str(path)
        )
    if (given := load(path)).digest != held.model_digest:
        source = load(trained) if trained.is_file() else given
        if source.digest == held.model_digest and are_one_model(source, given):
            return path
        message = "this is not the model that the checkpoint was trained from"
        hint = (
            "give the file that was planned with --model FILE; weights may differ, and an export "
            "for evaluation where "
        )
        hint += f"{trained} is there too"
        raise ConfigurationError(message, hint, str(path))
    return path


def as_json(found: Sequence[FoundCheckpoint], one: FoundCheckpoint) -> dict[str, object]:
    held = one.checkpoint
    return {
        "checkpoints": [each.form() for each in found],
        **one.form(),
        "model": {"path": held.model, "sha256": held.model_digest},
        "plan": held.plan,
        "seed": held.seed,
        "optimizer": held.optimizer,
        "parameters": [
            {
                "name": each.name,
                "dtype": each.value.dtype,
                "shape": each.value.shape,
                "trainable": each.trainable,
                "bytes": _bytes(each.value),
                "state": {
                    name: {"dtype": state.dtype, "bytes": _bytes(state)}
                    for name, state in each.state
                },
                "shards": [
                    {
                        "starts": block.box.starts,
                        "stops": block.box.stops,
                        "file": held.files[block.file].name,
                    }
                    for block in each.value.blocks
                ],
            }
            for each in held.parameters
        ],
    }


def screen(found: Sequence[FoundCheckpoint], held: Checkpoint) -> Iterator[RenderableType]:
    yield from (Text(str(each)) for each in found)
    values = sum(_bytes(each.value) for each in held.parameters)
    state = sum(_bytes(tensor) for each in held.parameters for _, tensor in each.state)
    elements = sum(full_slice(each.value.shape).elements for each in held.parameters)
    total = (
        f"{elements:,} in {len(held.parameters):,} {plural(len(held.parameters), 'tensor')}, "
        f"{bytes_text(values)}"
    )
    about = facts_table()
    facts = {
        "of step": held.step,
        "model": held.model,
        "plan": held.plan[:_DIGITS],
        "seed": held.seed,
        "optimizer": " ".join(f"{key}={value}" for key, value in held.optimizer.items()),
        "parameters": total + (f"; the optimizer's state, {bytes_text(state)}" if state else ""),
    }
    for name, fact in facts.items():
        about.add_row(name, Text(str(fact)))
    table = plain_table("parameter", "type and shape", "shards", "optimizer's state")
    for each in held.parameters[:_MOST]:
        kept = ", ".join(name for name, _ in each.state)
        size = bytes_text(sum(_bytes(tensor) for _, tensor in each.state))
        table.add_row(
            Text(each.name),
            f"{each.value.dtype}{list(each.value.shape)}",
            str(len(each.value.blocks)),
            f"{kept} ({size})" if kept else "" if each.trainable else "not trained",
        )
    yield from (Text(""), about, Text(""), table)
    left = len(held.parameters) - _MOST
    if left > 0:
        yield Text(f"and {left} more; --json lists all")


def _bytes(tensor: StoredTensor) -> int:
    return full_slice(tensor.shape).elements * numpy_type(tensor.dtype).itemsize
