"""A server process that imports torch and the runtime once and forks the ranks of a launch. The
forked ranks need no further imports.

`ForkServer` is the launcher's side. The server process runs this module with the number of a
socket. It has one thread and has not initialised CUDA, so that forking is safe. For each rank it
forks twice, and the intermediate process ends. Linux then makes the launcher the parent of the
rank, as if the launcher had started a new interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from autopipe.backends.torch.child import (
    PARENT_VARIABLE,
    adopting_orphans,
    changed_environment,
    end_with_parent,
    python_command,
    run,
    show_rank,
)

SWITCH_VARIABLE: Final = "AUTOPIPE_FORK_SERVER"
"""Environment variable. With the value 0, each rank runs in a new interpreter instead."""
_PRELOADED_MODULES: Final = (
    "autopipe.backends.torch.runtime.rank",
    "autopipe.backends.torch.runtime.step.stage",
    "autopipe.backends.torch.runtime.operators",
)
"""Modules that every rank imports."""
_LENGTH_STRUCT: Final = struct.Struct("<Q")
_STANDARD_STREAMS: Final = 3
"""Number of standard streams: input, output, errors."""
_ADOPTION_TIMEOUT_S: Final = 10.0
"""Seconds that a forked rank waits until the launcher is its parent."""
_POLL_S: Final = 0.001
_WAIT_POLL_S: Final = 0.02


class ForkedProcess:
    """A child process that `ForkServer` forked. It has the part of the interface of
    `subprocess.Popen` that callers use.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, the negative signal number if a signal ended the process, or None
        while it runs.
        """
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid == self.pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended and return its exit code. Raise
        subprocess.TimeoutExpired after `timeout` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(_WAIT_POLL_S)
        return code

    def kill(self) -> None:
        """Kill the process if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, 9)


