"""Saves all ranks' states as one checkpoint while the steps go on, and restores the newest that was
committed. A program resumes from a checkpoint of the same model and kind of optimizer, whatever the
plans are.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch

from autopipe.backends.torch import checkpoint as files
from autopipe.backends.torch.checkpoint import FolderLock, Reader, verify_file
from autopipe.backends.torch.runtime.communication.transport import ControlGroup
from autopipe.backends.torch.runtime.data.sample_order import Position
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.state.checkpoint_state import (
    SavedBlock,
    TrainingState,
    write_blocks,
)
from autopipe.backends.torch.runtime.state.parameters import dtype_name, tensor_of
from autopipe.ir.errors import AutopipeError, ConfigurationError, LaunchError
from autopipe.ir.layout import TensorSlice, full_slice


class HostCopies:
    """Copies by key, in buffers that the next ones overwrite; page-locked where the tensors are on
    a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: dict[str, torch.Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Start to copy. On a GPU the copies are made beside its work, of what it has been given up
        to now; who then writes to the tensors calls `before_write`.
        """
        for key in self._buffers.keys() - tensors.keys():
            del self._buffers[key]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for key, tensor in tensors.items():
                buffer = self._buffers.get(key)
                if (
                    buffer is None
                    or buffer.shape != tensor.shape
                    or buffer.dtype is not tensor.dtype
                ):
                    # Pinned pages where a copy runs beside the GPU's work; a generator's state is
                    # on the host already.
                    buffer = torch.empty(
                        tensor.shape, dtype=tensor.dtype, pin_memory=self._stream is not None
                    )
                    self._buffers[key] = buffer
                buffer.copy_(tensor.detach(), non_blocking=True)
            if self._stream is not None:
                self._copied = torch.cuda.Event()
                self._copied.record()

    def before_write(self) -> None:
        """Let the GPU do what it is given from now on behind the copies."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def contents(self) -> list[files.Content]:
        """Wait for the copies, and give them as the contents of a file."""
        if self._copied is not None:
            self._copied.synchronize()
        return [
            files.Content(
                key,
                dtype_name(each.dtype),
                tuple(each.shape),
                each.reshape(-1).view(torch.uint8).numpy().data,
            )
            for key, each in self._buffers.items()
        ]


_DIGITS = 12  # Of a digest, enough to tell two apart.


def _differences(checkpoint: files.Checkpoint, manifest: Manifest) -> Iterator[str]:
    """In how far a checkpoint is of another model, or optimizer, than the program's."""
    saved = {each.name: each.value for each in checkpoint.parameters}
    for index in sorted({shard.parameter for shards in manifest.shards for shard in shards}):
        value = manifest.parameters[index].value
        found = saved.get(value.name)
        if found is None:
            yield f"model: it has no parameter {value.name!r}"
        elif (found.dtype, found.shape) != (value.dtype.value, value.shape):
            there = f"{found.dtype} {list(found.shape)}"
            here = f"{value.dtype.value} {list(value.shape)}"
            yield f"model: its parameter {value.name!r} is {there}, the program's is {here}"
    for name in sorted(saved.keys() - {each.value.name for each in manifest.parameters}):
        yield f"model: it has a parameter {name!r}, the program has none"
    if checkpoint.model_digest != manifest.model_digest:
        there, here = (
            digest[:_DIGITS] or "none"
            for digest in (checkpoint.model_digest, manifest.model_digest)
        )
        yield (
            f"model: {checkpoint.model} had digest {there}, the program's {manifest.model} has "
            f"{here}"
        )
    there = _kind(checkpoint.optimizer)
    here = _kind(manifest.optimizer)
    if there != here:
        yield f"optimizer: {there}, the program's is {here}"


def _kind(optimizer: dict[str, Any]) -> str:
    """Settings of the optimizer that decide which state it keeps; learning rates and the like may
    change.
    """
    name = str(optimizer["name"])
    return f"{name} with momentum" if name == "sgd" and optimizer["momentum"] else name


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of one rank at a step, but for the numbers, of which `HostCopies` has the
    copies.
    """

    position: Position
    seed: int
    blocks: Sequence[SavedBlock]
    counters: Mapping[int, tuple[tuple[str, float], ...]]  # By parameter.
    generators: Mapping[str, torch.Tensor]  # States by device.
    loss_scale: tuple[float, int] | None = None
    eval_loss: float | None = None
    """Where it is the best state so far."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All that is written, by key."""
        random = {f"random.{device}": state for device, state in self.generators.items()}
        return {block.key: block.tensor for block in self.blocks} | random

    def checkpoint(
        self, manifest: Manifest, rank: int, file: files.StoredFile, offsets: Mapping[str, int]
    ) -> files.Checkpoint:
        """The rank's part of the checkpoint's manifest: its file, and where in it each tensor
        lies.
        """

        def stored(
            key: str, tensor: torch.Tensor, shape: tuple[int, ...], box: TensorSlice
        ) -> files.StoredTensor:
            return files.StoredTensor(
                dtype_name(tensor.dtype), shape, (files.Block(box, rank, offsets[key], key),)
            )

        parameters = []
        for index, blocks in groupby(self.blocks, key=lambda block: block.piece.parameter):
            parameter = manifest.parameters[index]
            tensors = dict[str, files.StoredTensor]()
            for block in blocks:
                part = stored(block.key, block.tensor, parameter.value.shape, block.piece.box)
                known = tensors.get(block.state)
                tensors[block.state] = (
                    part if known is None else replace(part, blocks=known.blocks + part.blocks)
                )
            value = tensors.pop("")
            parameters.append(
                files.StoredParameter(
                    parameter.value.name,
                    parameter.trainable,
                    value,
                    tuple(tensors.items()),
                    self.counters[index],
                )
            )
        random = [
            files.StoredGenerator(
                rank,
                device,
                stored(
                    f"random.{device}", state, tuple(state.shape), full_slice(tuple(state.shape))
                ),
            )
            for device, state in self.generators.items()
        ]
        return files.Checkpoint(
            model=str(manifest.model),
            model_digest=manifest.model_digest,
            plan=manifest.plan,
            world_size=manifest.world_size,
            step=self.position.steps,
            samples=self.position.samples,
            seed=self.seed,
            optimizer=manifest.optimizer,
            files=(file,),
            parameters=tuple(parameters),
            random=tuple(random),
            loss_scale=None if self.loss_scale is None else files.LossScale(*self.loss_scale),
            eval_loss=self.eval_loss,
            forwards=self.position.forwards,
        )


_LOOK_S = 0.1


class Checkpointer:
    """One rank's part in the checkpoints of a run; all ranks do the same, together."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        state: TrainingState,
        control_group: ControlGroup,
        keep_latest_k: int = files.KEPT,
        keep_every: int = 0,
        run: str | None = None,
    ) -> None:
        """`control_group` must serve nothing else: a save uses it while the steps go on.
        `keep_latest_k` and `keep_every` are as in `files.prune`. `run` names a launch that starts
        anew: the folder may then hold checkpoints of this launch alone. Raises ConfigurationError
        where another run saves in the folder, LaunchError where it cannot be written.
        """
        self._kept = keep_latest_k, keep_every
        self._run = run
        self._folder = folder
        self._manifest = manifest
        self._state = state
        self._control_group = control_group
        self._copies = HostCopies(state.device)
        self._pieces = write_blocks(manifest)[control_group.rank]
        self._saving: Future[None] | None = None
        self._lock: FolderLock | None = None
        control_group.run_collectively("checkpoint", self._take_folder)

    def _take_folder(self) -> None:
        if self._control_group.rank == 0:
            self._lock = FolderLock(self._folder)
            if self._run is not None:
                self._lock.claim(self._run)

    def save(self, position: Position, seed: int, eval_loss: float | None = None) -> None:
        """Commit the state at this position, while the next steps run; as the best so far where
        `eval_loss` is given. Waits for the save before to end. Raises what ended that one.
        """
        self.wait()
        state = self._state
        counters = state.counters({piece.parameter for piece in self._pieces})
        scale = None if state.loss_scaler is None else state.loss_scaler.state()
        snapshot = Snapshot(
            position,
            seed,
            list(state.blocks(self._pieces)),
            counters,
            state.generators(),
            scale,
            eval_loss,
        )
        self._copies.take(snapshot.tensors)
        self._saving = future = Future[None]()

        def run() -> None:
            try:
                self._write(snapshot)
            except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
                future.set_exception(error)
            else:
                future.set_result(None)

        # Never waited for by the interpreter: a rank that fails must not hang on a job whose peers
        # are gone.
        Thread(target=run, name="checkpoint", daemon=True).start()

    def before_update(self) -> None:
        """To be called before what is being saved changes."""
        self._copies.before_write()

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Wait for the save that runs, if there is one, up to `timeout_s`. Raises what has ended
        it.
        """
        if self._saving is not None:
            if not wait([self._saving], timeout_s).done:
                return False
            saving = self._saving
            self._saving = None
            saving.result()
        return True

    def wait(self) -> None:
        """Wait until what is being saved is committed. Raises LaunchError where it could not be."""
        while not self.has_ended(_LOOK_S):
            if self._control_group.waits:
                with self._control_group.heartbeat.waiting():
                    while self._control_group.waits and not self.has_ended(_LOOK_S):
                        pass

    def close(self) -> None:
        """Wait for the last save, and leave the folder to others."""
        self.wait()
        if self._lock is not None:
            self._lock.release()

    def _write(self, snapshot: Snapshot) -> None:
        """On a thread of its own: files of all ranks, then the commit."""
        together: Callable[[Callable[[], Any]], list[Any]]
        together = partial(self._control_group.run_collectively, "checkpoint")
        rank = self._control_group.rank
        step = snapshot.position.steps
        is_best = snapshot.eval_loss is not None
        folder = self._folder / files.BEST if is_best else self._folder
        temporary = folder / together(partial(self._begin, folder, step))[0]

        def write() -> dict[str, Any]:
            if not temporary.is_dir():
                hint = "all nodes must share it"
                raise LaunchError(
                    "rank 0's checkpoint folder is not here", hint=hint, where=str(temporary)
                )
            written = files.write_shard(temporary / files.rank_file(rank), self._copies.contents())
            return files.document_of(snapshot.checkpoint(self._manifest, rank, *written))

        def commit() -> None:
            if rank == 0:
                files.commit(
                    temporary, files.text_of(files.merged([files.parsed(each) for each in parts]))
                )
                if is_best:
                    files.keep_only(folder, step)
                else:
                    files.prune(folder, *self._kept)

        try:
            parts = together(write)
            together(commit)
        except AutopipeError:
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _begin(self, folder: Path, step: int) -> str:
        """Rank 0 makes the folder, whose name all take."""
        if self._lock is None:
            return ""
        with files.writing(folder):
            folder.mkdir(exist_ok=True)
        if self._lock.held:
            files.remove_leftovers(folder)
        temporary = files.temporary_path(folder, step, f"{os.getpid()}-{secrets.token_hex(4)}")
        with files.writing(temporary):
            temporary.mkdir()
        return temporary.name

    def best(self) -> tuple[float, int] | None:
        """The lowest validation loss whose state is kept, and the number of its last step."""
        folder = self._folder / files.BEST
        found = [
            files.read_checkpoint(files.checkpoint_path(folder, step))
            for step in files.committed_steps(folder)
        ]
        return min(
            ((each.eval_loss, each.step - 1) for each in found if each.eval_loss is not None),
            default=None,
        )

    def restore(self) -> files.Checkpoint | None:
        """Put the newest committed state in place. Returns its manifest, None where there is none.
        Random numbers go on as they would have under the same plan. Raises ConfigurationError for a
        checkpoint of another model, LaunchError for a damaged one.
        """
        group = self._control_group
        manifest = self._manifest

        def newest_step() -> tuple[int, str]:
            """Of the newest checkpoint, 0 where there is none, and the digest of its manifest."""
            step = max(files.committed_steps(self._folder), default=0)
            try:
                text = (files.checkpoint_path(self._folder, step) / files.MANIFEST).read_bytes()
            except OSError:
                text = b""  # To read it will say what is wrong.
            return step, hashlib.sha256(text).hexdigest()

        newest = group.run_collectively("restore", newest_step)
        if any(each != newest[0] for each in newest):
            steps = ", ".join(sorted({str(step) for step, _ in newest}))
            reason = f"ranks see different newest checkpoints: steps {steps}"
            raise LaunchError(
                reason, hint="all nodes must share the folder", where=str(self._folder)
            )
        step, _ = newest[0]
        if not step:
            return None
        path = files.checkpoint_path(self._folder, step)
        checkpoint = files.read_checkpoint(path)
        for difference in _differences(checkpoint, manifest):
            hint = "choose another --checkpoint folder"
            raise ConfigurationError(
                f"the checkpoint is of another {difference}", hint=hint, where=str(path)
            )

        def verify() -> None:
            for file in checkpoint.files[group.rank :: group.world_size]:
                verify_file(path, file)

        group.run_collectively("restore", verify)
        reader = Reader(path, checkpoint)
        self._state.restore(reader, {each.name: each for each in checkpoint.parameters})
        if self._state.loss_scaler is not None and (saved := checkpoint.loss_scale) is not None:
            self._state.loss_scaler.restore(saved.scale, saved.good_steps)
        if (checkpoint.plan, checkpoint.world_size) == (manifest.plan, manifest.world_size):
            own = (each for each in checkpoint.random if each.rank == group.rank)
            self._state.restore_generators(
                {each.device: tensor_of(reader.read(each.state), "uint8") for each in own}
            )
        else:
            seeds = np.random.SeedSequence(
                (checkpoint.seed, checkpoint.step, group.rank)
            ).generate_state(1, np.uint64)
            torch.manual_seed(int(seeds[0] >> np.uint64(1)))
        return checkpoint
