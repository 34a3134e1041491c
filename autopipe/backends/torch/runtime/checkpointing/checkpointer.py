"""Saves all ranks' states as one checkpoint while the steps go on, and restores the newest that was committed."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from autopipe.backends.torch.checkpoint import folder as folders
from autopipe.backends.torch.checkpoint.document import document_of, parsed, read_checkpoint, text_of
from autopipe.backends.torch.checkpoint.form import Checkpoint
from autopipe.backends.torch.checkpoint.lock import FolderLock
from autopipe.backends.torch.checkpoint.merge import merged
from autopipe.backends.torch.checkpoint.reading import Reader, verify_file
from autopipe.backends.torch.checkpoint.shard_file import write_shard
from autopipe.backends.torch.runtime.checkpointing.background import Background
from autopipe.backends.torch.runtime.checkpointing.host_copies import HostCopies
from autopipe.backends.torch.runtime.checkpointing.identity import check_identity
from autopipe.backends.torch.runtime.checkpointing.ownership import write_blocks
from autopipe.backends.torch.runtime.checkpointing.snapshot import located, take_snapshot
from autopipe.backends.torch.runtime.checkpointing.training_state import TrainingState, tensor_of
from autopipe.backends.torch.runtime.data import Position
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.meeting import ControlGroup
from autopipe.backends.torch.runtime.pulse import Heartbeat
from autopipe.ir.errors import AutopipeError, LaunchError

_LOOK_S = 0.1


class Checkpointer:
    """One rank's part in the checkpoints of a run; all ranks do the same, together."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        state: TrainingState,
        meeting: ControlGroup,
        copies: HostCopies,
        pulse: Heartbeat,
    ) -> None:
        """`meeting` must serve nothing else: a save uses it while the steps go on.

        Raises ConfigurationError where another run saves in the folder, LaunchError where it cannot be written.
        """
        self._folder = folder
        self._manifest = manifest
        self._state = state
        self._meeting = meeting
        self._copies = copies
        self._pulse = pulse
        self._pieces = write_blocks(manifest)[meeting.rank]
        self._background = Background()
        self._lock: FolderLock | None = None
        meeting.together("checkpoint", self._take_folder)

    def _take_folder(self) -> None:
        if self._meeting.rank == 0:
            self._lock = FolderLock(self._folder)

    def save(self, position: Position, seed: int) -> None:
        """Commit the state at this position, while the next steps run. Waits for the save before to end.

        Raises what ended that one.
        """
        self.wait()
        meeting, manifest = self._meeting, self._manifest
        part = take_snapshot(manifest, meeting.rank, self._state, self._pieces, position, seed, self._copies)
        self._background.start(partial(self._write, part))

    def wait(self) -> None:
        """Wait until what is being saved is committed. Raises LaunchError where it could not be."""
        while not self._background.end(_LOOK_S):
            if self._meeting.waits:
                with self._pulse.waiting():
                    while self._meeting.waits and not self._background.end(_LOOK_S):
                        pass

    def look(self) -> None:
        """Raise what has ended the save that runs, if something has."""
        self._background.end(0.0)

    def close(self) -> None:
        """Wait for the last save, and leave the folder to others."""
        self.wait()
        if self._lock is not None:
            self._lock.release()

    def _write(self, part: Checkpoint) -> None:
        """On a thread of its own: files of all ranks, then the commit."""
        together, rank = partial(self._meeting.together, "checkpoint"), self._meeting.rank
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
            folders.remove_leftovers(self._folder)
        temporary = folders.temporary_path(self._folder, step, f"{os.getpid()}-{secrets.token_hex(4)}")
        with folders.writing(temporary):
            temporary.mkdir()
        return temporary.name

    def _write_part(self, part: Checkpoint, temporary: Path) -> dict[str, Any]:
        if not temporary.is_dir():
            hint = "all nodes must share it"
            raise LaunchError("rank 0's checkpoint folder is not here", hint=hint, where=str(temporary))
        path = temporary / folders.rank_file(self._meeting.rank)
        return document_of(located(part, *write_shard(path, self._copies.contents())))

    def _commit(self, temporary: Path, parts: list[dict[str, Any]]) -> None:
        if self._meeting.rank == 0:
            folders.commit(temporary, text_of(merged([parsed(each) for each in parts])))
            folders.prune(self._folder)

    def restore(self) -> Checkpoint | None:
        """Put the newest committed state in place. Returns its manifest, None where there is none.

        Raises ConfigurationError for a checkpoint of another model, LaunchError for a damaged one.
        """
        together, rank, size = partial(self._meeting.together, "restore"), self._meeting.rank, self._meeting.world_size
        newest = together(self._newest)
        if any(each != newest[0] for each in newest):
            steps = ", ".join(sorted({str(step) for step, _ in newest}))
            reason = f"ranks see different newest checkpoints: steps {steps}"
            raise LaunchError(reason, hint="all nodes must share the folder", where=str(self._folder))
        step, _ = newest[0]
        if not step:
            return None
        path = folders.checkpoint_path(self._folder, step)
        checkpoint = read_checkpoint(path)
        check_identity(checkpoint, self._manifest, path)

        def verify() -> None:
            for file in checkpoint.files[rank::size]:
                verify_file(path, file)

        together(verify)
        self._put_in_place(Reader(path, checkpoint), checkpoint)
        return checkpoint

    def _newest(self) -> tuple[int, str]:
        """The newest checkpoint's step, 0 where there is none, and the digest of its manifest."""
        step = max(folders.committed_steps(self._folder), default=0)
        try:
            manifest = (folders.checkpoint_path(self._folder, step) / folders.MANIFEST).read_bytes()
        except OSError:
            manifest = b""  # To read it will say what is wrong.
        return step, hashlib.sha256(manifest).hexdigest()

    def _put_in_place(self, reader: Reader, checkpoint: Checkpoint) -> None:
        """This rank's blocks, and where its random numbers go on: as they would have under the same plan."""
        self._state.restore(reader, {each.name: each for each in checkpoint.parameters})
        manifest, rank = self._manifest, self._meeting.rank
        if (checkpoint.plan, checkpoint.world_size) == (manifest.plan, manifest.world_size):
            own = (each for each in checkpoint.random if each.rank == rank)
            self._state.restore_generators({each.device: tensor_of(reader.read(each.state), "uint8") for each in own})
        else:
            self._state.seed_generators(checkpoint.seed, checkpoint.step, rank)
