"""Checkpoints of a run. All ranks save their states together as one checkpoint, while the next
steps run. They restore the newest committed checkpoint, one whose files and manifest are complete.

A program can resume from a checkpoint of an equal model with an equal kind of optimizer. Its plan
may differ from the plan of the program that wrote the checkpoint.
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
from autopipe.backends.torch.checkpoint import CheckpointReader, FolderLock, verify_file
from autopipe.backends.torch.runtime.communication.transport import ControlGroup
from autopipe.backends.torch.runtime.data.sample_order import RunProgress
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.state.checkpoint_state import (
    SavedBlock,
    TrainingState,
    assign_blocks_to_ranks,
)
from autopipe.backends.torch.runtime.state.parameters import dtype_name, tensor_from_array
from autopipe.ir.errors import AutopipeError, ConfigurationError, LaunchError
from autopipe.ir.layout import TensorSlice, full_slice


class HostCopies:
    """Copies of tensors in host memory, by key. Each call of `start_copies` reuses the buffers of
    the previous call and overwrites them. If `device` is a GPU, the buffers are page-locked.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: dict[str, torch.Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def start_copies(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Start to copy `tensors`, and free the buffers of other keys.

        On a GPU the copies run on a separate stream, after all work that is in the current stream
        now. Before further work that changes the tensors, call `delay_until_copied`.
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
                    # Page-locked memory is required, because otherwise copies do not overlap the
                    # work of the GPU.
                    buffer = torch.empty(
                        tensor.shape, dtype=tensor.dtype, pin_memory=self._stream is not None
                    )
                    self._buffers[key] = buffer
                buffer.copy_(tensor.detach(), non_blocking=True)
            if self._stream is not None:
                self._copied = torch.cuda.Event()
                self._copied.record()

    def delay_until_copied(self) -> None:
        """Make work that is put into the current GPU stream from now on wait for the copies."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def contents(self) -> list[files.TensorContent]:
        """Wait until the copies have ended. Return the contents of a checkpoint file, which share
        memory with the buffers.
        """
        if self._copied is not None:
            self._copied.synchronize()
        return [
            files.TensorContent(
                key,
                dtype_name(each.dtype),
                tuple(each.shape),
                each.reshape(-1).view(torch.uint8).numpy().data,
            )
            for key, each in self._buffers.items()
        ]


_DIGEST_DIGITS = 12  # Number of leading hexadecimal digits of a digest that messages show.


def _differences_from_manifest(checkpoint: files.Checkpoint, manifest: Manifest) -> Iterator[str]:
    """Yield a message for each difference, in model or kind of optimizer, between a checkpoint and
    the program with this manifest. The program can resume from the checkpoint if there is none.
    """
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
            digest[:_DIGEST_DIGITS] or "none"
            for digest in (checkpoint.model_digest, manifest.model_digest)
        )
        yield (
            f"model: {checkpoint.model} had digest {there}, the program's {manifest.model} has "
            f"{here}"
        )
    there = _optimizer_name(checkpoint.optimizer)
    here = _optimizer_name(manifest.optimizer)
    if there != here:
        yield f"optimizer: {there}, the program's is {here}"


def _optimizer_name(optimizer: dict[str, Any]) -> str:
    """Return the kind of an optimizer with these settings, which determines the state tensors that
    it has: its name, followed by " with momentum" for SGD with momentum. Other settings, for
    example the learning rate, may change between runs.
    """
    name = str(optimizer["name"])
    return f"{name} with momentum" if name == "sgd" and optimizer["momentum"] else name


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of one rank after a step, to be saved in a checkpoint. Later steps overwrite the
    tensors in it, so `HostCopies` copies their values.
    """

    position: RunProgress
    seed: int
    blocks: Sequence[SavedBlock]
    # Scalar optimizer state by parameter index, as (name, value) pairs.
    counters: Mapping[int, tuple[tuple[str, float], ...]]
    generators: Mapping[str, torch.Tensor]  # States of torch's random generators by device type.
    loss_scale: tuple[float, int] | None = None
    eval_loss: float | None = None
    """Validation loss, if this state is saved as the state with the lowest loss so far; None for a
    regular checkpoint.
    """

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors that this rank writes, by their key in the rank's file."""
        random = {f"random.{device}": state for device, state in self.generators.items()}
        return {block.key: block.tensor for block in self.blocks} | random

    def manifest_part(
        self, manifest: Manifest, rank: int, file: files.StoredFile, offsets: Mapping[str, int]
    ) -> files.Checkpoint:
        """Return this rank's part of the manifest of the checkpoint. `files.merge_manifests` merges
        the parts of all ranks.

        `rank` has written `file`; `offsets` has the position of each tensor in the file, in bytes,
        by key.
        """

        def tensor_entry(
            key: str, tensor: torch.Tensor, shape: tuple[int, ...], box: TensorSlice
        ) -> files.StoredTensor:
            """Return the entry of a tensor that consists of one slice, `box`, of a full tensor of
            shape `shape`.
            """
            return files.StoredTensor(
                dtype_name(tensor.dtype), shape, (files.StoredSlice(box, rank, offsets[key], key),)
            )

        parameters = []
        for index, blocks in groupby(self.blocks, key=lambda block: block.piece.parameter):
            parameter = manifest.parameters[index]
            tensors = dict[str, files.StoredTensor]()
            for block in blocks:
                part = tensor_entry(block.key, block.tensor, parameter.value.shape, block.piece.box)
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
                tensor_entry(
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


_POLL_INTERVAL_S = 0.1


class Checkpointer:
    """Saves and restores the checkpoints of a run, as seen by one rank. All ranks must call its
    methods with equal arguments in the same order.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        state: TrainingState,
        control_group: ControlGroup,
        keep_latest_k: int = files.DEFAULT_KEPT_CHECKPOINTS,
        keep_every: int = 0,
        run: str | None = None,
    ) -> None:
        """Lock the folder, on rank 0, so that no other run saves in it. Collective over all ranks.

        `control_group` must not be used for anything else, because a save uses it while steps run.
        `keep_latest_k` and `keep_every` are the arguments `latest` and `every` of
        `files.remove_old_checkpoints`. `run` names a launch that starts from the beginning; the
        folder must then have no checkpoints of other launches.

        Raise ConfigurationError if another run saves in the folder or the folder has such
        checkpoints, and LaunchError if the folder cannot be written.
        """
        self._kept = keep_latest_k, keep_every
        self._run = run
        self._folder = folder
        self._manifest = manifest
        self._state = state
        self._control_group = control_group
        self._copies = HostCopies(state.device)
        self._pieces = assign_blocks_to_ranks(manifest)[control_group.rank]
        self._saving: Future[None] | None = None
        self._lock: FolderLock | None = None
        control_group.run_collectively("checkpoint", self._lock_folder)

    def _lock_folder(self) -> None:
        """Lock the folder on rank 0, and claim it for the launch if it starts from the
        beginning.
        """
        if self._control_group.rank == 0:
            self._lock = FolderLock(self._folder)
            if self._run is not None:
                self._lock.claim(self._run)

    def save(self, position: RunProgress, seed: int, eval_loss: float | None = None) -> None:
        """Start to save the state at `position` on a background thread. Returns before the save has
        ended, so that further steps can run.

        If `eval_loss` is given, the state is saved as the best state so far instead of as a regular
        checkpoint. A previous save is waited for first; if it failed, its error is raised.
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
        self._copies.start_copies(snapshot.tensors)
        self._saving = future = Future[None]()

        def run() -> None:
            """Write the snapshot and store the outcome in `future`."""
            try:
                self._write(snapshot)
            except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
                future.set_exception(error)
            else:
                future.set_result(None)

        # The interpreter does not wait for a daemon thread at exit. So a rank that fails can end,
        # even if this thread waits for ranks that have ended.
        Thread(target=run, name="checkpoint", daemon=True).start()

    def delay_update_until_copied(self) -> None:
        """Make the GPU wait until the running save has copied the state. Must be called before
        parameters or optimizer state change.
        """
        self._copies.delay_until_copied()

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Wait for the running save, for at most `timeout_s` seconds. Return True if it has ended
        or if there is none, False if it still runs. Raise its error if it failed.
        """
        if self._saving is not None:
            if not wait([self._saving], timeout_s).done:
                return False
            saving = self._saving
            self._saving = None
            saving.result()
        return True

    def wait(self) -> None:
        """Wait until the running save has ended. Raise its error if it failed. While the save waits
        for other ranks, the heartbeat says so.
        """
        while not self.has_ended(_POLL_INTERVAL_S):
            if self._control_group.waits:
                with self._control_group.heartbeat.record_wait():
                    while self._control_group.waits and not self.has_ended(_POLL_INTERVAL_S):
                        pass

    def close(self) -> None:
        """Wait until the running save has ended, and release the lock on the folder. Raise the
        error of the save if it failed.
        """
        self.wait()
        if self._lock is not None:
            self._lock.release()

    def _write(self, snapshot: Snapshot) -> None:
        """Write a snapshot, on the background thread. All ranks write their files; then rank 0
        commits the checkpoint and removes old checkpoints. If a rank fails, rank 0 removes the
        unfinished checkpoint.
        """
        together: Callable[[Callable[[], Any]], list[Any]]
        together = partial(self._control_group.run_collectively, "checkpoint")
        rank = self._control_group.rank
        step = snapshot.position.steps
        is_best = snapshot.eval_loss is not None
        folder = self._folder / files.BEST_FOLDER if is_best else self._folder
        temporary = folder / together(partial(self._make_temporary_folder, folder, step))[0]

        def write() -> dict[str, Any]:
            """Write this rank's file. Return its part of the manifest."""
            if not temporary.is_dir():
                hint = "use a checkpoint folder on a file system that all nodes share"
                raise LaunchError(
                    "the checkpoint folder of rank 0 does not exist on this node",
                    hint=hint,
                    where=str(temporary),
                )
            written = files.write_shard(temporary / files.rank_file(rank), self._copies.contents())
            return files.manifest_document(snapshot.manifest_part(self._manifest, rank, *written))

        def commit() -> None:
            """On rank 0, write the manifest, commit the checkpoint, and remove old checkpoints."""
            if rank == 0:
                files.commit_checkpoint(
                    temporary,
                    files.manifest_text(
                        files.merge_manifests([files.parse_manifest(each) for each in parts])
                    ),
                )
                if is_best:
                    files.remove_other_checkpoints(folder, step)
                else:
                    files.remove_old_checkpoints(folder, *self._kept)

        try:
            parts = together(write)
            together(commit)
        except AutopipeError:
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _make_temporary_folder(self, folder: Path, step: int) -> str:
        """On rank 0, create the temporary folder of a checkpoint in `folder` and return its name;
        also remove remains of unfinished saves if this run holds the lock. Return "" on other
        ranks.
        """
        if self._lock is None:
            return ""
        with files.convert_write_errors(folder):
            folder.mkdir(exist_ok=True)
        if self._lock.held:
            files.remove_leftovers(folder)
        temporary = files.temporary_path(folder, step, f"{os.getpid()}-{secrets.token_hex(4)}")
        with files.convert_write_errors(temporary):
            temporary.mkdir()
        return temporary.name

    def best_loss_and_step(self) -> tuple[float, int] | None:
        """Return (validation loss, step) of the saved state with the lowest loss: `step` is the
        index, from 0, of the last step before the validation. None if no best state is saved.
        """
        folder = self._folder / files.BEST_FOLDER
        found = [
            files.read_checkpoint(files.checkpoint_path(folder, step))
            for step in files.committed_steps(folder)
        ]
        return min(
            ((each.eval_loss, each.step - 1) for each in found if each.eval_loss is not None),
            default=None,
        )

    def restore(self) -> files.Checkpoint | None:
        """Restore the newest committed checkpoint and return its manifest. Return None if the
        folder has no checkpoint. Collective over all ranks.

        If the checkpoint was written under an equal plan by an equal number of ranks, torch's
        random generators continue from their saved states. Otherwise they are seeded from the
        checkpoint's seed, its step and the rank.

        Raise ConfigurationError if the model or the kind of optimizer differs. Raise LaunchError if
        the checkpoint is damaged, or if ranks see different newest checkpoints.
        """
        group = self._control_group
        manifest = self._manifest

        def newest_step() -> tuple[int, str]:
            """Return (step, digest): the number of steps of the newest checkpoint, 0 if there is
            none, and the SHA-256 digest of its manifest.
            """
            step = max(files.committed_steps(self._folder), default=0)
            try:
                text = (
                    files.checkpoint_path(self._folder, step) / files.MANIFEST_FILE
                ).read_bytes()
            except OSError:
                # A missing manifest counts as empty text. No error is raised here, because
                # `read_checkpoint` raises an error for it.
                text = b""
            return step, hashlib.sha256(text).hexdigest()

        newest = group.run_collectively("restore", newest_step)
        if any(each != newest[0] for each in newest):
            steps = ", ".join(sorted({str(step) for step, _ in newest}))
            reason = f"the newest checkpoint differs between ranks: steps {steps}"
            raise LaunchError(
                reason,
                hint="use a checkpoint folder on a file system that all nodes share",
                where=str(self._folder),
            )
        step, _ = newest[0]
        if not step:
            return None
        path = files.checkpoint_path(self._folder, step)
        checkpoint = files.read_checkpoint(path)
        for difference in _differences_from_manifest(checkpoint, manifest):
            hint = "choose another folder with --checkpoint DIR"
            raise ConfigurationError(
                f"the checkpoint was written for another {difference}", hint=hint, where=str(path)
            )

        def verify() -> None:
            """Verify the digests of some files of the checkpoint. Together, all ranks verify all
            files.
            """
            for file in checkpoint.files[group.rank :: group.world_size]:
                verify_file(path, file)

        group.run_collectively("restore", verify)
        reader = CheckpointReader(path, checkpoint)
        self._state.restore(reader, {each.name: each for each in checkpoint.parameters})
        if self._state.loss_scaler is not None and (saved := checkpoint.loss_scale) is not None:
            self._state.loss_scaler.restore(saved.scale, saved.good_steps)
        if (checkpoint.plan, checkpoint.world_size) == (manifest.plan, manifest.world_size):
            own = (each for each in checkpoint.random if each.rank == group.rank)
            self._state.restore_generators(
                {each.device: tensor_from_array(reader.read(each.state), "uint8") for each in own}
            )
        else:
            seeds = np.random.SeedSequence(
                (checkpoint.seed, checkpoint.step, group.rank)
            ).generate_state(1, np.uint64)
            torch.manual_seed(int(seeds[0] >> np.uint64(1)))
        return checkpoint
