"""The manifest of a program folder, `manifest.json`: everything that a generated program needs in
addition to its code, for example shapes, shards and settings.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from autopipe.ir.codec import AtLeast, Count, CustomCodec, Index, KeyPath, OmitDefault, decode
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.files import JsonRecord
from autopipe.ir.graph import COUNTED_LABELS, Parameter, tokens_per_sample
from autopipe.ir.layout import MeshAxis, group_members
from autopipe.ir.movable_paths import resolve_path
from autopipe.ir.problem import AVERAGED_LOSS, LossDivision
from autopipe.ir.program import (
    FORMAT,
    Channel,
    InputRange,
    Output,
    ParameterShard,
    RunningStatisticCalls,
)
from autopipe.ir.rounding import Rounding
from autopipe.ir.training import DataSettings, Evaluation, LRScheduler, Training, change_data_path
from autopipe.ir.words import plural

_PATH_CODEC = CustomCodec(str, lambda record: Path(decode(record, str)))
_MODE_CODEC = CustomCodec(str, lambda record: decode(record, Literal["train", "infer"]) == "train")
_SHARDS_CODEC = CustomCodec(
    list,
    lambda ranks: tuple(rank.get("shards", tuple[ParameterShard, ...]) for rank in ranks.items()),
)


@dataclass(frozen=True, slots=True)
class StageEntry:
    """The ranks of a stage, the pipeline that it belongs to, and the meshes along which its ranks
    communicate.
    """

    ranks: tuple[Index, ...]
    pipeline: Index
    meshes: tuple[tuple[tuple[int, int], ...], ...]
    """Process groups in which ranks of the stage communicate and which do not contain all its
    ranks. A group is given by its mesh axes from outer to inner, as (degree, stride)
    (`autopipe.ir.layout.MeshAxis`).
    """
    micro_batch_ratio: Annotated[int, AtLeast(1), KeyPath("turns"), OmitDefault()] = 1
    """Number of micro-batches of the stage per micro-batch of the program. A stage with a ratio
    above 1 has smaller micro-batches.
    """
    whole: Annotated[bool, OmitDefault()] = True
    """True if the stage has a process group of all its ranks. False if its ranks communicate only
    in smaller groups (`meshes`), or not at all.
    """
    host_bound: Annotated[bool, OmitDefault()] = False
    """True if the plan predicts that the host takes longer to launch the stage's operators than the
    device takes to run them.
    """

    def groups(self) -> set[tuple[int, ...]]:
        """Return the process groups of the stage, each as its ranks in ascending order."""
        meshes = [tuple(MeshAxis(*axis) for axis in axes) for axes in self.meshes]
        positions = [
            group_members(axes, position) for axes in meshes for position in range(len(self.ranks))
        ]
        found = {tuple(sorted(self.ranks[each] for each in group)) for group in positions}
        return found | {tuple(sorted(self.ranks))} if self.whole else found


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of the manifest in `folder`, which `codegen.program` writes."""

    folder: Path
    model: Annotated[Path, KeyPath("model.path"), _PATH_CODEC]
    """Absolute path of the ONNX file from which ranks read weights."""
    model_digest: Annotated[str, KeyPath("model.sha256")]
    plan: str
    world_size: Count
    train: Annotated[bool, KeyPath("mode"), _MODE_CODEC]
    micro_batches: Count
    micro_batch_size: Count
    loss: str | None
    precision: str
    seed: int
    optimizer: dict[str, Any]
    predicted_step_s: Annotated[float, KeyPath("predicted.step_s")]
    predicted_bubble: Annotated[float, KeyPath("predicted.bubble")]
    rounding: Rounding
    inputs: tuple[InputRange, ...]
    outputs: tuple[Output, ...]
    parameters: tuple[Parameter, ...]
    shards: Annotated[tuple[tuple[ParameterShard, ...], ...], KeyPath("ranks"), _SHARDS_CODEC]
    """For each rank, the shards of parameters that it holds."""
    stages: tuple[StageEntry, ...]
    channels: tuple[Channel, ...]
    """All channels of the program. All ranks create them in this order."""
    memory_limits: Annotated[tuple[Index, ...], OmitDefault()] = ()
    """Maximum bytes that torch's allocator may take on the GPU of each rank; () for no limits."""
    data: Annotated[DataSettings, OmitDefault()] = field(default=DataSettings())
    training_graph: Annotated[bool | None, KeyPath("model.training"), OmitDefault()] = None
    fixed_inputs: Annotated[
        tuple[tuple[str, bool | int | float], ...], KeyPath("model.inputs"), OmitDefault()
    ] = ()
    evaluation: Annotated[Evaluation, KeyPath("eval"), OmitDefault()] = field(default=Evaluation())
    model_flops: Annotated[float | None, KeyPath("metrics.model_flops"), OmitDefault()] = None
    """FLOPs of the model in one step, summed over all ranks. Recomputation does not count. None if
    unknown.
    """
    peak_flops: Annotated[float | None, KeyPath("metrics.peak_flops"), OmitDefault()] = None
    """Peak FLOPs per second in the program's precision, summed over all devices of the plan. None
    if unknown.
    """
    predicted_memory_bytes: Annotated[
        int | None, KeyPath("metrics.memory_bytes"), OmitDefault()
    ] = None
    """Predicted peak memory of the rank that needs most, in bytes. None if the plan has no
    prediction.
    """
    low_precision: Annotated[tuple[Index, ...], OmitDefault()] = ()
    """Indices of the parameters of which stages read a 16-bit copy (`Program.low_precision`)."""
    running_calls: Annotated[tuple[RunningStatisticCalls, ...], OmitDefault()] = ()
    """For each running statistic that several stages update, the BatchNormalization calls that
    update it (`Program.running_calls`).
    """
    loss_division: Annotated[LossDivision, OmitDefault()] = field(default=AVERAGED_LOSS)
    lr_scheduler: Annotated[LRScheduler, OmitDefault()] = field(default=LRScheduler())
    training: Annotated[Training, OmitDefault()] = field(default=Training())
    style: Annotated[Literal["flat", "layers"], OmitDefault()] = "flat"
    """Form of the generated code of stages (`codegen --style`): `flat` has one statement per
    operator, `layers` has functions for repeated layers.
    """

    @property
    def counts_labels(self) -> bool:
        """True if the program trains and divides the loss of a step by the number of labels of the
        step that are not ignored.
        """
        return self.train and any(output.value.name == COUNTED_LABELS for output in self.outputs)

    @property
    def output_keys(self) -> tuple[str, ...]:
        """Keys of the outputs in an `.npz` file, by index of the output. The key is the output's
        name if it is valid as a file name in an archive, otherwise `output_N` with the index N of
        the output. If another output has this name, underscores are appended to `output_N` until it
        is unique.
        """
        names = [output.value.name for output in self.outputs]
        plain = {name for name in names if _is_plain_file_name(name)}
        keys = []
        for index, name in enumerate(names):
            key = name if name in plain else f"output_{index}"
            while name not in plain and key in plain:
                key += "_"
            keys.append(key)
        return tuple(keys)

    @property
    def is_training_graph(self) -> bool:
        """True if Dropout drops elements and BatchNormalization uses the statistics of the batch,
        in operators for which the model leaves this open.
        """
        return self.train if self.training_graph is None else self.training_graph

    @property
    def scales_loss(self) -> bool:
        """True if the program uses loss scaling, which is the case in fp16 training."""
        return self.train and self.precision == "fp16"

    @property
    def batch_size(self) -> int:
        """Number of samples in a step, over all pipelines and accumulated batches."""
        return (
            self.micro_batches * self.micro_batch_size * self.training.gradient_accumulation_steps
        )

    @property
    def tokens_per_sample(self) -> int | None:
        """Number of tokens in a sample; None if samples are not sequences of tokens."""
        return tokens_per_sample((each.value, each.batch_axis) for each in self.inputs)

    def micro_batch_count(self, stage: int) -> int:
        """Return the number of the stage's micro-batches in one call of the generated function
        `step`, summed over all pipelines.
        """
        return self.micro_batches * self.stages[stage].micro_batch_ratio

    def micro_batch_size_at(self, stage: int) -> int:
        """Return the number of samples in a micro-batch of the stage."""
        return self.micro_batch_size // self.stages[stage].micro_batch_ratio

    def micro_batches_of(self, stage: int) -> range:
        """Return the numbers of the micro-batches that the stage runs in one call of the generated
        function `step`. With n pipelines, a stage of pipeline p runs the micro-batches p, p + n, p
        + 2n, ...
        """
        pipelines = 1 + max(entry.pipeline for entry in self.stages)
        return range(self.stages[stage].pipeline, self.micro_batch_count(stage), pipelines)


