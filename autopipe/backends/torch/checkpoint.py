"""The folder of checkpoints: writing, committing, merging, checking and reading checkpoints.

A checkpoint is written under a temporary name and renamed when every byte is on the disk, so that a
crash does not lose the previous one. By default, the two newest checkpoints are kept. An older one
is removed only after a newer one has been committed.

A checkpoint is a folder `step_00000012` with one file `rank_00000.safetensors` per rank and
`manifest.json`. The manifest identifies saved data by the name of the parameter and the block of
it, not by rank, so that any plan of the same model can read it. It is one JSON object:

    format       "autopipe.checkpoint/2"
    sha256       SHA-256 of the object without this member, as JSON with sorted keys, no spaces, and
                 ASCII only
    model        {"path", "sha256"}: the ONNX file, and its digest as in plans
    plan         digest of the plan whose ranks saved the checkpoint
    world_size   number of these ranks
    step         number of completed steps
    samples      number of samples read from the data: where a resumed run continues
    forwards     micro-batches of all steps so far; absent if they were not counted
    seed         seed of the random data and of the parameters' initial values
    optimizer    settings of the optimizer: {"name", "lr", "momentum", ..., "shard"}
    files        [{"name", "bytes", "sha256"}]
    parameters   [{"name", "trainable", "value", "state", "scalars"}], by name
                 value: a tensor; state: {"exp_avg": tensor, ...}, optimizer state per
                 element; scalars: {"step": 12.0}, optimizer state per parameter
    random       [{"rank", "device", "state"}]: state (a tensor) of torch's generator of random
                 numbers on "cpu" or "cuda" of a rank
    loss_scale   {"scale", "good_steps"}, for fp16 only: the loss scale, and the number of steps
                 without an overflow since it changed
    eval_loss    validation loss, for the best checkpoint in the folder `best` only

A tensor is {"dtype", "shape", "blocks"}: the ONNX name of its element type, its global shape, and
its blocks, [{"starts", "stops", "file", "offset", "key"}]. The blocks cover the tensor and do not
overlap. `starts` and `stops` are half-open ranges per dimension. The elements of a block are stored
in row-major order, little-endian, from byte `offset` of file number `file` on, under the
safetensors name `key`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from autopipe.ir.codec import Above, Index, Inline, KeyPath, OmitDefault, Predicate, decode, encode
from autopipe.ir.errors import ConfigurationError, LaunchError
from autopipe.ir.files import JsonRecord, safetensors_header
from autopipe.ir.graph import DType
from autopipe.ir.layout import TensorSlice, full_slice
from autopipe.ir.output_files import temporary_folder
from autopipe.ir.words import count_text, plural

FORMAT = "autopipe.checkpoint/2"
AVERAGE_STATE = "ema"
"""Name under which the state of a parameter contains the exponential moving average of its values.
"""


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """One block of a tensor: the slice `box` of the full tensor, stored in a file of the
    checkpoint. `file` is an index into `Checkpoint.files`, and `key` is the name of the block in
    the safetensors file.
    """

    box: Annotated[TensorSlice, Inline()]
    file: Index
    offset: Index
    """Offset of the first byte from the start of the file."""
    key: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, stored in one or more blocks. `shape` is the shape of the full
    tensor, and `dtype` the lower-case ONNX name of its element type.
    """

    dtype: str
    shape: tuple[Index, ...]
    blocks: tuple[StoredSlice, ...]


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """A parameter of a checkpoint: its value and its optimizer state. `state` has one tensor per
    entry (torch's names, such as `exp_avg`), `scalars` the entries that are single numbers, such as
    `step`.
    """

    name: str
    trainable: bool
    value: StoredTensor
    state: tuple[tuple[str, StoredTensor], ...] = ()
    scalars: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StoredGenerator:
    """The state of torch's random number generator on a rank's `device`, "cpu" or "cuda", as a
    tensor of bytes.
    """

    rank: Index
    device: str
    state: StoredTensor


@dataclass(frozen=True, slots=True)
class LossScale:
    """The loss scale of an fp16 run, and the number of steps without an overflow since the scale
    changed.
    """

    scale: Annotated[float, Above(0)]
    good_steps: Index


