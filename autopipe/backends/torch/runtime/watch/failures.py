"""How a rank ends when something goes wrong: one line on stderr, and a file where the launcher finds
it.
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

from autopipe.backends.torch.child import PARENT
from autopipe.backends.torch.runtime.watch.heartbeat import Heartbeat
from autopipe.ir.errors import AutopipeError, ConfigurationError, LaunchError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_LOST_OVER_GLOO = (
    "gloo",
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "Timed out",
    "Timeout",
)
"""Words of the plain RuntimeErrors that a rank gets over gloo when another one has gone away."""
_LOST_OVER_NCCL = (
    "ncclRemoteError", "remote process exited", "communicator was aborted", "collective operation timeout",
)  # fmt: skip
"""Words of NCCL's errors of that kind; its other errors, out of memory or used wrongly, are the
rank's own.
"""
_GRACE_S = 2.0
"""How long a rank that has lost a peer waits before it ends, so that the launcher sees the peer's
end first.
"""
_BEAT_S = 0.5
STACKS = signal.SIGUSR1  # The signal at which a rank writes to stderr what its threads are doing.
STOP = (
    signal.SIGUSR2
)  # The signal at which a rank that saves checkpoints ends after a step, with a last one.
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of one rank. It is `final` if trying again would end alike, a `consequence` if it
    followed another's.
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
    host: str = ""  # The rank's machine, where there are several.

    def error(self) -> AutopipeError:
        """The error to show to the user. A mistake in the request belongs to no rank or task."""
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
    """This machine's name; empty where all ranks are on it."""
    world, here = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return "" if world == here else socket.gethostname()


def failure_of(
    error: BaseException, rank: int, task: str, awaited: tuple[int, int] = (-1, -1)
) -> Failure:
    """`awaited` are the peer and channel that the rank waited for, -1 for none."""
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
        hint = "the error of the rank, or node, that ended first says why"
    elif "NCCL" in str(error):
        hint = "NCCL_DEBUG=INFO tells more in the rank's log: see docs/guides/multi-node.md"
    code = LaunchError.exit_code
    return Failure(
        rank, task, message, hint, "", time.time(), code, final=False, consequence=lost, host=host
    )


def has_lost_rank(error: BaseException) -> bool:
    """True for the errors of torch that follow from the end of another rank, or of the connection
    to it.
    """
    if not isinstance(error, RuntimeError):
        return False
    import torch.distributed as dist

    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    if isinstance(error, dist.DistBackendError):
        return any(word in str(error) for word in _LOST_OVER_NCCL)
    return type(error) is RuntimeError and any(word in str(error) for word in _LOST_OVER_GLOO)


def end_on_error(number: int, heartbeat: Heartbeat) -> None:
    """From now on, an exception that nothing catches ends the process at once, with its file
    written. At once, because a normal exit waits for threads of process groups whose peers may
    never answer.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            os._exit(INTERRUPTED)
        failure = failure_of(error, number, heartbeat.task, heartbeat.awaited)
        if not isinstance(error, AutopipeError):
            traceback.print_exception(kind, error, trace)
        if name := os.environ.get(ERROR_FILE):
            # Where elastic looks for it, in elastic's form with ours beside it.
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
        if failure.consequence and ERROR_FILE in os.environ:
            time.sleep(_GRACE_S)
        os._exit(failure.exit_code)

    sys.excepthook = hook


def live_with_launcher(heartbeat: Heartbeat) -> None:
    """From now on, give signs of life to the process that started this rank, and end when it has
    gone, killed perhaps: a rank that no one watches would go on writing where the next launch
    writes. At `STACKS`, say where it stands.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    faulthandler.register(STACKS)

    def watch() -> None:
        while os.getppid() == launcher:
            heartbeat.sign_of_life()
            time.sleep(_BEAT_S)
        os._exit(LaunchError.exit_code)

    threading.Thread(target=watch, name="heartbeat", daemon=True).start()


def stop_on_signal(stop: Callable[[], None]) -> None:
    """Call `stop` at `STOP`, and at SIGTERM where no launcher of ours, which sends that to ranks
    that shall end at once, is there to send the other.
    """
    for each in (STOP, *(() if PARENT in os.environ else (signal.SIGTERM,))):
        signal.signal(each, lambda *_: stop())


def read_failure(form: Mapping[str, object]) -> Failure | None:
    """The failure in an error file's object; None where it is not one of ours."""
    ours = form.get("autopipe")
    return Failure(**ours) if isinstance(ours, dict) else None
