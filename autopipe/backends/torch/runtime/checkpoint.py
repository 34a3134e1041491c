"""Saves all ranks' states as one checkpoint while the steps go on, and restores the newest that was committed.

A program resumes from a checkpoint of the same model and kind of optimizer, whatever the plans are.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from autopipe.backends.torch.checkpoint import format as files
from autopipe.backends.torch.checkpoint.read import FolderLock, Reader, verify_file
from autopipe.backends.torch.runtime.checkpoint_state import (
    SavedBlock,
    TrainingState,
    tensor_of,
    write_blocks,
)
from autopipe.backends.torch.runtime.data import Position
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.transport import ControlGroup
from autopipe.ir.errors import AutopipeError, ConfigurationError, LaunchError
from autopipe.ir.layout import Box


class Background:
    """Runs jobs beside the steps, one after the other. What a job raises comes out of `end`."""

    def __init__(self) -> None:
        self._job: Future[None] | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Start a job; the one before must have been ended."""
        assert self._job is None
        self._job = future = Future[None]()

        def run() -> None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
                future.set_exception(error)
            else:
                future.set_result(None)

        # Never waited for by the interpreter: a rank that fails must not hang on a job whose peers are gone.
        Thread(target=run, name="checkpoint", daemon=True).start()

    def end(self, timeout_s: float | None = None) -> bool:
        """Wait for the job, if there is one; True if it has ended. Raises what the job raised."""
        if self._job is not None:
            if not wait([self._job], timeout_s).done:
                return False
            job, self._job = self._job, None
            job.result()
        return True


class HostCopies:
    """Copies by key, in buffers that the next ones overwrite; page-locked where the tensors are on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._buffers: dict[str, torch.Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        """Start to copy; what a GPU does after this call leaves the copies as they are."""
        for key in self._buffers.keys() - tensors.keys():
            del self._buffers[key]
        for key, tensor in tensors.items():
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype is not tensor.dtype:
                # Pinned pages where a copy runs beside the GPU's work; a generator's state is on the host already.
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._cuda)
                self._buffers[key] = buffer
            buffer.copy_(tensor.detach(), non_blocking=True)
        if self._cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def contents(self) -> list[files.Content]:
        """Wait for the copies, and give them as what a file holds."""
        if self._copied is not None:
            self._copied.synchronize()
        return [
            files.Content(key, _dtype_name(each), tuple(each.shape), each.reshape(-1).view(torch.uint8).numpy().data)
            for key, each in self._buffers.items()
        ]


def _dtype_name(tensor: torch.Tensor) -> str:
    """ONNX's name of a tensor's element type, which is torch's."""
    return str(tensor.dtype).removeprefix("torch.")


_DIGITS = 12
"""Of a digest, enough to tell two apart."""


def check_identity(checkpoint: files.Checkpoint, manifest: Manifest, path: Path) -> None:
    """Raise ConfigurationError, with the first difference, unless the checkpoint is of the program's model."""
    difference = next(_differences(checkpoint, manifest), None)
    if difference is not None:
        hint = "choose another --checkpoint folder"
        raise ConfigurationError(f"the checkpoint is of another {difference}", hint=hint, where=str(path))


def _differences(checkpoint: files.Checkpoint, manifest: Manifest) -> Iterator[str]:
    saved = {each.name: each.value for each in checkpoint.parameters}
    for index in sorted({shard.parameter for shards in manifest.shards for shard in shards}):
        entry = manifest.parameters[index]
        found = saved.get(entry.name)
        if found is None:
            yield f"model: it has no parameter {entry.name!r}"
        elif (found.dtype, found.shape) != (entry.dtype, entry.shape):
            there, here = (f"{each.dtype} {list(each.shape)}" for each in (found, entry))
            yield f"model: its parameter {entry.name!r} is {there}, the program's is {here}"
    for name in sorted(saved.keys() - {entry.name for entry in manifest.parameters}):
        yield f"model: it has a parameter {name!r}, the program has none"
    if checkpoint.model_digest != manifest.model_digest:
        there, here = (digest[:_DIGITS] or "none" for digest in (checkpoint.model_digest, manifest.model_digest))
        yield f"model: {checkpoint.model} had digest {there}, the program's {manifest.model} has {here}"
    there, here = _kind(checkpoint.optimizer), _kind(manifest.optimizer)
    if there != here:
        yield f"optimizer: {there}, the program's is {here}"