FileName = Annotated[
    str, Predicate(lambda name: Path(name).name == name != "..", "a file of the checkpoint")
]
"""Name of a file, without folders. A name with folders is rejected, because it could refer to a
file outside of the checkpoint.
"""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a checkpoint, its size in bytes and its SHA-256 digest."""

    name: FileName
    size: Annotated[int, KeyPath("bytes")]
    sha256: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The manifest of a checkpoint; the module docstring defines its fields."""

    model: Annotated[str, KeyPath("model.path")]
    model_digest: Annotated[str, KeyPath("model.sha256")]
    plan: str
    world_size: int
    step: int
    samples: int
    seed: int
    optimizer: dict[str, Any]
    files: tuple[StoredFile, ...]
    parameters: tuple[StoredParameter, ...]
    """Parameters of the model, sorted by name."""
    random: tuple[StoredGenerator, ...]
    loss_scale: Annotated[LossScale | None, OmitDefault()] = None
    eval_loss: Annotated[float | None, OmitDefault()] = None
    forwards: Annotated[Index | None, OmitDefault()] = None
    """Number of micro-batches in all steps so far; None if they were not counted."""

    def parameter(self, name: str) -> StoredParameter | None:
        """Return the entry of the parameter called `name`, or None if there is none."""
        return next((each for each in self.parameters if each.name == name), None)


MANIFEST_FILE = "manifest.json"
BEST_FOLDER = "best"
"""Name of the subfolder of a run's checkpoint folder that contains the checkpoint with the lowest
validation loss.
"""
DEFAULT_KEPT_CHECKPOINTS = 2
"""Default number of checkpoints that are kept: the newest one and its predecessor."""
_COMMITTED_PATTERN = re.compile(r"step_(\d{8,})")
_TEMPORARY_PATTERN = re.compile(r"step_\d{8,}\.tmp-.*")


@contextlib.contextmanager
def convert_write_errors(path: Path) -> Iterator[None]:
    """Context manager that converts an OSError while `path` is written to a LaunchError. Its hint
    states that earlier checkpoints are unchanged.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        hint = "free disk space or choose another folder; earlier checkpoints are unchanged"
        raise LaunchError(
            f"the checkpoint cannot be written: {reason}", hint=hint, where=str(path)
        ) from error


def _checkpoint_error(path: Path, message: str, where: object = None) -> LaunchError:
    """Return the error for the checkpoint at `path`; `where` is a part of the checkpoint, if
    known.
    """
    hint = f"remove {path.name} to go on from the one before"
    return LaunchError(
        message, hint=hint, where=str(path / MANIFEST_FILE if where is None else where)
    )


def _damage_error(path: Path, reason: object, where: object = None) -> LaunchError:
    """Return the error for a damaged checkpoint at `path`; `where` is a part of the checkpoint, if
    known.
    """
    return _checkpoint_error(path, f"the checkpoint is damaged: {reason}", where)


_LOCK_FILE = ".lock"


class FolderLock:
    """An exclusive lock on a folder of checkpoints. The lock is held until `release` or until the
    process ends for any reason.
    """

    def __init__(self, folder: Path) -> None:
        """Create `folder` if it does not exist, and lock it. Wait up to `_REPLACED_RUN_PATIENCE_S`
        seconds for another run to release it. Raise ConfigurationError if the other run does not,
        and LaunchError if the folder cannot be created.
        """
        self._descriptor = -1
        self._folder = folder
        self.held = False
        """True if this object holds the lock. False if the file system does not support locks; then
        the files of other runs must not be removed.
        """
        with convert_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(
                folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666
            )
        deadline = time.monotonic() + _REPLACED_RUN_PATIENCE_S
        with contextlib.suppress(OSError):
            while not self._try_lock():
                if time.monotonic() > deadline:
                    self.release()
                    raise _in_use_error(folder)
                time.sleep(_LOCK_RETRY_S)
            self.held = True

    def _try_lock(self) -> bool:
        """Return True if the folder is now locked, and False if another process holds the lock.
        Raise OSError if the file system does not support locks.
        """
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def claim(self, run: str) -> None:
        """Write `run`, the name of this run, to the lock file. Do nothing if the file already
        contains this name. Raise ConfigurationError if it does not and the folder has checkpoints,
        which then belong to another run.
        """
        if os.pread(self._descriptor, _MAX_RUN_NAME_BYTES, 0) == run.encode():
            # The run claimed the folder in an earlier attempt, before the launcher restarted its
            # ranks.
            return
        check_has_no_checkpoints(self._folder)
        with convert_write_errors(self._folder):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, run.encode(), 0)

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    __del__ = release


_REPLACED_RUN_PATIENCE_S = 15.0
"""Maximum seconds that a new run waits for the lock. A killed run that it replaces may need some
seconds to end.
"""
_LOCK_RETRY_S = 0.1
_MAX_RUN_NAME_BYTES = 4096
"""Maximum size of a run's name in bytes."""
_SHORT_PATIENCE_S = 2.0
"""Maximum seconds that `check_not_in_use` waits for the ranks of a killed run to end."""


