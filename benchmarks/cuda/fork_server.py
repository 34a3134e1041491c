"""A process that has imported torch once and forks for each command, which then begins without
imports.

On a slow host the imports take longer than most rows measure. The server never uses the device: a
process cannot use CUDA after its parent has. It reads requests and writes events, each a JSON
object in a line.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

_LOOK_S = 0.02
"""Seconds between two looks of the server at its children."""
_ANSWER_S = 60.0
"""Maximum seconds for the server to import torch and start the first command."""
_IMPORTED = (
    "torch", "torch.distributed", "torch.profiler", "autopipe.backends.torch.runtime",
    "autopipe.backends.torch.runtime.rank", "benchmarks.cuda.parts",
)  # fmt: skip
"""Modules that commands find imported."""
LOST = -9
"""Exit code of the commands of a server that has ended."""


class ServerLost(Exception):
    """The server has ended or does not answer."""


@dataclass(slots=True)
class Forked:
    """A command that the server runs."""

    pid: int
    server: ForkServer

    def poll(self) -> int | None:
        """Return the exit code, None while the command runs."""
        return self.server.exit_code(self.pid)

    def wait(self) -> None:
        """Return when the command has ended."""
        self.server.wait(self.pid)


@dataclass(slots=True)
class ForkServer:
    """The side that sends requests. Its methods may be called from several threads."""

    process: subprocess.Popen[bytes]
    _codes: dict[int, int] = field(default_factory=dict)
    _started: list[int] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _starting: threading.Lock = field(default_factory=threading.Lock)
    _lost: bool = False

    @staticmethod
    def start(environment: Mapping[str, str], folder: Path) -> ForkServer:
        """Start a server; what it says goes to a file in `folder`."""
        # Torch then asks NVML for devices, and not the driver, whose state a fork would break.
        changed = (
            os.environ
            | environment
            | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        )
        with (folder / "fork_server").open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.cuda.fork_server"],
                env=changed,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                start_new_session=True,
            )
        server = ForkServer(process)
        threading.Thread(target=server._listen, daemon=True).start()
        return server

    def run(
        self,
        words: tuple[str, ...],
        environment: Mapping[str, str],
        folder: Path,
        out: Path,
        err: Path,
    ) -> Forked:
        """Start a command of Python in `folder`, with its outputs in two files. Raises
        ServerLost.
        """
        paths = {"folder": str(folder), "out": str(out), "err": str(err)}
        request = {"words": words, "environment": dict(environment), **paths}
        with self._starting:
            count = len(self._started)
            try:
                assert self.process.stdin is not None
                self.process.stdin.write((json.dumps(request) + "\n").encode())
                self.process.stdin.flush()
            except OSError as error:
                raise ServerLost(str(error)) from error
            with self._changed:
                self._changed.wait_for(lambda: self._lost or len(self._started) > count, _ANSWER_S)
                if len(self._started) == count:
                    raise ServerLost("no answer")
                return Forked(self._started[count], self)

    def exit_code(self, pid: int) -> int | None:
        with self._changed:
            return self._codes.get(pid, LOST if self._lost else None)

    def wait(self, pid: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._lost or pid in self._codes)

    def close(self) -> None:
        """End the server; its commands go on."""
        self.process.kill()
        self.process.wait()

    def _listen(self) -> None:
        """Take the server's events until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            with self._changed:
                if "started" in event:
                    self._started.append(event["started"])
                else:
                    self._codes[event["ended"]] = event["code"]
                self._changed.notify_all()
        with self._changed:
            self._lost = True
            self._changed.notify_all()


def serve(requests: IO[bytes], events: IO[bytes]) -> dict[str, Any] | None:
    """Fork for each request, and tell of each start and end. Return the request in a child, None in
    the server when there are no more requests.
    """

    def tell(event: Mapping[str, int]) -> None:
        events.write((json.dumps(event) + "\n").encode())
        events.flush()

    buffered = b""
    while True:
        ready, _, _ = select.select([requests], [], [], _LOOK_S)
        if ready:
            read = os.read(requests.fileno(), 1 << 16)
            if not read:
                return None
            *lines, buffered = (buffered + read).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    request: dict[str, Any] = json.loads(line)
                    return request
                tell({"started": pid})
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                tell({"ended": ended[0], "code": os.waitstatus_to_exitcode(ended[1])})


def run_request(request: Mapping[str, Any]) -> None:
    """Become the command of a request: a script, or `-m` and a module."""
    os.setsid()
    for stream, (path, flags) in enumerate(
        [(os.devnull, os.O_RDONLY), (request["out"], os.O_WRONLY), (request["err"], os.O_WRONLY)]
    ):
        opened = os.open(path, flags)
        os.dup2(opened, stream)
        os.close(opened)
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    first, *rest = request["words"]
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # The end of an interpreter with torch takes seconds on a slow host.


def main() -> None:
    """Import, serve, and in a child become its command."""
    for name in _IMPORTED:
        importlib.import_module(name)
    # The outputs of imports do not get among the events.
    events = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    request = serve(sys.stdin.buffer, events)
    events.close()
    if request is not None:
        run_request(request)


if __name__ == "__main__":
    main()
