"""How a rank ends when something goes wrong: one line on stderr, and a file where the launcher finds it."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from autopipe.backends.torch.runtime.pulse import Heartbeat
from autopipe.ir.errors import AutopipeError, ConfigurationError, LaunchError

if TYPE_CHECKING:
    from autopipe.backends.torch.runtime.rank import Rank

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_LOST_PEER = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Timed out", "Timeout")
"""Words of the errors that a rank gets from torch when another one has gone away."""
_GRACE_S = 2.0
"""How long a rank that has lost a peer waits before it ends, so that the launcher sees the peer's end first."""
_BEAT_S = 0.5
STACKS = signal.SIGUSR1
"""The signal at which a rank writes to stderr what its threads are doing."""
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of one rank. It is `final` if trying again would end alike, a `consequence` if it followed another's."""

    rank: int
    task: str
    message: str
    hint: str
    where: str
    time: float
    exit_code: int
    final: bool
    consequence: bool

    def error(self) -> AutopipeError:
        """The error to show to the user. A mistake in the request belongs to no rank or task."""
        if self.exit_code == ConfigurationError.exit_code:
            return ConfigurationError(self.message, self.hint, self.where)
        if self.message.startswith(f"rank {self.rank} "):
            return LaunchError(self.message, self.hint, self.where)
        place = self.where
        if not place.startswith("rank "):
            task = f", task {self.task}" if self.task else ""
            place = f"rank {self.rank}{task}" + (f": {place}" if place else "")
        return LaunchError(self.message, self.hint, place)


def failure_of(error: BaseException, rank: int, task: str) -> Failure:
    """The failure of a rank that an exception ends."""
    if isinstance(error, AutopipeError):
        words = (error.message, error.hint, error.where)
        return Failure(rank, task, *words, time.time(), error.exit_code, final=True, consequence=False)
    first = next(iter(str(error).strip().splitlines()), "")
    message = f"{type(error).__name__}: {first}" if first else type(error).__name__
    lost = isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST_PEER)
    hint = ""
    if lost:
        message, hint = f"lost another rank: {message}", "the error of the rank, or node, that ended first says why"
    return Failure(rank, task, message, hint, "", time.time(), LaunchError.exit_code, final=False, consequence=lost)


def end_on_error(rank: Rank) -> None:
    """From now on, an exception that nothing catches ends the process at once, with its file written.

    At once, because a normal exit waits for threads of process groups whose peers may never answer.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            os._exit(INTERRUPTED)
        failure = failure_of(error, rank.number, rank.task)
        if not isinstance(error, AutopipeError):
            traceback.print_exception(kind, error, trace)
        _write(failure)
        sys.stdout.flush()
        sys.stderr.write(f"error: {failure.error()}\n")
        sys.stderr.flush()
        if failure.consequence and ERROR_FILE in os.environ:
            time.sleep(_GRACE_S)
        os._exit(failure.exit_code)

    sys.excepthook = hook


def live_with_launcher(pulse: Heartbeat) -> None:
    """From now on, give signs of life to the process that started this rank, and end when it has gone, killed perhaps:
    a rank that no one watches would go on writing where the next launch writes. At `STACKS`, say where it stands."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    faulthandler.register(STACKS)

    def watch() -> None:
        while os.getppid() == launcher:
            pulse.beat()
            time.sleep(_BEAT_S)
        os._exit(LaunchError.exit_code)

    threading.Thread(target=watch, name="pulse", daemon=True).start()


def _write(failure: Failure) -> None:
    """Write the failure where elastic looks for it, in elastic's form with ours beside it."""
    name = os.environ.get(ERROR_FILE)
    if not name:
        return
    form = {"message": str(failure.error()), "timestamp": int(failure.time), "autopipe": asdict(failure)}
    path = Path(name)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(form), encoding="utf-8")
    scratch.replace(path)


def read_failure(form: Mapping[str, object]) -> Failure | None:
    """The failure in an error file's object; None where it is not one of ours."""
    ours = form.get("autopipe")
    return Failure(**ours) if isinstance(ours, dict) else None
