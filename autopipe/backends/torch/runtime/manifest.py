"""The manifest of a program folder, read and checked."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.layout import MeshAxis, members

FORMAT = "autopipe.program/1"


@dataclass(frozen=True, slots=True)
class Storage:
    """Where a parameter's numbers come from: `file` (offset and length in bytes), `fill` (value) or `draw` (scheme)."""

    kind: str
    file: str = ""
    offset: int = 0
    length: int = 0
    rows: Sequence[int] = ()
    """Where each row of a matrix begins, in elements, where they do not follow one another."""
    step: int = 1
    """Elements from one of a row's numbers to the next, where `rows` are given."""
    form: str = ""
    """Function from the numbers to the parameter: "" for the numbers themselves, else their `log` or the `log of the
    negative`.
    """
    value: float = 0.0
    scheme: str = ""
    scale: float = 0.0


@dataclass(frozen=True, slots=True)
class ParameterEntry:
    """A parameter of the model."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    trainable: bool
    storage: Storage


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """A rank's block of a parameter, and the ranks whose gradients of it are added up."""

    parameter: int
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    ranks: tuple[int, ...]
    home: int | None = None
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
    starts: tuple[int, ...]
    stops: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InputEntry:
    """A graph input of one micro-batch, and what its numbers must keep to."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    batch_axis: int | None
    below: int | None
    """Random data: whole numbers in [0, `below`), or any real number."""
    drawn: tuple[Bounds, ...] = ()
    """Blocks of random data that have bounds of their own."""
    allowed: tuple[Bounds, ...] = ()
    """Blocks for which other numbers are refused."""
    ignored: int | None = None
    """The label that is allowed besides."""


@dataclass(frozen=True, slots=True)
class OutputShard:
    """A block of an output and the rank that holds it."""

    rank: int
    starts: tuple[int, ...]
    stops: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """Where a pipeline has an output: which stage gives it, as which result, in which blocks."""

    stage: int
    position: int
    combine: str
    copies: int
    shards: tuple[OutputShard, ...]


@dataclass(frozen=True, slots=True)
class OutputEntry:
    """An output of the graph, of one micro-batch of the stage that gives it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    batch_axis: int | None
    places: tuple[OutputPlace, ...]
    """One a pipeline."""


Axes = tuple[tuple[int, int], ...]
"""Axes of a group's mesh, outer to inner, each as degree and stride: see `autopipe.ir.layout.MeshAxis`."""


@dataclass(frozen=True, slots=True)
class StageEntry:
    """A stage's group, its pipeline, and the sub-meshes along which the group's ranks exchange anything."""

    ranks: tuple[int, ...]
    pipeline: int
    meshes: tuple[Axes, ...]
    turns: int = 1
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

    number: int
    source: int
    target: int
    buffers: int
    gradient_buffers: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything of a program that is data rather than code."""

    folder: Path
    model: Path
    model_digest: str
    plan: str
    world_size: int
    train: bool
    micro_batches: int
    micro_batch_size: int
    loss: str | None
    precision: str
    seed: int
    optimizer: dict[str, Any]
    predicted_step_s: float
    predicted_bubble: float
    inputs: tuple[InputEntry, ...]
    outputs: tuple[OutputEntry, ...]
    parameters: tuple[ParameterEntry, ...]
    shards: tuple[tuple[ShardEntry, ...], ...]
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
    try:
        return _manifest(folder, raw)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"the manifest is damaged: {error!r}", where=str(path)) from error


def _manifest(folder: Path, raw: dict[str, Any]) -> Manifest:
    if len(raw["ranks"]) != raw["world_size"]:
        raise ValueError(f"world_size is {raw['world_size']} where there are {len(raw['ranks'])} ranks")
    return Manifest(
        folder=folder,
        model=Path(raw["model"]["path"]),
        model_digest=str(raw["model"]["sha256"]),
        plan=str(raw["plan"]),
        world_size=_count(raw, "world_size"),
        train=raw["mode"] == "train",
        micro_batches=_count(raw, "micro_batches"),
        micro_batch_size=_count(raw, "micro_batch_size"),
        loss=raw["loss"],
        precision=str(raw["precision"]),
        seed=int(raw["seed"]),
        optimizer=dict(raw["optimizer"]),
        predicted_step_s=float(raw["predicted"]["step_s"]),
        predicted_bubble=float(raw["predicted"]["bubble"]),
        inputs=tuple(_input(each) for each in raw["inputs"]),
        outputs=tuple(_output(each) for each in raw["outputs"]),
        parameters=tuple(
            ParameterEntry(
                each["name"], each["dtype"], tuple(each["shape"]), bool(each["trainable"]), Storage(**each["storage"])
            )
            for each in raw["parameters"]
        ),
        shards=tuple(
            tuple(
                ShardEntry(
                    each["parameter"], tuple(each["starts"]), tuple(each["stops"]), tuple(each["ranks"]), each["home"]
                )
                for each in rank["shards"]
            )
            for rank in raw["ranks"]
        ),
        stages=tuple(
            StageEntry(
                tuple(each["ranks"]),
                int(each["pipeline"]),
                tuple(tuple((degree, stride) for degree, stride in axes) for axes in each["meshes"]),
                _micro_batch_ratio(each, raw),
            )
            for each in raw["stages"]
        ),
        channels=tuple(ChannelEntry(**each) for each in raw["channels"]),
    )


def _micro_batch_ratio(stage: dict[str, Any], raw: dict[str, Any]) -> int:
    """1 where the stage takes the micro-batches as they are."""
    turns = _count(stage, "turns") if "turns" in stage else 1
    if raw["micro_batch_size"] % turns:
        raise ValueError(f"micro-batches of {raw['micro_batch_size']} samples are taken in {turns} turns")
    return turns


def _count(raw: dict[str, Any], key: str) -> int:
    if (found := int(raw[key])) < 1:
        raise ValueError(f"{key} is {found}")
    return found


def _input(raw: dict[str, Any]) -> InputEntry:
    return InputEntry(
        name=raw["name"],
        dtype=raw["dtype"],
        shape=tuple(raw["shape"]),
        batch_axis=raw["batch_axis"],
        below=raw["below"],
        drawn=_bounds(raw, "drawn"),
        allowed=_bounds(raw, "allowed"),
        ignored=raw.get("ignored"),
    )


def _bounds(raw: dict[str, Any], key: str) -> tuple[Bounds, ...]:
    return tuple(
        Bounds(int(each["least"]), int(each["below"]), tuple(each["starts"]), tuple(each["stops"]))
        for each in raw.get(key, ())
    )


def _output(raw: dict[str, Any]) -> OutputEntry:
    return OutputEntry(
        name=raw["name"],
        dtype=raw["dtype"],
        shape=tuple(raw["shape"]),
        batch_axis=raw["batch_axis"],
        places=tuple(_place(each) for each in raw["places"]),
    )


def _place(raw: dict[str, Any]) -> OutputPlace:
    return OutputPlace(
        stage=raw["stage"],
        position=raw["position"],
        combine=raw["combine"],
        copies=raw["copies"],
        shards=tuple(OutputShard(each["rank"], tuple(each["starts"]), tuple(each["stops"])) for each in raw["shards"]),
    )