def _in_use_error(folder: Path) -> ConfigurationError:
    """Return the error for a folder that another run has locked."""
    hint = "wait until the other run ends, or choose another folder with --checkpoint DIR"
    return ConfigurationError(
        "another run is writing checkpoints to this folder", hint=hint, where=str(folder)
    )


def check_can_save(folder: Path) -> None:
    """Raise ConfigurationError if checkpoints cannot be saved in `folder`, which may not exist yet.

    The check creates and removes a temporary folder in the nearest existing folder. File
    permissions would not be sufficient: they do not show that a file system is read-only, and they
    do not apply to root.
    """
    folder = folder.absolute()
    there = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not there.is_dir():
        raise _cannot_save_error(folder, f"{there} is {_describe_non_folder(there)}")
    try:
        with temporary_folder(".autopipe-check-", there) as made:
            # This test creates the missing folders inside the temporary folder, because a name may
            # be longer than the file system allows. `mkdir` then raises OSError.
            names = [name for name in folder.relative_to(there).parts if name != ".."]
            made.joinpath(*names).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_save_error(
            folder, f"{there} cannot be written to: {error.strerror}"
        ) from error


def _cannot_save_error(folder: Path, reason: str) -> ConfigurationError:
    """Return the error for a folder in which checkpoints cannot be saved."""
    hint = "choose a writable folder with --checkpoint DIR"
    return ConfigurationError(f"checkpoints cannot be written: {reason}", hint, str(folder))


def _describe_non_folder(path: Path) -> str:
    """Return a noun phrase for the object at `path`, which is not a folder, such as "a file"."""
    if not path.exists():
        return "a link to nothing"
    return (
        "a file"
        if path.is_file()
        else "a device"
        if path.is_char_device() or path.is_block_device()
        else "no folder"
    )


def check_not_in_use(folder: Path) -> None:
    """Raise ConfigurationError if another run still holds the lock of `folder` after
    `_SHORT_PATIENCE_S` seconds, or if the lock file cannot be opened. Write nothing.
    """
    try:
        descriptor = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _cannot_save_error(
            folder, f"{folder / _LOCK_FILE} cannot be opened: {error.strerror}"
        ) from error
    deadline = time.monotonic() + _SHORT_PATIENCE_S
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise _in_use_error(folder) from None
                time.sleep(_LOCK_RETRY_S)
                continue
            except OSError:
                # The file system does not support locks, so no run can lock the folder, and the
                # folder counts as not in use.
                pass
            return
    finally:
        os.close(descriptor)