class ForkServer:
    """The launcher's side of a fork server, as a context manager."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None

    def __enter__(self) -> ForkServer:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Start the server process. It imports torch while this process does other work."""
        if sys.platform == "linux" and os.environ.get(SWITCH_VARIABLE) != "0":
            self._line, theirs = socket.socketpair()
            words = python_command(
                "autopipe.backends.torch.fork_server", str(theirs.fileno()), *_PRELOADED_MODULES
            )
            changes = {PARENT_VARIABLE: str(os.getpid())}
            # The separate session protects the server from Ctrl-C at the terminal. Errors of the
            # server's imports are not shown: the interpreters that are started instead of forks
            # raise and report them again.
            self._process = subprocess.Popen(
                words, env=os.environ | changes, pass_fds=[theirs.fileno()], start_new_session=True,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
            theirs.close()

    def start(
        self,
        words: list[str],
        env: Mapping[str, str],
        streams: tuple[int | IO[str] | None, ...] = (None, None, None),
    ) -> ForkedProcess | subprocess.Popen[bytes]:
        """Start `words`, in the form that `python_command` takes, as a child process in a new
        session.

        `streams`: files for standard input, output and errors; None stands for those of this
        process. Without a fork server, or if it fails, a new interpreter runs the words.
        """
        files = tuple(number if each is None else each for number, each in enumerate(streams))
        if self._line is not None:
            numbers = [each if isinstance(each, int) else each.fileno() for each in files]
            with contextlib.suppress(OSError), adopting_orphans():
                return ForkedProcess(_request_fork(self._line, words, env, numbers))
            self.close()
        return subprocess.Popen(
            python_command(*words),
            env=env,
            stdin=files[0],
            stdout=files[1],
            stderr=files[2],
            start_new_session=True,
        )

    def close(self) -> None:
        """End the server. The ranks that it has forked continue."""
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


_ALLOCATOR_VARIABLES = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
"""Environment variables with the settings of torch's allocator. Newer torch versions have both and
read the first one before the second; older versions have only the first.
"""
_LOG_LEVEL_VARIABLE: Final = "TORCH_CPP_LOG_LEVEL"
"""Environment variable for torch's log level, which torch reads when it is imported. The warnings
of its rendezvous do not help the user.
"""


@contextlib.contextmanager
def rank_environment() -> Iterator[None]:
    """Context manager that sets the environment variables that ranks inherit.

    The ranks use one thread each, import the same autopipe as this process, print only errors of
    torch's C++ code, and allocate GPU memory in expandable segments, which reduces fragmentation if
    tensor sizes vary. Values of these settings that are already in the environment are kept; the
    module search path is extended.
    """
    root = Path(__file__).resolve().parents[3]
    # An empty entry would stand for the current folder, in which anybody may have put a module.
    paths = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    # An installed autopipe is found without this entry, and site-packages must not precede the
    # standard library.
    if root.name not in ("site-packages", "dist-packages"):
        paths.append(str(root))
    changes = {PARENT_VARIABLE: str(os.getpid()), "PYTHONPATH": os.pathsep.join(paths)}
    changes["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    changes[_LOG_LEVEL_VARIABLE] = os.environ.get(_LOG_LEVEL_VARIABLE, "ERROR")
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        changes[_ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    with changed_environment(changes):
        yield


_early_servers: Final[list[ForkServer]] = []
"""The server that `start_early` has started and that no launch has used yet; otherwise empty."""


def start_early() -> None:
    """Start the fork server of the next launch of this process. The server imports torch while this
    process imports and checks what the launch needs. It ends with this process if no launch
    follows.
    """
    server = ForkServer()
    with rank_environment():
        server.open()
    _early_servers.append(server)


@contextlib.contextmanager
def fork_server() -> Iterator[ForkServer]:
    """Context manager that yields a fork server with the environment of ranks. If a server was
    started early, that server is used.
    """
    if not _early_servers:
        start_early()
    with contextlib.closing(_early_servers.pop()) as server:
        yield server


def _request_fork(
    line: socket.socket, words: list[str], env: Mapping[str, str], streams: list[int]
) -> int:
    """Let the server at the other end of `line` fork a rank. Return the process number of the rank.
    Raise OSError if the server does not fork.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            form = json.dumps(
                {"words": words, "env": dict(env), "folder": os.getcwd(), "parent": os.getpid()}
            ).encode()
            socket.send_fds(line, [_LENGTH_STRUCT.pack(len(form))], [*streams, theirs.fileno()])
            line.sendall(form)
        reply = ours.recv(_LENGTH_STRUCT.size)
        if len(reply) < _LENGTH_STRUCT.size:
            raise ConnectionError("the fork server ended")
        # If this process is interrupted and does not send it, the rank ends at once.
        ours.sendall(b"\0")
        return int(_LENGTH_STRUCT.unpack(reply)[0])


@dataclass(frozen=True, slots=True)
class _Request:
    words: list[str]
    env: dict[str, str]
    folder: str
    parent: int
    files: list[int]
    """Standard streams, and the socket on which the rank reports its process number."""

    def close(self) -> None:
        for file in self.files:
            os.close(file)


def _receive_request(line: socket.socket) -> _Request | None:
    """Return the next request of the launcher, or None if the launcher has ended."""
    head, files, _, _ = socket.recv_fds(line, _LENGTH_STRUCT.size, _STANDARD_STREAMS + 1)
    if len(head) < _LENGTH_STRUCT.size:
        return None
    (length,) = _LENGTH_STRUCT.unpack(head)
    form = b""
    while len(form) < length:
        part = line.recv(length - len(form))
        if not part:
            return None
        form += part
    return _Request(files=files, **json.loads(form))


def _serve_requests(line: socket.socket) -> list[str] | None:
    """Fork a process per request. In each of these processes, return the words that it runs. In the
    server, return None when the launcher has ended.
    """
    while (request := _receive_request(line)) is not None:
        pid = os.fork()
        if pid == 0:
            if os.fork():
                os._exit(0)
            line.close()
            _become_rank(request)
            return request.words
        request.close()
        os.waitpid(pid, 0)
    return None


def _become_rank(request: _Request) -> None:
    """Give this process, which was just forked, the session, parent, environment, folder and
    streams of the request.
    """
    os.setsid()
    end = time.monotonic() + _ADOPTION_TIMEOUT_S
    while os.getppid() != request.parent and time.monotonic() < end:
        time.sleep(_POLL_S)
    end_with_parent(request.parent)
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.folder)
    for number, file in enumerate(request.files[:_STANDARD_STREAMS]):
        os.dup2(file, number)
    show_rank()
    with socket.socket(fileno=os.dup(request.files[_STANDARD_STREAMS])) as reply:
        reply.sendall(_LENGTH_STRUCT.pack(os.getpid()))
        if not reply.recv(1):
            os._exit(1)
    request.close()
    if "numpy.random" in sys.modules:
        # Otherwise all ranks would generate equal random numbers if no seed is set.
        importlib.import_module("numpy.random").seed()


def _is_single_threaded() -> bool:
    """Return True if the process has one thread, so that a fork loses no thread. The fork handlers
    of some libraries, for example OpenBLAS, end their idle threads, so the threads are counted
    after a fork.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return threading.active_count() == 1 and len(list(Path("/proc/self/task").iterdir())) == 1


def main() -> None:
    """Import the modules that the command line names, and fork until the launcher ends. In each
    fork, run the words of its request.
    """
    line = socket.socket(fileno=int(sys.argv[1]))
    # Importing modules creates many objects and few reference cycles. Garbage collections took a
    # fifth of the import time.
    gc.disable()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    if not _is_single_threaded():
        return
    # Garbage collections in the ranks skip these objects, so that the ranks continue to share their
    # memory pages.
    gc.freeze()
    gc.enable()
    if (words := _serve_requests(line)) is not None:
        run(words)


if __name__ == "__main__":
    main()
