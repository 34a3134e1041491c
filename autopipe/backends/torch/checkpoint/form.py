"""The manifest of a checkpoint, format `autopipe.checkpoint/2`: what was saved, and where every block of it lies.

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

from dataclasses import dataclass
from typing import Any

from autopipe.ir.layout import Box

FORMAT = "autopipe.checkpoint/2"


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a tensor, and where it is stored."""

    box: Box
    file: int
    """Number among the checkpoint's files."""
    offset: int
    """Bytes from the start of the file."""
    key: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of global `shape`; `dtype` is ONNX's name of its element type in lower case."""

    dtype: str
    shape: tuple[int, ...]
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

    rank: int
    device: str
    state: StoredTensor


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the checkpoint, its size in bytes, and its SHA-256 in hexadecimal."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything a manifest says."""

    model: str
    model_digest: str
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
