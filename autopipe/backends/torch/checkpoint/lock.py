"""One run at a time saves in a folder, so that what another left unfinished can be told from what it is writing."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from autopipe.backends.torch.checkpoint.folder import writing
from autopipe.ir.errors import ConfigurationError

_FILE = ".lock"
_PATIENCE_S = 15.0
"""How long a run that was killed may take to be gone, for one that takes its place."""
_PAUSE_S = 0.1


class FolderLock:
    """Holds a folder until `release`, or the end of the process, however it ends."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigurationError where another run holds the folder, LaunchError where it cannot be made."""
        self._descriptor = -1
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.held = self._take(time.monotonic() + _PATIENCE_S)
        """False where the file system has no locks: then nothing of others may be removed."""
        if self.held is None:
            self.release()
            raise ConfigurationError(
                "another run saves its checkpoints here",
                hint="wait for its end, or choose another --checkpoint folder", where=str(folder),
            )  # fmt: skip

    def _take(self, deadline: float) -> bool | None:
        """None where it is taken and stays so."""
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return None
                time.sleep(_PAUSE_S)
            except OSError:
                return False
            else:
                return True

    def release(self) -> None:
        """Let others save here."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    __del__ = release
