"""The manifest of a program folder, read and checked."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from autopipe.ir.codec import At, AtLeast, Coded, Count, Index, JsonRecord, Record, Sparse, decode
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.layout import MeshAxis, members

FORMAT = "autopipe.program/1"
_PATH = Coded(str, lambda record: Path(decode(record, str)))
_TRAINS = Coded(str, lambda record: decode(record, Literal["train", "infer"]) == "train")
_ANY_FLOAT = Coded(float, lambda record: float(decode(record, Any)))
"""Parameters may be filled with infinity."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Where a parameter's numbers come from: `file` (offset and length in bytes), `fill` (value) or `draw` (scheme)."""

    kind: str
    file: Annotated[str, Sparse()] = ""
    offset: Annotated[Index, Sparse()] = 0
    length: Annotated[Index, Sparse()] = 0
    rows: Annotated[tuple[Index, ...], Sparse()] = ()
    """Where each row of a matrix begins, in elements, where they do not follow one another."""
    step: Annotated[int, Sparse()] = 1
    """Elements from one of a row's numbers to the next, where `rows` are given."""
    form: Annotated[str, Sparse()] = ""
    """Function from the numbers to the parameter: "" for the numbers themselves, else their `log` or the `log of the
    negative`.
    """
    value: Annotated[float, Sparse(), _ANY_FLOAT] = 0.0
    scheme: Annotated[str, Sparse()] = ""
    scale: Annotated[float, Sparse()] = 0.0


