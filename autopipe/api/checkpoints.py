"""Command `checkpoint`: find and verify checkpoints, export trained weights, and import weights
into a model. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from autopipe.api.events import Events, SilentEvents
from autopipe.backends.torch.checkpoint import (
    AVERAGE_STATE,
    MANIFEST_FILE,
    Checkpoint,
    CheckpointReader,
    StoredTensor,
    check_checkpoint,
    checkpoint_path,
    committed_steps,
    numpy_type,
    read_checkpoint,
)
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import DType, Value
from autopipe.ir.layout import full_slice
from autopipe.ir.output_kinds import ONNX, SAFETENSORS, SAFETENSORS_INDEX, OutputFile
from autopipe.ir.words import join_first, plural

if TYPE_CHECKING:
    from autopipe.passes.export import TensorData
    from autopipe.passes.module_state import ModuleState
    from autopipe.passes.weight_files import MatchedWeights

_LISTED = 5
"""Maximum number of names in a message. Further ones are only counted."""


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A committed checkpoint and its manifest."""

    path: Path
    checkpoint: Checkpoint

    @property
    def bytes(self) -> int:
        """Size of the files of the checkpoint in bytes, without the manifest."""
        return sum(file.size for file in self.checkpoint.files)

    @property
    def data(self) -> dict[str, object]:
        """The properties of the checkpoint, without its parameters, for JSON output."""
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
    if (folder / MANIFEST_FILE).is_file() and step is None:
        return [folder]
    if not folder.is_dir():
        raise ConfigurationError("the checkpoint folder does not exist", where=str(folder))
    steps = committed_steps(folder)
    if not steps:
        hint = "write checkpoints with autopipe launch --checkpoint DIR"
        raise ConfigurationError(
            "the folder contains no complete checkpoint", hint=hint, where=str(folder)
        )
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps))
        raise ConfigurationError(
            f"the folder contains no checkpoint of step {step}",
            hint=f"use one of {known}",
            where=str(folder),
        )
    return [checkpoint_path(folder, each) for each in (steps if step is None else [step])]


def verify_checkpoint(path: Path, events: Events | None = None) -> FoundCheckpoint:
    """Read every byte of the checkpoint in the folder `path`, and return the checkpoint. Raises
    LaunchError if a file is damaged.
    """
    found = FoundCheckpoint(path, read_checkpoint(path))
    with (events or SilentEvents()).progress(f"reading {path.name}", total=found.bytes) as bar:
        check_checkpoint(path, found.checkpoint, bar.advance)
    return found


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """The settings of an export of trained weights."""

    step: int | None = None
    """Step of the checkpoint, None for the newest."""
    model: Path | None = None
    """The ONNX file that was trained, if it is not where it was trained."""
    ema: bool = False
    """True to write the averages of the weights in place of the weights."""
    max_shard_size: int | None = None
    """Maximum number of bytes of a safetensors file, None for one file."""
    force: bool = False


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """An ONNX file with trained weights."""

    path: Path
    files: tuple[Path, ...]
    model: Path
    """The ONNX file that was trained."""
    step: int
    parameters: int
    replaced: int
    """Number of tensors of the file with new values."""
    added: int
    """Number of tensors that the file lacked."""
    bytes: int


@dataclass(frozen=True, slots=True)
class ExportedTensors:
    """Trained weights in safetensors files."""

    files: tuple[Path, ...]
    """If there are several files, the last one is the index."""
    step: int
    parameters: int
    bytes: int
    absent: tuple[str, ...]
    """Entries of the module's `state_dict` for which the ONNX file has no tensor."""
    others: tuple[str, ...]
    """Written tensors that are no entries of the module's `state_dict`."""


def export_weights(
    folder: Path, target: Path, settings: ExportSettings, events: Events | None = None
) -> ExportedModel | ExportedTensors:
    """Write the weights of a checkpoint in `folder` to `target`: the tensors alone if its name ends
    in .safetensors, otherwise the ONNX file that was trained, with the weights.

    Raises ConfigurationError if there is no such checkpoint, if the ONNX file is missing or is
    another model, or if a file cannot be written, and LaunchError if the checkpoint is damaged.
    """
    from autopipe.passes.export import TensorData, write_trained
    from autopipe.passes.module_state import batch_counters_of_file, module_state
    from autopipe.passes.safetensors_files import is_safetensors

    events = events or SilentEvents()
    chosen = found_paths(folder, settings.step)[-1]
    held = read_checkpoint(chosen)
    if settings.ema and not any(AVERAGE_STATE in dict(each.state) for each in held.parameters):
        hint = "plan with training.ema_decay, or omit --ema"
        raise ConfigurationError(
            "the checkpoint contains no averages of weights", hint=hint, where=str(chosen)
        )
    weights_alone = is_safetensors(target)
    if settings.max_shard_size is not None and not weights_alone:
        raise ConfigurationError(
            "--max-shard-size requires an output of weights only",
            "choose an output file that ends in .safetensors",
        )
    path = _model_of(held, settings.model)
    inputs = (chosen, path)
    if not weights_alone:
        OutputFile(target, ONNX, inputs, settings.force).check()
    with events.progress("reading", total=sum(file.size for file in held.files)) as bar:
        check_checkpoint(chosen, held, bar.advance)
    reader = CheckpointReader(chosen, held)
    numbers: dict[str, TensorData] = {}
    for each in held.parameters:
        value = Value(each.name, DType(each.value.dtype), each.value.shape)
        tensor = dict(each.state).get(AVERAGE_STATE, each.value) if settings.ema else each.value
        numbers[each.name] = TensorData(value, partial(reader.read, tensor))
    if weights_alone:
        trainable = {each.name for each in held.parameters if each.trainable}
        state = module_state(path, numbers, trainable, held.forwards)
        return _write_tensors(target, state, held.step, inputs, settings, events)
    numbers |= batch_counters_of_file(path, held.forwards)
    size = sum(each.value.bytes for each in numbers.values())
    with events.progress("writing", total=size) as bar:
        written = write_trained(path, target, numbers, bar.advance, force=settings.force)
    return ExportedModel(
        target,
        written.files,
        path,
        held.step,
        len(numbers),
        written.replaced,
        written.added,
        written.bytes,
    )


