"""End of a rank after an error: one line on stderr, and a failure file for the launcher."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from autopipe.backends.torch.child import PARENT_VARIABLE
from autopipe.backends.torch.runtime.watch.heartbeat import Heartbeat
from autopipe.ir.errors import AutopipeError, ConfigurationError, LaunchError

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_GLOO_LOST_RANK_TEXTS = (
    "gloo",
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "Timed out",
    "Timeout",
)
"""Parts of the messages of RuntimeErrors that a rank gets over gloo when another rank has ended."""
_NCCL_LOST_RANK_TEXTS = (
    "ncclRemoteError",
    "remote process exited",
    "communicator was aborted",
    "collective operation timeout",
)
"""Parts of the messages of NCCL errors that follow from the end of another rank. Other NCCL errors,
such as out of memory, are errors of the rank itself.
"""
_LOST_PEER_WAIT_S = 2.0
"""Seconds that a rank waits before it ends because of a lost peer, so that the launcher sees the
end of the peer first.
"""
_LAUNCHER_CHECK_INTERVAL_S = 0.5
"""Seconds between heartbeats."""
STACKS_SIGNAL = signal.SIGUSR1
"""Signal at which a rank writes the stacks of its threads to stderr."""
STOP_SIGNAL = signal.SIGUSR2
"""Signal at which a rank that saves checkpoints requests a last checkpoint and the end of the
run.
"""
INTERRUPTED_EXIT_CODE = 130
"""Exit code after Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The error that ended one rank. `final` is True if a restart would fail again, `consequence`
    if another rank's failure caused it.
    """

    rank: int
    task: str
    message: str
    hint: str
    where: str
    time: float
    exit_code: int
    final: bool
    consequence: bool
    host: str = ""
    """Name of the rank's machine; "" if all ranks are on one."""

    def error(self) -> AutopipeError:
        """Return the error to show to the user. A configuration error names no rank or task."""
        if self.exit_code == ConfigurationError.exit_code:
            return ConfigurationError(self.message, self.hint, self.where)
        if self.message.startswith(f"rank {self.rank} "):
            return LaunchError(self.message, self.hint, self.where)
        place = self.where
        if not place.startswith("rank "):
            host = f" on {self.host}" if self.host else ""
            task = f", task {self.task}" if self.task else ""
            place = f"rank {self.rank}{host}{task}" + (f": {place}" if place else "")
        return LaunchError(self.message, self.hint, place)


def host_of_several() -> str:
    """Return this machine's name; "" if all ranks are on it."""
    world, here = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return "" if world == here else socket.gethostname()


def describe_failure(
    error: BaseException, rank: int, task: str, awaited: tuple[int, int] = (-1, -1)
) -> Failure:
    """Return the failure of `rank` in `task` for an error. `awaited` is the peer and channel for
    which the rank waited, -1 for none.
    """
    host = host_of_several()
    if isinstance(error, AutopipeError):
        words = (error.message, error.hint, error.where)
        return Failure(
            rank,
            task,
            *words,
            time.time(),
            error.exit_code,
            final=True,
            consequence=False,
            host=host,
        )
    first = next(iter(str(error).strip().splitlines()), "")
    message = f"{type(error).__name__}: {first}" if first else type(error).__name__
    hint = ""
    if lost := has_lost_rank(error):
        peer, channel = awaited
        whom = "another rank" if peer < 0 else f"rank {peer} (channel {channel})"
        message = f"lost {whom}: {message}"
        hint = "look at the error of the rank or node that ended first"
    elif "NCCL" in str(error):
        hint = "set NCCL_DEBUG=INFO for details in the rank's log: see docs/guides/multi-node.md"
    code = LaunchError.exit_code
    return Failure(
        rank, task, message, hint, "", time.time(), code, final=False, consequence=lost, host=host
    )


def has_lost_rank(error: BaseException) -> bool:
    """Return True if a torch error follows from the end of another rank or of the connection to
    it.
    """
    if not isinstance(error, RuntimeError):
        return False
    import torch.distributed as dist

    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    if isinstance(error, dist.DistBackendError):
        return any(word in str(error) for word in _NCCL_LOST_RANK_TEXTS)
    return type(error) is RuntimeError and any(word in str(error) for word in _GLOO_LOST_RANK_TEXTS)


def end_on_error(number: int, heartbeat: Heartbeat) -> None:
    """Install a hook: an uncaught exception ends the process at once, after its failure file is
    written. A normal exit would wait for threads of process groups whose peers may never answer.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            os._exit(INTERRUPTED_EXIT_CODE)
        failure = describe_failure(error, number, heartbeat.task, heartbeat.awaited)
        if not isinstance(error, AutopipeError):
            traceback.print_exception(kind, error, trace)
        if name := os.environ.get(ERROR_FILE_VARIABLE):
            # The format is that of torch elastic; autopipe adds a key.
            form = {
                "message": str(failure.error()),
                "timestamp": int(failure.time),
                "autopipe": asdict(failure),
            }
            scratch = Path(name).with_suffix(".tmp")
            scratch.write_text(json.dumps(form), encoding="utf-8")
            scratch.replace(name)
        sys.stdout.flush()
        sys.stderr.write(f"error: {failure.error()}\n")
        sys.stderr.flush()
        if failure.consequence and ERROR_FILE_VARIABLE in os.environ:
            time.sleep(_LOST_PEER_WAIT_S)
        os._exit(failure.exit_code)

    sys.excepthook = hook


def end_with_launcher(heartbeat: Heartbeat) -> None:
    """Start a thread that sends heartbeats, and ends this process when the launcher has ended:
    without a launcher, the rank would continue to write files that the next launch writes too. The
    signal `STACKS_SIGNAL` prints stacks from now on.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    faulthandler.register(STACKS_SIGNAL)

    def watch() -> None:
        while os.getppid() == launcher:
            heartbeat.record_alive()
            time.sleep(_LAUNCHER_CHECK_INTERVAL_S)
        os._exit(LaunchError.exit_code)

    threading.Thread(target=watch, name="heartbeat", daemon=True).start()


def stop_on_signal(stop: Callable[[], None]) -> None:
    """Call `stop` at the signal `STOP_SIGNAL`; also at SIGTERM unless autopipe's launcher, which
    sends SIGTERM to end ranks at once, is the parent.
    """
    for each in (STOP_SIGNAL, *(() if PARENT_VARIABLE in os.environ else (signal.SIGTERM,))):
        signal.signal(each, lambda *_: stop())


def read_failure(form: Mapping[str, object]) -> Failure | None:
    """Return the failure in the object of an error file, None if autopipe has not written it."""
    ours = form.get("autopipe")
    return Failure(**ours) if isinstance(ours, dict) else None
