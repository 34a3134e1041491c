"""A folder of checkpoints: its manifests, its files, and how a new checkpoint is committed.

A checkpoint is written under a temporary name and renamed when every byte is on the disk, so that a crash never loses
the last. The newest and the one before stay; an older one goes only when a newer one is committed.

The manifest of a checkpoint, format `autopipe.checkpoint/2`: what was saved, and where every block of it lies.

A checkpoint is a folder `step_00000012` with files `rank_00000.safetensors`, one a rank, and `manifest.json`. What is
saved is known by the parameter's name and the block of it, not by ranks: any plan of the same model can read it.
`manifest.json` is one JSON object:

    format       "autopipe.checkpoint/2"
    sha256       SHA-256 of the object without this member, as JSON with sorted keys, no spaces, and ASCII only
    model        {"path", "sha256"}: the ONNX file, and the digest that plans have of it
    plan         digest of the plan whose ranks saved
    world_size   their number
    step         steps done
    samples      samples taken from the data so far: where a run goes on, whatever its batch is
    seed         of the random data and of the parameters' first numbers
    optimizer    the settings it was made with: {"name", "lr", "momentum", ..., "shard"}
    files        [{"name", "bytes", "sha256"}]
    parameters   [{"name", "trainable", "value", "state", "scalars"}], by name
                 value: a tensor; state: {"exp_avg": tensor, ...}, what the optimizer keeps of each element;
                 scalars: {"step": 12.0}, what it keeps once
    random       [{"rank", "device", "state"}]: torch's generator on "cpu" or "cuda" of a rank; state is a tensor

A tensor is {"dtype", "shape", "blocks"}: element type by ONNX's name, and global shape. Its blocks do not overlap and
cover it: [{"starts", "stops", "file", "offset", "key"}], half-open in each dimension; the block's elements lie row by
row, little-endian, at byte `offset` of file number `file`, where safetensors calls them `key`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from autopipe.ir.codec import At, Fits, Flat, Index, JsonRecord, decode, encode
from autopipe.ir.errors import ConfigurationError, LaunchError
from autopipe.ir.layout import Box

FORMAT = "autopipe.checkpoint/2"


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a tensor, and where it is stored."""

    box: Annotated[Box, Flat()]
    file: Index
    """Number among the checkpoint's files."""
    offset: Index
    """Bytes from the start of the file."""
    key: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of global `shape`; `dtype` is ONNX's name of its element type in lower case."""

    dtype: str
    shape: tuple[Index, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """A parameter's numbers, and what the optimizer keeps of it, by torch's names."""

    name: str
    trainable: bool
    value: StoredTensor
    state: tuple[tuple[str, StoredTensor], ...] = ()
    scalars: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StoredGenerator:
    """The state of torch's generator of random numbers on a rank's `device`, "cpu" or "cuda", as bytes."""

    rank: Index
    device: str
    state: StoredTensor


FileName = Annotated[str, Fits(lambda name: Path(name).name == name != "..", "a file of the checkpoint")]
"""A name that leads nowhere else."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the checkpoint, its size in bytes, and its SHA-256 in hexadecimal."""

    name: FileName
    size: Annotated[int, At("bytes")]
    sha256: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything a manifest says."""

    model: Annotated[str, At("model.path")]
    model_digest: Annotated[str, At("model.sha256")]
    plan: str
    world_size: int
    step: int
    samples: int
    seed: int
    optimizer: dict[str, Any]
    files: tuple[StoredFile, ...]
    parameters: tuple[StoredParameter, ...]
    """By name."""
    random: tuple[StoredGenerator, ...]

    def parameter(self, name: str) -> StoredParameter | None:
        """The parameter called `name`; None where there is none."""
        return next((each for each in self.parameters if each.name == name), None)


MANIFEST = "manifest.json"
KEPT = 2
"""Checkpoints that stay: the newest and the one before."""
_COMMITTED = re.compile(r"step_(\d{8,})")
_TEMPORARY = re.compile(r"step_\d{8,}\.tmp-.*")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write into one line that says what is not lost."""
    try:
        yield
    except OSError as error:
        raise LaunchError(
            f"the checkpoint cannot be written: {error.strerror or error}",
            hint="earlier checkpoints are untouched", where=str(path),
        ) from error  # fmt: skip


def committed_steps(folder: Path) -> list[int]:
    """Steps of the committed checkpoints, ascending."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigurationError(f"checkpoints cannot be read: {error.strerror}", where=str(folder)) from error
    found = (_COMMITTED.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def check_unused(folder: Path) -> None:
    """Raise ConfigurationError where a run that starts anew would save beside the checkpoints of another."""
    if steps := committed_steps(folder):
        raise ConfigurationError(
            f"{folder} holds a checkpoint after {steps[-1]} steps",
            hint="give --resume to go on from it, or choose another folder",
        )


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step_{step:08d}"


def rank_file(rank: int) -> str:
    """Name of a rank's file within a checkpoint."""
    return f"rank_{rank:05d}.safetensors"


def temporary_path(folder: Path, step: int, token: str) -> Path:
    """Where a checkpoint is written before it is committed; `token` sets runs apart."""
    return folder / f"step_{step:08d}.tmp-{token}"


def advice(path: Path) -> str:
    """Hint for the user of a damaged checkpoint."""
    return f"remove {path.name} to go on from the one before"


def remove_leftovers(folder: Path) -> None:
    """Remove what crashed runs left. No run may be saving here: see `FolderLock`."""
    with writing(folder):
        for path in folder.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                shutil.rmtree(path)


def commit(temporary: Path, manifest: str) -> Path:
    """Give a checkpoint whose files are all on the disk its manifest and its final name. One rank alone does this."""
    final = temporary.with_name(temporary.name.partition(".")[0])
    with writing(final):
        path = temporary / MANIFEST
        path.write_text(manifest, encoding="utf-8")
        flush(path)
        flush(temporary)
        os.rename(temporary, final)
        flush(final.parent)
    return final


def prune(folder: Path) -> None:
    """Remove all but the newest checkpoints. Renamed first, so that no half-removed one looks whole."""
    for step in committed_steps(folder)[:-KEPT]:
        old = checkpoint_path(folder, step)
        with writing(old):
            gone = temporary_path(folder, step, "old")
            os.rename(old, gone)
            shutil.rmtree(gone)


def flush(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_checkpoint(path: Path) -> Checkpoint:
    """The manifest of the checkpoint in folder `path`. Raises LaunchError where it is damaged or of another format."""
    where = str(path / MANIFEST)
    try:
        document = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise LaunchError(f"not a checkpoint of format {FORMAT}", hint=advice(path), where=where)
        if document.pop("sha256", None) != _digest(document):
            raise LaunchError("the checkpoint is damaged: its manifest has changed", hint=advice(path), where=where)
        return parsed(document, where)
    except ConfigurationError as error:
        raise LaunchError(f"the checkpoint is damaged: {error.message}", hint=advice(path), where=where) from error
    except (OSError, ValueError, RecursionError) as error:
        raise LaunchError(f"the checkpoint is damaged: {error!r}", hint=advice(path), where=where) from error


def text_of(checkpoint: Checkpoint) -> str:
    """Text of `manifest.json`."""
    document = document_of(checkpoint)
    return json.dumps(document | {"sha256": _digest(document)}) + "\n"


def _digest(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()


def document_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The manifest as a JSON object, without its digest."""
    return {"format": FORMAT, **encode(checkpoint)}


def parsed(document: dict[str, Any], where: str = "") -> Checkpoint:
    """The manifest that a JSON object says. Raises ConfigurationError where it is none."""
    found: Checkpoint = decode(JsonRecord(document, where), Checkpoint)
    return found


_STORED_AS = {"bfloat16": "uint16"}
"""Types of the same width that numpy reads in place of types it does not know."""
_TAGS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_PAIRS = {"complex64": "F32", "complex128": "F64"}


def numpy_type(dtype: str) -> np.dtype:
    """The type of stored elements: little-endian, and whole numbers of 16 bits for bfloat16."""
    return np.dtype(_STORED_AS.get(dtype, dtype)).newbyteorder("<")


def safetensors_type(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Name and shape for safetensors, to which a complex number is two real ones."""
    return (_PAIRS[dtype], (*shape, 2)) if dtype in _PAIRS else (_TAGS[dtype], shape)


Numbered = tuple[int, StoredParameter]
"""A part's blocks of a parameter, and the number that the part's file gets."""


def merged(parts: Sequence[Checkpoint]) -> Checkpoint:
    """The checkpoint whose files, blocks and generators are those of all parts; the rest is alike in all of them."""
    found: dict[str, list[Numbered]] = {}
    for number, part in enumerate(parts):
        for parameter in part.parameters:
            found.setdefault(parameter.name, []).append((number, parameter))
    return replace(
        parts[0],
        files=tuple(file for part in parts for file in part.files),
        parameters=tuple(_joined(found[name]) for name in sorted(found)),
        random=tuple(
            replace(each, state=_of_blocks([(number, each.state)]))
            for number, part in enumerate(parts)
            for each in part.random
        ),
    )


def _joined(pieces: Sequence[Numbered]) -> StoredParameter:
    """A parameter of which several parts hold blocks."""
    states: dict[str, list[tuple[int, StoredTensor]]] = {}
    scalars: dict[str, float] = {}
    for number, piece in pieces:
        for name, tensor in piece.state:
            states.setdefault(name, []).append((number, tensor))
        scalars.update(piece.scalars)
    return replace(
        pieces[0][1],
        value=_of_blocks([(number, piece.value) for number, piece in pieces]),
        state=tuple((name, _of_blocks(tensors)) for name, tensors in sorted(states.items())),
        scalars=tuple(sorted(scalars.items())),
    )


def _of_blocks(tensors: Sequence[tuple[int, StoredTensor]]) -> StoredTensor:
    """A tensor of all these blocks, in files of these numbers."""
    blocks = (replace(block, file=number) for number, tensor in tensors for block in tensor.blocks)
    return replace(tensors[0][1], blocks=tuple(blocks))


_CHUNK = 2**22
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """A tensor to be stored: its elements' bytes row by row, little-endian."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def write_shard(path: Path, contents: Sequence[Content]) -> tuple[StoredFile, dict[str, int]]:
    """Write a file, down to the disk. Returns what it is, and each tensor's offset in bytes by key.

    Raises LaunchError where it cannot be written.
    """
    ordered = sorted(contents, key=lambda each: -numpy_type(each.dtype).itemsize)  # So that each is aligned.
    ends = list(accumulate(each.data.nbytes for each in ordered))
    starts = [end - each.data.nbytes for each, end in zip(ordered, ends, strict=True)]
    header = _header(ordered, starts)
    digest = hashlib.sha256()
    with writing(path), path.open("xb", buffering=0) as file:
        for data in (memoryview(header), *(each.data for each in ordered)):
            for start in range(0, data.nbytes, _CHUNK):
                chunk = data[start : start + _CHUNK]
                digest.update(chunk)
                while chunk.nbytes:
                    chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    size = len(header) + sum(each.data.nbytes for each in ordered)
    offsets = {each.key: len(header) + start for each, start in zip(ordered, starts, strict=True)}
    return StoredFile(path.name, size, digest.hexdigest()), offsets


def _header(contents: Sequence[Content], starts: Sequence[int]) -> bytes:
    """The length and the header, filled up with spaces."""
    form = {}
    for each, start in zip(contents, starts, strict=True):
        tag, shape = safetensors_type(each.dtype, each.shape)
        form[each.key] = {"dtype": tag, "shape": shape, "data_offsets": [start, start + each.data.nbytes]}
    text = json.dumps(form).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
