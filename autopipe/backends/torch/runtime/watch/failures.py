"""End of a rank after an error: one line on stderr, and a failure file, from which the launcher
learns the reason.
"""

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
"""Parts of the messages of RuntimeErrors that gloo raises on a rank if another rank has ended."""
_NCCL_LOST_RANK_TEXTS = (
    "ncclRemoteError",
    "remote process exited",
    "communicator was aborted",
    "collective operation timeout",
)
"""Parts of the messages of NCCL errors that follow from the end of another rank. Other NCCL errors,
for example out of memory, are errors of the rank itself.
"""
_LOST_PEER_WAIT_S = 2.0
"""Seconds that a rank waits before it ends because another rank has ended, so that the launcher
notices the end of the other rank first.
"""
_LAUNCHER_CHECK_INTERVAL_S = 0.5
"""Seconds between two heartbeats, and between two checks whether the launcher still runs."""
STACKS_SIGNAL = signal.SIGUSR1
"""Signal upon which a rank writes the stacks of its threads to stderr."""
STOP_SIGNAL = signal.SIGUSR2
"""Signal upon which a rank that saves checkpoints requests a last checkpoint and the end of the
run.
"""
INTERRUPTED_EXIT_CODE = 130
"""Exit code of a rank that was interrupted by Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The error that ended a rank. `final` is True if a restart would fail in the same way.
    `consequence` is True if the end of another rank caused the error. `time` is in seconds since
    1970.
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
    """Name of the rank's machine; "" if all ranks are on one machine."""

    def error(self) -> AutopipeError:
        """Return the error to be shown to the user. It names the rank and the task, unless it is a
        configuration error.
        """
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


def hostname_if_several() -> str:
    """Return the name of this machine; "" if all ranks are on it."""
    world, here = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return "" if world == here else socket.gethostname()


def describe_failure(
    error: BaseException, rank: int, task: str, awaited: tuple[int, int] = (-1, -1)
) -> Failure:
    """Return the failure of `rank` in the task `task` because of `error`. `awaited` is (rank,
    channel) of the tensor for which the rank waited, -1 for none.
    """
    host = hostname_if_several()
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
    if lost := is_lost_rank_error(error):
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


def is_lost_rank_error(error: BaseException) -> bool:
    """Return True if `error`, raised by torch, follows from the end of another rank or of the
    connection to it.
    """
    if not isinstance(error, RuntimeError):
        return False
    import torch.distributed as dist

    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    if isinstance(error, dist.DistBackendError):
        return any(word in str(error) for word in _NCCL_LOST_RANK_TEXTS)
    return type(error) is RuntimeError and any(word in str(error) for word in _GLOO_LOST_RANK_TEXTS)


def install_error_hook(number: int, heartbeat: Heartbeat) -> None:
    """Install an exception hook for rank `number`: an uncaught exception ends the process at once,
    after it was printed and written to the failure file. A normal exit would wait for threads of
    process groups, whose peers may never answer.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Write the failure and end the process."""
        if isinstance(error, KeyboardInterrupt):
            os._exit(INTERRUPTED_EXIT_CODE)
        failure = describe_failure(error, number, heartbeat.task, heartbeat.awaited)
        if not isinstance(error, AutopipeError):
            traceback.print_exception(kind, error, trace)
        if name := os.environ.get(ERROR_FILE_VARIABLE):
            # torch elastic defines the format of the file, but allows further keys. autopipe adds
            # its own key.
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


def start_launcher_watch(heartbeat: Heartbeat) -> None:
    """If torch elastic or autopipe's launcher started this process, start a thread that records
    heartbeats, and that ends the process when its parent has ended. Otherwise the rank would
    continue to write files that the next launch also writes. From now on, `STACKS_SIGNAL` prints
    the stacks of all threads.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    faulthandler.register(STACKS_SIGNAL)

    def watch() -> None:
        """Record heartbeats until the parent process has ended, then end this process."""
        while os.getppid() == launcher:
            heartbeat.record_alive()
            time.sleep(_LAUNCHER_CHECK_INTERVAL_S)
        os._exit(LaunchError.exit_code)

    threading.Thread(target=watch, name="heartbeat", daemon=True).start()


def install_stop_handler(stop: Callable[[], None]) -> None:
    """Call `stop` upon the signal `STOP_SIGNAL`. Also call it upon SIGTERM, unless autopipe's
    launcher is the parent, which sends SIGTERM to end ranks at once.
    """
    for each in (STOP_SIGNAL, *(() if PARENT_VARIABLE in os.environ else (signal.SIGTERM,))):
        signal.signal(each, lambda *_: stop())


def read_failure(form: Mapping[str, object]) -> Failure | None:
    """Return the failure in `form`, the JSON object of an error file of torch elastic; None if
    autopipe has not written the file.
    """
    ours = form.get("autopipe")
    return Failure(**ours) if isinstance(ours, dict) else None