def _write_tensors(
    target: Path,
    state: ModuleState,
    step: int,
    inputs: tuple[Path, ...],
    settings: ExportSettings,
    events: Events,
) -> ExportedTensors:
    """Write the tensors of `state` to safetensors files. `inputs` are files that must not be
    replaced.
    """
    from autopipe.passes.safetensors_files import (
        INDEX_SUFFIX,
        group_into_shards,
        safetensors_paths,
        write_safetensors,
    )

    tensors = state.tensors
    most = settings.max_shard_size
    for path in safetensors_paths(target, len(group_into_shards(tensors, most))):
        kind = SAFETENSORS_INDEX if path.name.endswith(INDEX_SUFFIX) else SAFETENSORS
        OutputFile(path, kind, inputs, settings.force).check()
    with events.progress("writing", total=sum(each.value.bytes for each in tensors)) as bar:
        files, size = write_safetensors(target, tensors, bar.advance, most)
    return ExportedTensors(tuple(files), step, len(tensors), size, state.absent, state.others)


@dataclass(frozen=True, slots=True)
class ImportedWeights:
    """An ONNX file with weights from another file."""

    path: Path
    files: tuple[Path, ...]
    parameters: int
    """Number of parameters with new weights."""
    missing: tuple[str, ...]
    """Parameters that keep their weights, because the other file has no tensor for them."""
    unused: tuple[str, ...]
    """Tensors of the other file for which the model has no parameter."""


def import_weights(
    weights: Path,
    model: Path,
    target: Path,
    *,
    is_partial: bool = False,
    force: bool = False,
    events: Events | None = None,
) -> ImportedWeights:
    """Write the ONNX file `model` with the weights of the file `weights` to `target`.

    `weights` is a safetensors file, an index of several, or an ONNX file. A tensor that only one of
    the two files has is an error, unless `is_partial` is True. Raises ConfigurationError or
    ModelError.
    """
    from autopipe.passes.export import write_trained
    from autopipe.passes.weight_files import match_weights

    events = events or SilentEvents()
    OutputFile(target, ONNX, (weights, model), force).check()
    matched = match_weights(weights, model)
    if not matched.numbers or ((matched.missing or matched.unused) and not is_partial):
        raise ConfigurationError(*_unmatched(matched, weights, model))
    for note in _matching_notes(matched, model):
        events.note(note)
    size = sum(each.value.bytes for each in matched.numbers.values())
    with events.progress("writing", total=size) as bar:
        written = write_trained(model, target, matched.numbers, bar.advance, force=force)
    return ImportedWeights(
        target,
        written.files,
        len(matched.numbers),
        tuple(matched.missing),
        tuple(matched.unused),
    )


def _matching_notes(matched: MatchedWeights, model: Path) -> Iterator[str]:
    """Yield sentences about parameters that keep their weights, and tensors that are not used."""
    if matched.missing:
        count = len(matched.missing)
        yield (
            f"{count} {plural(count, 'parameter')} of {model} keep their weights, the first is "
            f"{matched.missing[0]!r}"
        )
    if matched.kept:
        yield (
            f"no part of the module's state_dict, and keep their weights: "
            f"{names_text(matched.kept)}"
        )
    if matched.unused:
        yield (
            f"{len(matched.unused)} {plural(len(matched.unused), 'tensor is', 'tensors are')} "
            f"not in {model}, the first is {matched.unused[0]!r}"
        )
    if matched.passed_over:
        named = repr(matched.passed_over[0])
        yield (
            f"{len(matched.passed_over)} {plural(len(matched.passed_over), 'tensor')} "
            f"of which {model} needs nothing, the first is {named}"
        )


def names_text(names: Sequence[str]) -> str:
    """Return the first names, quoted, and the number of further names."""
    return join_first([repr(name) for name in names], _LISTED)


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
    from autopipe.passes.weight_files import are_same_model

    trained = Path(held.model)
    path = trained if model is None else model
    if not path.is_file():
        hint = "set the path of the model with --model FILE" if model is None else ""
        raise ConfigurationError("the trained model does not exist", hint=hint, where=str(path))
    if (given := load(path)).digest != held.model_digest:
        source = load(trained) if trained.is_file() else given
        if source.digest == held.model_digest and are_same_model(source, given):
            return path
        message = "this is not the model that the checkpoint was trained from"
        hint = (
            "give the file that was planned with --model FILE; weights may differ, and an export "
            "for evaluation where "
        )
        hint += f"{trained} is there too"
        raise ConfigurationError(message, hint, str(path))
    return path


def checkpoints_data(found: Sequence[FoundCheckpoint], one: FoundCheckpoint) -> dict[str, object]:
    """Return the found checkpoints, and one of them with its parameters, as data of `checkpoint
    inspect --json`.
    """
    held = one.checkpoint
    return {
        "checkpoints": [each.data for each in found],
        **one.data,
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
                "bytes": tensor_bytes(each.value),
                "state": {
                    name: {"dtype": state.dtype, "bytes": tensor_bytes(state)}
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


def tensor_bytes(tensor: StoredTensor) -> int:
    """Return the bytes of all shards of a tensor."""
    return full_slice(tensor.shape).elements * numpy_type(tensor.dtype).itemsize
