"""The checkpoint that a command line means."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autopipe.backends.torch.checkpoint.format import (
    MANIFEST,
    Checkpoint,
    checkpoint_path,
    committed_steps,
    read_checkpoint,
)
from autopipe.ir.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A committed checkpoint and the folder in which it lies."""

    path: Path
    checkpoint: Checkpoint

    @property
    def bytes(self) -> int:
        """Of its files, but for the manifest."""
        return sum(file.size for file in self.checkpoint.files)


def found_paths(folder: Path, step: int | None) -> list[Path]:
    """The folders of the committed checkpoints in `folder`, oldest first; that of `step` alone where it is given.

    `folder` may also be one checkpoint's own. Raises ConfigurationError where there is none.
    """
    if (folder / MANIFEST).is_file() and step is None:
        return [folder]
    if not folder.is_dir():
        raise ConfigurationError("there is no such folder", where=str(folder))
    steps = committed_steps(folder)
    if not steps:
        raise ConfigurationError(
            "there is no committed checkpoint", hint="autopipe launch --checkpoint DIR saves them", where=str(folder)
        )
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps))
        raise ConfigurationError(f"there is no checkpoint of step {step}", hint=f"there are {known}", where=str(folder))
    return [checkpoint_path(folder, each) for each in (steps if step is None else [step])]


def newest(folder: Path, step: int | None) -> FoundCheckpoint:
    """The newest checkpoint in `folder`, or that of `step`."""
    path = found_paths(folder, step)[-1]
    return FoundCheckpoint(path, read_checkpoint(path))