@dataclass(frozen=True, slots=True)
class ParameterEntry:
    """A parameter of the model."""

    name: str
    dtype: str
    shape: tuple[Index, ...]
    trainable: bool
    storage: Storage


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """A rank's block of a parameter, and the ranks whose gradients of it are added up."""

    parameter: Index
    starts: tuple[Index, ...]
    stops: tuple[Index, ...]
    ranks: tuple[Index, ...]
    home: Index | None = None
    """The stage whose last backward completes the gradient on all of those ranks, where there is one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the block."""
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def elements(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Whole numbers in [`least`, `below`) for a block of an input, of all samples."""

    least: int
    below: int
    starts: tuple[Index, ...]
    stops: tuple[Index, ...]


@dataclass(frozen=True, slots=True)
class InputEntry:
    """A graph input of one micro-batch, and what its numbers must keep to."""

    name: str
    dtype: str
    shape: tuple[Index, ...]
    batch_axis: Index | None
    below: int | None
    """Random data: whole numbers in [0, `below`), or any real number."""
    drawn: Annotated[tuple[Bounds, ...], Sparse()] = ()
    """Blocks of random data that have bounds of their own."""
    allowed: Annotated[tuple[Bounds, ...], Sparse()] = ()
    """Blocks for which other numbers are refused."""
    ignored: Annotated[int | None, Sparse()] = None
    """The label that is allowed besides."""


@dataclass(frozen=True, slots=True)
class OutputShard:
    """A block of an output and the rank that holds it."""

    rank: Index
    starts: tuple[Index, ...]
    stops: tuple[Index, ...]


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """Where a pipeline has an output: which stage gives it, as which result, in which blocks."""

    stage: Index
    position: Index
    combine: str
    copies: Count
    shards: tuple[OutputShard, ...]


@dataclass(frozen=True, slots=True)
class OutputEntry:
    """An output of the graph, of one micro-batch of the stage that gives it."""

    name: str
    dtype: str
    shape: tuple[Index, ...]
    batch_axis: Index | None
    places: tuple[OutputPlace, ...]
    """One a pipeline."""


Axes = tuple[tuple[int, int], ...]
"""Axes of a group's mesh, outer to inner, each as degree and stride: see `autopipe.ir.layout.MeshAxis`."""


@dataclass(frozen=True, slots=True)
class StageEntry:
    """A stage's group, its pipeline, and the sub-meshes along which the group's ranks exchange anything."""

    ranks: tuple[Index, ...]
    pipeline: Index
    meshes: tuple[Axes, ...]
    turns: Annotated[int, AtLeast(1), Sparse()] = 1
    """Micro-batches that it makes of each of the manifest's."""

    def groups(self) -> set[tuple[int, ...]]:
        """All sets of ranks, ascending, that exchange anything."""
        found = {tuple(sorted(self.ranks))}
        for axes in self.meshes:
            along = tuple(MeshAxis(*axis) for axis in axes)
            for position in range(len(self.ranks)):
                found.add(tuple(sorted(self.ranks[place] for place in members(along, position))))
        return found


@dataclass(frozen=True, slots=True)
class ChannelEntry:
    """One channel between two ranks, and how many messages each way its receiver holds at once."""

    number: Index
    source: Index
    target: Index
    buffers: Index
    gradient_buffers: Index


def _read_shards(ranks: Record) -> tuple[tuple[ShardEntry, ...], ...]:
    return tuple(rank.get("shards", tuple[ShardEntry, ...]) for rank in ranks.items())


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything of a program that is data rather than code; `emission.program` writes it."""

    folder: Path
    model: Annotated[Path, At("model.path"), _PATH]
    model_digest: Annotated[str, At("model.sha256")]
    plan: str
    world_size: Count
    train: Annotated[bool, At("mode"), _TRAINS]
    micro_batches: Count
    micro_batch_size: Count
    loss: str | None
    precision: str
    seed: int
    optimizer: dict[str, Any]
    predicted_step_s: Annotated[float, At("predicted.step_s")]
    predicted_bubble: Annotated[float, At("predicted.bubble")]
    inputs: tuple[InputEntry, ...]
    outputs: tuple[OutputEntry, ...]
    parameters: tuple[ParameterEntry, ...]
    shards: Annotated[tuple[tuple[ShardEntry, ...], ...], At("ranks"), Coded(list, _read_shards)]
    """A tuple for each rank."""
    stages: tuple[StageEntry, ...]
    channels: tuple[ChannelEntry, ...]
    """In global order."""

    @property
    def batch_size(self) -> int:
        """Samples of a step."""
        return self.micro_batches * self.micro_batch_size

    def micro_batches_at(self, stage: int) -> int:
        """The micro-batches, of the size that a stage takes, that a step has."""
        return self.micro_batches * self.stages[stage].turns

    def micro_batches_of(self, stage: int) -> range:
        """Micro-batches that the stage runs: m runs on pipeline m mod their number."""
        pipelines = 1 + max(entry.pipeline for entry in self.stages)
        return range(self.stages[stage].pipeline, self.micro_batches_at(stage), pipelines)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a program folder. Raises ConfigurationError where there is none or it cannot be read."""
    path = folder / "manifest.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "run autopipe codegen"
        if (folder / "plan.json").is_file():
            hint = f"it is a plan: autopipe codegen {folder} makes {folder / 'program'}"
        raise ConfigurationError(f"{folder} is not a program folder: {error.strerror}", hint=hint) from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"not valid JSON: {error}", where=str(path)) from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ConfigurationError(
            f"not a manifest of format {FORMAT}", hint="run autopipe codegen again", where=str(path)
        )
    record = JsonRecord(raw, str(path))
    try:
        manifest: Manifest = decode(record, Manifest, folder=folder)
    except ConfigurationError as error:
        raise record.error(f"the manifest is damaged: {error.message}", error.hint) from error
    except (TypeError, ValueError) as error:
        raise record.error(f"the manifest is damaged: {error!r}") from error
    if len(manifest.shards) != manifest.world_size:
        record.at("world_size").refuse(f"the number of ranks, {len(manifest.shards)}")
    for stage in manifest.stages:
        if manifest.micro_batch_size % stage.turns:
            record.at("micro_batch_size").refuse(f"a multiple of the {stage.turns} micro-batches of a stage")
    return manifest
