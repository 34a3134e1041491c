"""A server process that imports torch and the runtime once, and forks the ranks of a launch, which
then need no further imports.

The launcher uses the class `ForkServer`. The server process runs this module; its first argument is
the descriptor of a socket to the launcher. It has one thread and has not initialised CUDA, so that
forking is safe. It forks twice per rank, and the intermediate process ends at once. Linux then
makes the launcher the parent of the rank, as if the launcher had started a new interpreter.
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
    adopt_orphans,
    end_with_parent,
    python_command,
    run,
    show_rank,
    temporary_environment,
)

SWITCH_VARIABLE: Final = "AUTOPIPE_FORK_SERVER"
"""Environment variable that disables the fork server: with the value 0, each rank runs in a new
interpreter.
"""
_PRELOADED_MODULES: Final = (
    "autopipe.backends.torch.runtime.rank",
    "autopipe.backends.torch.runtime.step.stage",
    "autopipe.backends.torch.runtime.operators",
)
"""Modules that the server imports, because each rank needs them."""
_LENGTH_STRUCT: Final = struct.Struct("<Q")
_STANDARD_STREAMS: Final = 3
"""Number of standard streams of a process: input, output and errors."""
_ADOPTION_TIMEOUT_S: Final = 10.0
"""Maximum seconds that a forked rank waits until the launcher has become its parent."""
_POLL_S: Final = 0.001
_WAIT_POLL_S: Final = 0.02


class ForkedProcess:
    """A child process that the fork server forked. The class implements the part of the interface
    of `subprocess.Popen` that its callers use.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return None while the process runs. Afterwards return its exit code, or the negative
        signal number if a signal ended it.
        """
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid == self.pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended and return its exit code as `poll` does. Raise
        subprocess.TimeoutExpired if it still runs after `timeout` seconds.
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
    """The launcher's side of a fork server, as a context manager: it starts the server on entry and
    ends it on exit.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None

    def __enter__(self) -> ForkServer:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Start the server process, which imports torch in the background."""
        if sys.platform == "linux" and os.environ.get(SWITCH_VARIABLE) != "0":
            self._line, theirs = socket.socketpair()
            words = python_command(
                "autopipe.backends.torch.fork_server", str(theirs.fileno()), *_PRELOADED_MODULES
            )
            changes = {PARENT_VARIABLE: str(os.getpid())}
            # The separate session protects the server from Ctrl-C at the terminal. Errors of the
            # server's imports are not shown, because the interpreters that run the ranks instead
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
        """Start `words`, a Python file or module and its arguments, as a child process in a new
        session. Return the process.

        `streams` are the child's standard input, output and errors; None stands for the stream of
        this process. If there is no fork server or it fails, a new interpreter runs the words.
        """
        files = tuple(number if each is None else each for number, each in enumerate(streams))
        if self._line is not None:
            numbers = [each if isinstance(each, int) else each.fileno() for each in files]
            with contextlib.suppress(OSError), adopt_orphans():
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
        """End the server process. The ranks that it has forked continue to run."""
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
    """Context manager that sets the environment variables that ranks inherit, and restores them
    afterwards.

    The ranks use one thread each, import the same autopipe as this process, print only errors of
    torch's C++ code, and allocate GPU memory in expandable segments, which reduces fragmentation if
    tensor sizes vary. A variable that the environment already sets keeps its value, except that the
    module search path is extended.
    """
    root = Path(__file__).resolve().parents[3]
    # Empty entries of PYTHONPATH are removed. They mean the current folder, in which another user
    # may have created a module.
    paths = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    # An autopipe that is installed in site-packages is found without an entry. An entry for
    # site-packages would precede the standard library in the search path.
    if root.name not in ("site-packages", "dist-packages"):
        paths.append(str(root))
    changes = {PARENT_VARIABLE: str(os.getpid()), "PYTHONPATH": os.pathsep.join(paths)}
    changes["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    changes[_LOG_LEVEL_VARIABLE] = os.environ.get(_LOG_LEVEL_VARIABLE, "ERROR")
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        changes[_ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    with temporary_environment(changes):
        yield


_early_servers: Final[list[ForkServer]] = []
"""The server that `start_early` has started, until a launch uses it; otherwise empty."""


def start_early() -> None:
    """Start the fork server for the next launch of this process. The server imports torch while
    this process checks the launch. It ends with this process if no launch follows.
    """
    server = ForkServer()
    with rank_environment():
        server.open()
    _early_servers.append(server)


@contextlib.contextmanager
def fork_server() -> Iterator[ForkServer]:
    """Context manager that yields an open fork server, in the environment of `rank_environment`. It
    is the server of `start_early` if there is one.
    """
    if not _early_servers:
        start_early()
    with contextlib.closing(_early_servers.pop()) as server:
        yield server


def _request_fork(
    line: socket.socket, words: list[str], env: Mapping[str, str], streams: list[int]
) -> int:
    """Let the server at the other end of the socket `line` fork a rank that runs `words`. `streams`
    are the descriptors of its standard streams. Return the process number of the rank. Raise
    OSError if the server does not fork.
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
        # The forked rank waits for this byte, which confirms that the launcher has received the
        # process number. If the launcher is interrupted before, the rank ends at once.
        ours.sendall(b"\0")
        return int(_LENGTH_STRUCT.unpack(reply)[0])


@dataclass(frozen=True, slots=True)
class _Request:
    """A request of the launcher to fork a rank: the command, environment and working folder of the
    rank, and the process number of the launcher.
    """

    words: list[str]
    env: dict[str, str]
    folder: str
    parent: int
    files: list[int]
    """Descriptors of the standard streams, then of the socket on which the rank reports its process
    number.
    """

    def close(self) -> None:
        for file in self.files:
            os.close(file)


def _receive_request(line: socket.socket) -> _Request | None:
    """Wait for the next request of the launcher on the socket `line` and return it. Return None if
    the launcher has ended.
    """
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
    """Fork a rank for each request of the launcher. In a rank, return the words that the rank runs.
    In the server, return None when the launcher has ended.
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
    """Set up this process, which has just been forked, as the request specifies: a new session, the
    launcher as parent, environment, working folder and standard streams. Then report its process
    number.
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
        # All forked ranks start with one state of numpy's generator, so without a new seed they
        # would generate equal random numbers.
        importlib.import_module("numpy.random").seed()


def _is_single_threaded() -> bool:
    """Return True if this process has one thread, so that a fork loses no thread. The threads are
    counted after a test fork, because the fork handlers of some libraries, such as OpenBLAS, end
    idle threads.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return threading.active_count() == 1 and len(list(Path("/proc/self/task").iterdir())) == 1


def main() -> None:
    """Import the modules that the command line names, then serve requests until the launcher ends.
    In a forked rank, run the words of its request.
    """
    line = socket.socket(fileno=int(sys.argv[1]))
    # Garbage collection is disabled during the imports, because it took a fifth of their time.
    # Imports create many objects, but few reference cycles.
    gc.disable()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    if not _is_single_threaded():
        return
    # `freeze` excludes the imported objects from later garbage collections, which would otherwise
    # write to the memory pages that all forked ranks share.
    gc.freeze()
    gc.enable()
    if (words := _serve_requests(line)) is not None:
        run(words)


if __name__ == "__main__":
    main()
