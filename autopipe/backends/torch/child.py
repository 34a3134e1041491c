"""Processes that ours start: they end with the one that started them, and look for modules in known folders alone.

`python -P -m autopipe.backends.torch.child FILE.py|MODULE ARGUMENT...` runs the file or module as its main program.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Iterator, Mapping

PARENT = "AUTOPIPE_PARENT"
"""Environment variable with the number of the process that starts others."""
_PR_SET_PDEATHSIG = 1
_ORPHANED = 5


def python_command(*words: str) -> list[str]:
    """The command of a child that runs `words`, a file or module of Python and its arguments. -P: the current folder,
    where anybody may have put a `queue.py`, is not where modules are looked for."""
    return [sys.executable, "-P", "-u", "-m", "autopipe.backends.torch.child", *words]


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Change this process's environment, which those that it starts inherit, for the length of the block."""
    saved = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def end_with(parent: int) -> None:
    """From now on, this process is killed when its parent, process number `parent`, ends; at once where it has. Linux
    keeps the promise to the thread that started this process, so that a parent does so from its main thread."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(_ORPHANED)


def main() -> None:
    """Become what the command line names; before its imports, which may take minutes, the process is tied."""
    if PARENT in os.environ:
        end_with(int(os.environ[PARENT]))
    del sys.argv[0]
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