def _kind(optimizer: dict[str, Any]) -> str:
    """Settings of the optimizer that decide which state it keeps; learning rates and the like may change."""
    name = str(optimizer["name"])
    return f"{name} with momentum" if name == "sgd" and optimizer["momentum"] else name


def _stored(key: str, tensor: torch.Tensor, shape: tuple[int, ...], box: Box) -> files.StoredTensor:
    return files.StoredTensor(_dtype_name(tensor), shape, (files.Block(box, 0, 0, key),))


def located(part: files.Checkpoint, file: files.StoredFile, offsets: Mapping[str, int]) -> files.Checkpoint:
    def found(tensor: files.StoredTensor) -> files.StoredTensor:
        return replace(tensor, blocks=tuple(replace(block, offset=offsets[block.key]) for block in tensor.blocks))

    return replace(
        part,
        files=(file,),
        parameters=tuple(
            replace(each, value=found(each.value), state=tuple((name, found(own)) for name, own in each.state))
            for each in part.parameters
        ),
        random=tuple(replace(each, state=found(each.state)) for each in part.random),
    )


_LOOK_S = 0.1


class Checkpointer:
    """One rank's part in the checkpoints of a run; all ranks do the same, together."""

    def __init__(self, folder: Path, manifest: Manifest, state: TrainingState, control_group: ControlGroup) -> None:
        """`control_group` must serve nothing else: a save uses it while the steps go on.

        Raises ConfigurationError where another run saves in the folder, LaunchError where it cannot be written.
        """
        self._folder = folder
        self._manifest = manifest
        self._state = state
        self._control_group = control_group
        self._copies = HostCopies(state.device)
        self._pieces = write_blocks(manifest)[control_group.rank]
        self._background = Background()
        self._lock: FolderLock | None = None
        control_group.run_collectively("checkpoint", self._take_folder)

    def _take_folder(self) -> None:
        if self._control_group.rank == 0:
            self._lock = FolderLock(self._folder)

    def save(self, position: Position, seed: int) -> None:
        """Commit the state at this position, while the next steps run. Waits for the save before to end.

        Raises what ended that one.
        """
        self.wait()
        self._background.start(partial(self._write, self._take_snapshot(position, seed)))

    def _take_snapshot(self, position: Position, seed: int) -> files.Checkpoint:
        """Start to copy what the rank writes. Returns its manifest, which lacks file and offsets."""
        manifest, blocks = self._manifest, list(self._state.blocks(self._pieces))
        states = self._state.generators()
        self._copies.take(
            {block.key: block.tensor for block in blocks}
            | {f"random.{device}": tensor for device, tensor in states.items()}
        )
        return files.Checkpoint(
            model=str(manifest.model),
            model_digest=manifest.model_digest,
            plan=manifest.plan,
            world_size=manifest.world_size,
            step=position.steps,
            samples=position.samples,
            seed=seed,
            optimizer=manifest.optimizer,
            files=(),
            parameters=tuple(self._parameters(blocks)),
            random=tuple(
                files.StoredGenerator(
                    self._control_group.rank,
                    device,
                    _stored(f"random.{device}", tensor, tuple(tensor.shape), Box((0,), tuple(tensor.shape))),
                )
                for device, tensor in states.items()
            ),
        )

    def _parameters(self, blocks: Iterable[SavedBlock]) -> Iterator[files.StoredParameter]:
        by_parameter: dict[int, dict[str, files.StoredTensor]] = {}
        for block in blocks:
            index = block.piece.parameter
            part = _stored(block.key, block.tensor, self._manifest.parameters[index].shape, block.piece.box)
            tensors = by_parameter.setdefault(index, {})
            if block.state in tensors:
                part = replace(part, blocks=(*tensors[block.state].blocks, *part.blocks))
            tensors[block.state] = part
        for index, tensors in by_parameter.items():
            entry, value = self._manifest.parameters[index], tensors.pop("")
            counters = self._state.counters(index)
            yield files.StoredParameter(entry.name, entry.trainable, value, tuple(tensors.items()), counters)

    def wait(self) -> None:
        """Wait until what is being saved is committed. Raises LaunchError where it could not be."""
        while not self._background.end(_LOOK_S):
            if self._control_group.waits:
                with self._control_group.heartbeat.waiting():
                    while self._control_group.waits and not self._background.end(_LOOK_S):
                        pass

    def look(self) -> None:
        """Raise what has ended the save that runs, if something has."""
        self._background.end(0.0)

    def close(self) -> None:
        """Wait for the last save, and leave the folder to others."""
        self.wait()
        if self._lock is not None:
            self._lock.release()

    def _write(self, part: files.Checkpoint) -> None:
        """On a thread of its own: files of all ranks, then the commit."""
        together, rank = partial(self._control_group.run_collectively, "checkpoint"), self._control_group.rank
        temporary = self._folder / together(partial(self._begin, part.step))[0]
        try:
            parts = together(partial(self._write_part, part, temporary))
            together(partial(self._commit, temporary, parts))
        except AutopipeError:
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _begin(self, step: int) -> str:
        """Rank 0 makes the folder, whose name all take."""
        if self._lock is None:
            return ""
        if self._lock.held:
            files.remove_leftovers(self._folder)
        temporary = files.temporary_path(self._folder, step, f"{os.getpid()}-{secrets.token_hex(4)}")
        with files.writing(temporary):
            temporary.mkdir()
        return temporary.name

    def _write_part(self, part: files.Checkpoint, temporary: Path) -> dict[str, Any]:
        if not temporary.is_dir():
            hint = "all nodes must share it"
            raise LaunchError("rank 0's checkpoint folder is not here", hint=hint, where=str(temporary))
        path = temporary / files.rank_file(self._control_group.rank)
        return files.document_of(located(part, *files.write_shard(path, self._copies.contents())))

    def _commit(self, temporary: Path, parts: list[dict[str, Any]]) -> None:
        if self._control_group.rank == 0:
            files.commit(temporary, files.text_of(files.merged([files.parsed(each) for each in parts])))
            files.prune(self._folder)

    def restore(self) -> files.Checkpoint | None:
        """Put the newest committed state in place. Returns its manifest, None where there is none.

        Raises ConfigurationError for a checkpoint of another model, LaunchError for a damaged one.
        """
        together, rank, size = (
            partial(self._control_group.run_collectively, "restore"),
            self._control_group.rank,
            self._control_group.world_size,
        )
        newest = together(self._newest)
        if any(each != newest[0] for each in newest):
            steps = ", ".join(sorted({str(step) for step, _ in newest}))
            reason = f"ranks see different newest checkpoints: steps {steps}"
            raise LaunchError(reason, hint="all nodes must share the folder", where=str(self._folder))
        step, _ = newest[0]
        if not step:
            return None
        path = files.checkpoint_path(self._folder, step)
        checkpoint = files.read_checkpoint(path)
        check_identity(checkpoint, self._manifest, path)

        def verify() -> None:
            for file in checkpoint.files[rank::size]:
                verify_file(path, file)

        together(verify)
        self._put_in_place(Reader(path, checkpoint), checkpoint)
        return checkpoint

    def _newest(self) -> tuple[int, str]:
        """The newest checkpoint's step, 0 where there is none, and the digest of its manifest."""
        step = max(files.committed_steps(self._folder), default=0)
        try:
            manifest = (files.checkpoint_path(self._folder, step) / files.MANIFEST).read_bytes()
        except OSError:
            manifest = b""  # To read it will say what is wrong.
        return step, hashlib.sha256(manifest).hexdigest()

    def _put_in_place(self, reader: Reader, checkpoint: files.Checkpoint) -> None:
        """This rank's blocks, and where its random numbers go on: as they would have under the same plan."""
        self._state.restore(reader, {each.name: each for each in checkpoint.parameters})
        manifest, rank = self._manifest, self._control_group.rank
        if (checkpoint.plan, checkpoint.world_size) == (manifest.plan, manifest.world_size):
            own = (each for each in checkpoint.random if each.rank == rank)
            self._state.restore_generators({each.device: tensor_of(reader.read(each.state), "uint8") for each in own})
        else:
            self._state.seed_generators(checkpoint.seed, checkpoint.step, rank)