def partial_folder(path: Path) -> Path:
    """Return the folder for the unfinished files of the output `path`. When the output is complete,
    it is moved to `path`.
    """
    return path.with_name(f".{path.name}.partial")


_PARTIAL_FILE_PATTERN = re.compile(r"\d+\.(npy|moved)|whole\.npz")


def remove_partial_outputs(path: Path) -> None:
    """Remove the unfinished files of the output `path`, and their folder unless it contains other
    files. Errors are ignored.
    """
    folder = partial_folder(path)
    with contextlib.suppress(OSError):
        for each in folder.iterdir():
            if _PARTIAL_FILE_PATTERN.fullmatch(each.name):
                each.unlink()
        folder.rmdir()


def _is_plain_file_name(name: str) -> bool:
    """Return True if `name` can be the key of an array in an `.npz` file: a relative path
    without special parts or backslashes, of fewer than 200 printable characters, that does not
    end in `.npy`, which numpy would remove.
    """
    parts = name.split("/")
    return (
        not name.endswith(".npy")
        and name.isprintable()
        and "\\" not in name
        and len(name) < 200
        and {"", ".", ".."}.isdisjoint(parts)
    )


def read_manifest(folder: Path, model: Path | None = None) -> Manifest:
    """Return the manifest of a program folder, with absolute paths. If `model` is given, it
    replaces the path of the ONNX file. Raise ConfigurationError if the manifest is missing or
    invalid.
    """
    path = folder / "manifest.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "run autopipe codegen"
        if (folder / "plan.json").is_file():
            hint = (
                f"generate the program {folder / 'program'} of this plan with autopipe codegen "
                f"{shlex.quote(str(folder))}"
            )
        raise ConfigurationError(
            f"{folder} is not a program folder: {error.strerror}", hint=hint
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"the manifest is not valid JSON: {error}", where=str(path)
        ) from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ConfigurationError(
            f"the file is not a manifest of format {FORMAT}",
            hint="run autopipe codegen again",
            where=str(path),
        )
    record = JsonRecord(raw, str(path))
    try:
        manifest: Manifest = decode(record, Manifest, folder=folder)
    except ConfigurationError as error:
        raise record.error(f"the manifest is damaged: {error.message}", error.hint) from error
    except (TypeError, ValueError) as error:
        raise record.error(f"the manifest is damaged: {error!r}") from error
    manifest = _make_paths_absolute(manifest)
    if model is not None:
        manifest = replace(manifest, model=model.absolute())
    if len(manifest.shards) != manifest.world_size:
        record.at("world_size").reject(f"the number of ranks, which is {len(manifest.shards)}")
    if len(manifest.memory_limits) not in (0, manifest.world_size):
        record.at("memory_limits").reject(
            f"one limit per rank, for {manifest.world_size} {plural(manifest.world_size, 'rank')}"
        )
    for stage in manifest.stages:
        if manifest.micro_batch_size % stage.micro_batch_ratio:
            record.at("micro_batch_size").reject(
                f"a multiple of the {stage.micro_batch_ratio} "
                f"{plural(stage.micro_batch_ratio, 'micro-batch')} of a stage"
            )
    return manifest


def _make_paths_absolute(manifest: Manifest) -> Manifest:
    """Return `manifest` with absolute paths. In the file, paths are absolute or relative to the
    program folder.
    """

    def absolute_path(path: str) -> str:
        return resolve_path(manifest.folder, path)

    data = replace(manifest.data, path=change_data_path(manifest.data.path, absolute_path))
    evaluation = replace(
        manifest.evaluation, data=change_data_path(manifest.evaluation.data, absolute_path)
    )
    return replace(
        manifest, model=Path(absolute_path(str(manifest.model))), data=data, evaluation=evaluation
    )
