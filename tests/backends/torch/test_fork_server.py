"""Processes that a fork server starts differ from those of a new interpreter only in what they have
imported.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from autopipe.backends.torch.child import PARENT_VARIABLE
from autopipe.backends.torch.fork_server import (
    SWITCH_VARIABLE,
    ForkedProcess,
    ForkServer,
    fork_server,
    start_early,
)
from tests.distributed.support.launching import descendants, runs

PATIENCE_S = 240

REPORT = """
import json, os, signal, sys
from pathlib import Path
found = {
    "arguments": sys.argv[1:],
    "own variable": os.environ.get("OWN"),
    "variable of the server": os.environ.get("OF_THE_SERVER"),
    "folder": os.getcwd(),
    "leads its session": os.getsid(0) == os.getpid(),
    "parent": os.getppid(),
    "name": Path("/proc/self/comm").read_text().strip(),
    "main": sys.modules["__main__"].__file__,
    "torch": "torch" in sys.modules,
    "current folder is searched": "" in sys.path or os.getcwd() in sys.path,
    "at Ctrl-C": signal.getsignal(signal.SIGINT).__name__,
}
print(json.dumps(found))
print("to stderr", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    os.environ["OF_THE_SERVER"] = "set"
    try:
        with fork_server() as started:
            del os.environ["OF_THE_SERVER"]
            yield started
    finally:
        os.environ.pop("OF_THE_SERVER", None)


def start(
    server: ForkServer, folder: Path, text: str, **variables: str
) -> ForkedProcess | subprocess.Popen[bytes]:
    """Start `text` as a program of Python whose output goes to `output` and `errors` in the
    folder.
    """
    program = folder / "program.py"
    program.write_text(text, encoding="utf-8")
    changes = {PARENT_VARIABLE: str(os.getpid())} | variables
    with (
        open(os.devnull, encoding="utf-8") as nothing,
        (folder / "output").open("w") as output,
        (folder / "errors").open("w") as errors,
    ):
        return server.start(
            [str(program), "a", "b c"], os.environ | changes, (nothing, output, errors)
        )


def report(server: ForkServer, folder: Path) -> dict[str, Any]:
    process = start(server, folder, REPORT, RANK="3", OWN="here")
    assert process.wait(PATIENCE_S) == 0
    found: dict[str, Any] = json.loads((folder / "output").read_text())
    return found


def test_a_fork_is_as_a_new_interpreter_but_for_its_imports(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    forked = report(server, tmp_path)
    interpreted = report(ForkServer(), tmp_path)
    assert forked.pop("torch") is True
    assert interpreted.pop("torch") is False
    assert forked == interpreted
    assert forked == {
        "arguments": ["a", "b c"],
        "own variable": "here",
        "variable of the server": None,
        "folder": str(tmp_path),
        "leads its session": True,
        "parent": os.getpid(),
        "name": "rank 3",
        "main": str(tmp_path / "program.py"),
        "current folder is searched": False,
        "at Ctrl-C": "default_int_handler",
    }
    assert (tmp_path / "errors").read_text() == "to stderr\n"


@pytest.mark.parametrize(
    ("text", "code", "errors"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise ValueError('of the rank')", 1, "ValueError: of the rank\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        (
            "import sys; sys.excepthook = lambda *_: print('hook', file=sys.stderr); 1 / 0",
            1,
            "hook\n",
        ),
    ],
    ids=["exit code", "exception", "signal", "hook of exceptions"],
)
def test_a_process_that_fails_says_how(
    server: ForkServer, tmp_path: Path, text: str, code: int, errors: str
) -> None:
    process = start(server, tmp_path, text)
    assert process.wait(PATIENCE_S) == code
    assert process.poll() == code
    assert (tmp_path / "errors").read_text().endswith(errors)


def test_a_process_that_runs_can_be_waited_for_and_killed(
    server: ForkServer, tmp_path: Path
) -> None:
    process = start(server, tmp_path, "import time; time.sleep(10**6)")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    process.kill()
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    process.kill()
    assert not runs(process.pid)


def test_forks_draw_different_numbers(server: ForkServer, tmp_path: Path) -> None:
    drawn = set()
    for _ in range(2):
        text = (
            "import random, uuid\nimport numpy\nprint(random.random(), numpy.random.random(), "
            "uuid.uuid4())"
        )
        assert start(server, tmp_path, text).wait(PATIENCE_S) == 0
        drawn |= set((tmp_path / "output").read_text().split())
    assert len(drawn) == 6


def test_processes_go_on_when_the_server_stops_and_it_leaves_none(tmp_path: Path) -> None:
    before = set(descendants(os.getpid()))
    with fork_server() as server:
        process = start(server, tmp_path, "import time; time.sleep(10**6)")
        assert isinstance(process, ForkedProcess)
    left = set(descendants(os.getpid())) - before
    assert left == {process.pid}
    assert process.poll() is None
    process.kill()
    process.wait(PATIENCE_S)


def test_a_launch_uses_the_server_that_was_started_early(tmp_path: Path) -> None:
    before = set(descendants(os.getpid()))
    start_early()
    (early,) = set(descendants(os.getpid())) - before
    with fork_server() as server:
        assert set(descendants(os.getpid())) - before == {early}
        assert report(server, tmp_path)["torch"] is True
        with fork_server():
            assert len(set(descendants(os.getpid())) - before) == 2
    assert set(descendants(os.getpid())) == before


def test_a_command_that_fails_leaves_no_early_server(tmp_path: Path) -> None:
    """Its server would go on importing for a second or more."""
    words = [sys.executable, "-m", "autopipe", "launch", str(tmp_path / "nowhere")]
    command = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    errors = command.communicate(timeout=PATIENCE_S)[1]
    assert command.returncode == 2, errors
    end = time.monotonic() + PATIENCE_S
    while (left := children_named_by(command.pid)) and time.monotonic() < end:
        time.sleep(0.05)
    assert left == []


def children_named_by(parent: int) -> list[str]:
    """Return the running processes whose environment names `parent` as the process that they end
    with.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{PARENT_VARIABLE}={parent}".encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found


def test_without_a_server_that_works_an_interpreter_starts(tmp_path: Path) -> None:
    before = set(descendants(os.getpid()))
    with fork_server() as server:
        (pid,) = set(descendants(os.getpid())) - before
        os.kill(pid, signal.SIGKILL)
        assert report(server, tmp_path)["torch"] is False
        assert report(server, tmp_path)["torch"] is False


def test_a_variable_switches_the_server_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH_VARIABLE, "0")
    before = set(descendants(os.getpid()))
    with fork_server() as server:
        assert set(descendants(os.getpid())) == before
        assert report(server, tmp_path)["torch"] is False


def test_orphans_of_a_process_are_not_adopted_later(server: ForkServer, tmp_path: Path) -> None:
    """Only while a rank starts does the launcher become the parent of orphans."""
    orphan = "import os, time\nparent = os.getpid()\nif os.fork() == 0:\n"
    orphan += (
        "    while os.getppid() == parent:\n        time.sleep(0.05)\n    print(os.getppid())\n"
    )
    process = start(server, tmp_path, orphan)
    assert process.wait(PATIENCE_S) == 0
    end = time.monotonic() + PATIENCE_S
    while not (tmp_path / "output").read_text() and time.monotonic() < end:
        time.sleep(0.05)
    assert int((tmp_path / "output").read_text()) != os.getpid()