def committed_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in `folder`, in ascending order."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigurationError(
            f"checkpoints cannot be read: {error.strerror}", where=str(folder)
        ) from error
    found = (_COMMITTED_PATTERN.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def check_has_no_checkpoints(folder: Path) -> None:
    """Raise ConfigurationError if `folder` contains checkpoints. A run without --resume must not
    mix its checkpoints with those of another run.
    """
    if steps := committed_steps(folder):
        hint = "resume the run with --resume, or choose another folder"
        raise ConfigurationError(
            f"folder {folder} contains a checkpoint after {steps[-1]} "
            f"{plural(steps[-1], 'step')} of another run",
            hint=hint,
        )


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of step `step` in the run's checkpoint folder
    `folder`.
    """
    return folder / f"step_{step:08d}"


def rank_file(rank: int) -> str:
    """Return the name of the file in which rank `rank` stores its shards."""
    return f"rank_{rank:05d}.safetensors"


def temporary_path(folder: Path, step: int, token: str) -> Path:
    """Return the temporary path of a checkpoint that is being written. `token` distinguishes the
    runs that write to `folder`.
    """
    return folder / f"step_{step:08d}.tmp-{token}"


def remove_leftovers(folder: Path) -> None:
    """Remove the incomplete checkpoints of crashed runs from `folder`, except folders with files
    that do not belong to a checkpoint. The caller must hold the lock of `folder` (`FolderLock`), so
    that no other run is writing a checkpoint.
    """
    with convert_write_errors(folder):
        for path in folder.iterdir():
            if _TEMPORARY_PATTERN.fullmatch(path.name) and _has_only_checkpoint_files(path):
                shutil.rmtree(path)


_PART_FILE_PATTERN = re.compile(r"rank_\d{5,}\.safetensors|manifest\.json")


def _has_only_checkpoint_files(folder: Path) -> bool:
    """Return True if `folder` is a folder, not a link, that contains nothing but files of a
    checkpoint.
    """
    if folder.is_symlink() or not folder.is_dir():
        return False
    return all(
        _PART_FILE_PATTERN.fullmatch(each.name) and not each.is_dir() for each in folder.iterdir()
    )


def commit_checkpoint(temporary: Path, manifest: str) -> Path:
    """Complete the checkpoint in the folder `temporary`: write its manifest, then rename the folder
    to its final name. Return the final path. All other files must be on the disk. Only one rank
    calls this function.
    """
    final = temporary.with_name(temporary.name.partition(".")[0])
    with convert_write_errors(final):
        path = temporary / MANIFEST_FILE
        path.write_text(manifest, encoding="utf-8")
        flush_to_disk(path)
        flush_to_disk(temporary)
        # A restarted run may repeat a step for which it saved a best checkpoint before. Then
        # `final` exists, and is removed or renamed.
        if final.exists():
            if _has_only_checkpoint_files(final):
                _remove_folder(final)
            else:
                os.rename(final, final.with_name(f"{final.name}.kept-{time.time_ns()}"))
        os.rename(temporary, final)
        flush_to_disk(final.parent)
    return final


def remove_old_checkpoints(
    folder: Path, latest: int = DEFAULT_KEPT_CHECKPOINTS, every: int = 0
) -> None:
    """Remove the checkpoints in `folder`, except:

    - the `latest` newest ones (0: remove none),
    - if `every` is not 0, those whose step is a multiple of `every`, and
    - those whose folders contain files that do not belong to a checkpoint.
    """
    old = committed_steps(folder)[:-latest] if latest else []
    _remove_steps(folder, [step for step in old if not every or step % every])


def remove_other_checkpoints(folder: Path, step: int) -> None:
    """Remove all checkpoints in `folder` except that of step `step`, and except those whose folders
    contain files that do not belong to a checkpoint.
    """
    _remove_steps(folder, [each for each in committed_steps(folder) if each != step])


def _remove_steps(folder: Path, steps: Sequence[int]) -> None:
    """Remove the checkpoints of `steps` from `folder`, except those whose folders contain files
    that do not belong to a checkpoint.
    """
    for step in steps:
        old = checkpoint_path(folder, step)
        with convert_write_errors(old):
            if _has_only_checkpoint_files(old):
                _remove_folder(old)


def _remove_folder(old: Path) -> None:
    """Remove the checkpoint in the folder `old`. The folder is renamed first, so that a partly
    removed checkpoint never has the name of a complete one.
    """
    gone = old.with_name(f"{old.name}.tmp-old")
    os.rename(old, gone)
    shutil.rmtree(gone)


def flush_to_disk(path: Path) -> None:
    """Wait until the content of a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the manifest of the checkpoint in the folder `path`. Raise LaunchError if the manifest
    is missing, is damaged or has another format.
    """
    try:
        document = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise _checkpoint_error(path, f"not a checkpoint of format {FORMAT}")
        if document.pop("sha256", None) != _manifest_digest(document):
            raise _damage_error(path, "its manifest has changed")
        return parse_manifest(document, str(path / MANIFEST_FILE))
    except ConfigurationError as error:
        raise _damage_error(path, error.message) from error
    except (OSError, ValueError, RecursionError) as error:
        raise _damage_error(path, repr(error)) from error


def manifest_text(checkpoint: Checkpoint) -> str:
    """Return the text of the manifest file, including its digest."""
    document = manifest_document(checkpoint)
    return json.dumps(document | {"sha256": _manifest_digest(document)}) + "\n"


def _manifest_digest(document: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest as a JSON object without the key `sha256`."""
    return hashlib.sha256(
        json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")
    ).hexdigest()


def manifest_document(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the manifest as a JSON object, without its digest."""
    return {"format": FORMAT, **encode(checkpoint)}


def parse_manifest(document: dict[str, Any], where: str = "") -> Checkpoint:
    """Return the manifest that a JSON object represents. `where` names the file in errors. Raise
    ConfigurationError if a value is missing or invalid.
    """
    found: Checkpoint = decode(JsonRecord(document, where), Checkpoint)
    return found


def numpy_type(dtype: str) -> np.dtype:
    """Return the numpy type of stored elements for an ONNX type name. Raise ValueError for an
    unknown name.
    """
    return DType(dtype).storage_type


def merge_manifests(parts: Sequence[Checkpoint]) -> Checkpoint:
    """Return the manifest of a checkpoint, given the parts that its ranks wrote. The result has the
    files, blocks and generators of all parts; all other fields must be equal in all parts.

    Each part has one file, and the file number in its blocks must already be the number of the
    part.
    """
    pieces: dict[str, list[StoredParameter]] = defaultdict(list)
    for parameter in (parameter for part in parts for parameter in part.parameters):
        pieces[parameter.name].append(parameter)
    return replace(
        parts[0],
        files=tuple(file for part in parts for file in part.files),
        parameters=tuple(_join_parameter(pieces[name]) for name in sorted(pieces)),
        random=tuple(each for part in parts for each in part.random),
    )


def _join_parameter(pieces: Sequence[StoredParameter]) -> StoredParameter:
    """Return one parameter with the blocks of all `pieces`, which are the entries of this parameter
    in the parts of a manifest.
    """
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in (pair for piece in pieces for pair in (("", piece.value), *piece.state)):
        known = tensors.get(name)
        tensors[name] = (
            tensor if known is None else replace(known, blocks=known.blocks + tensor.blocks)
        )
    scalars = dict(scalar for piece in pieces for scalar in piece.scalars)
    value = tensors.pop("")
    state = tuple(sorted(tensors.items()))
    return replace(pieces[0], value=value, state=state, scalars=tuple(sorted(scalars.items())))


_CHUNK_BYTES = 2**22


@dataclass(frozen=True, slots=True, eq=False)
class TensorContent:
    """A tensor to be stored under the safetensors name `key`. `data` has its elements as bytes, in
    row-major order and little-endian.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def write_shard(path: Path, contents: Sequence[TensorContent]) -> tuple[StoredFile, dict[str, int]]:
    """Write tensors to the safetensors file `path` and wait until it is on the disk. Return (file,
    offsets): the description of the file, and the byte offset of each tensor by its key. Raise
    LaunchError if the file cannot be written.
    """
    # Tensors with larger element types are written first. Then the offset of each tensor is a
    # multiple of its element size.
    ordered = sorted(contents, key=lambda each: -numpy_type(each.dtype).itemsize)
    header, offsets, size = safetensors_header(
        (each.key, DType(each.dtype), each.shape) for each in ordered
    )
    digest = hashlib.sha256()
    with convert_write_errors(path), path.open("xb", buffering=0) as file:
        for data in (memoryview(header), *(each.data for each in ordered)):
            for start in range(0, data.nbytes, _CHUNK_BYTES):
                chunk = data[start : start + _CHUNK_BYTES]
                digest.update(chunk)
                while chunk.nbytes:
                    chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return StoredFile(path.name, size, digest.hexdigest()), offsets


def verify_file(path: Path, file: StoredFile) -> None:
    """Read the file `file` of the checkpoint in the folder `path`. Raise LaunchError if its size or
    SHA-256 differs from the manifest.
    """
    where = path / file.name
    try:
        with where.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256")
            size = opened.tell()
    except OSError as error:
        raise _damage_error(path, f"a file cannot be read: {error.strerror}", where) from error
    if size != file.size:
        raise _damage_error(
            path, f"a file has {size} {plural(size, 'byte')}, not {file.size}", where
        )
    if digest.hexdigest() != file.sha256:
        raise _damage_error(path, "the SHA-256 differs", where)


class CheckpointReader:
    """Reader of tensors of the checkpoint in the folder `path`. It does not verify the digests of
    the files; `verify_file` does.
    """

    def __init__(self, path: Path, checkpoint: Checkpoint) -> None:
        self._path = path
        self._files = checkpoint.files
        self._mapped: dict[int, np.ndarray] = {}

    def read(self, tensor: StoredTensor, box: TensorSlice | None = None) -> np.ndarray:
        """Return the slice `box` of a tensor, or the full tensor if `box` is None. Elements of
        bfloat16 are returned as bit patterns of type uint16. Raise LaunchError if the stored blocks
        do not cover the slice.
        """
        wanted = full_slice(tensor.shape) if box is None else box
        found = np.empty(wanted.shape, numpy_type(tensor.dtype))
        elements = 0
        for block in tensor.blocks:
            common = block.box.intersect(wanted)
            if common is not None:
                found[common.relative_to(wanted).slices] = self._read_slice(tensor, block)[
                    common.relative_to(block.box).slices
                ]
                elements += common.elements
        if elements != wanted.elements:
            lacking = (
                f"{wanted.elements - elements} of {wanted.elements} "
                f"{plural(wanted.elements, 'element')} of a tensor"
            )
            raise _checkpoint_error(self._path, f"the checkpoint lacks {lacking}", self._path)
        return found

    def _read_slice(self, tensor: StoredTensor, block: StoredSlice) -> np.ndarray:
        """Return a stored block of a tensor as an array of the block's shape."""
        if block.file not in self._mapped:
            where = self._path / self._files[block.file].name
            try:
                self._mapped[block.file] = np.asarray(np.memmap(where, dtype=np.uint8, mode="r"))
            except (OSError, ValueError) as error:
                raise _damage_error(self._path, f"a file cannot be read: {error}", where) from error
        dtype = numpy_type(tensor.dtype)
        size = math.prod(block.box.shape) * dtype.itemsize
        data = self._mapped[block.file][block.offset : block.offset + size]
        if data.size != size:
            raise _damage_error(
                self._path,
                f"a file ends after {data.size} of {count_text(size, 'byte')} of a tensor",
                block.key,
            )
        return data.view(dtype).reshape(block.box.shape)


def check_checkpoint(
    path: Path, checkpoint: Checkpoint, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Verify all files and tensors of the checkpoint in the folder `path`. Raise LaunchError for
    the first damaged file or tensor. `progress` is called with the size in bytes of each file that
    has been verified.
    """
    for name, tensor in tensors_of(checkpoint):
        if flaw := _first_defect(tensor, checkpoint):
            raise _damage_error(path, f"{name}: {flaw}")
    for file in checkpoint.files:
        verify_file(path, file)
        progress(file.size)


def tensors_of(checkpoint: Checkpoint) -> Iterator[tuple[str, StoredTensor]]:
    """Yield (name, tensor) for each stored tensor of a checkpoint: values and optimizer state of
    parameters, and states of random number generators. The name is for messages.
    """
    for parameter in checkpoint.parameters:
        yield f"parameter {parameter.name!r}", parameter.value
        for name, tensor in parameter.state:
            yield f"{name} of parameter {parameter.name!r}", tensor
    for generator in checkpoint.random:
        yield f"the random numbers of rank {generator.rank} on {generator.device}", generator.state


def _first_defect(tensor: StoredTensor, checkpoint: Checkpoint) -> str:
    """Return a description of the first defect of a tensor's blocks, or "" if they have none. The
    blocks must lie inside the tensor and inside their files, cover the tensor, and not overlap.
    """
    try:
        size = numpy_type(tensor.dtype).itemsize
    except ValueError:
        return f"there is no element type {tensor.dtype!r}"
    everything = full_slice(tensor.shape)
    rank = len(tensor.shape)
    for block in tensor.blocks:
        box = block.box
        if len(box.starts) != rank or len(box.stops) != rank:
            return (
                f"a block has {len(box.starts)} {plural(len(box.starts), 'dimension')}, not {rank}"
            )
        if any(stop < start for start, stop in zip(box.starts, box.stops, strict=True)):
            return "a block ends before it begins"
        if box.elements and box.intersect(everything) != box:
            return f"a block {box.starts} to {box.stops} lies outside of its shape {tensor.shape}"
        if not 0 <= block.file < len(checkpoint.files):
            return f"a block lies in file {block.file} of {len(checkpoint.files)}"
        if not 0 <= block.offset <= checkpoint.files[block.file].size - box.elements * size:
            return f"a block ends behind the end of {checkpoint.files[block.file].name}"
    stored = sum(block.box.elements for block in tensor.blocks)
    if stored != everything.elements:
        return (
            f"its blocks have {stored} {plural(stored, 'element')}, its shape {everything.elements}"
        )
    return "two of its blocks overlap" if _has_overlapping_slices(tensor) else ""


def _has_overlapping_slices(tensor: StoredTensor) -> bool:
    """Return True if two blocks of a tensor have an element in common."""
    blocks = [block.box for block in tensor.blocks if block.box.elements]
    starts, stops = (
        np.array([getattr(box, ends) for box in blocks]) for ends in ("starts", "stops")
    )
    return any(
        ((starts[number + 1 :] < stops[number]) & (starts[number] < stops[number + 1 :]))
        .all(axis=1)
        .any()
        for number in range(len(blocks) - 1)
    )
