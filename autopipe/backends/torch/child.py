"""Start of child processes of autopipe. A child ends with its parent, and does not import modules
from the current folder.

`python -P -m autopipe.backends.torch.child FILE.py|MODULE ARGUMENT...` runs the file or module as
its main program.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence

PARENT_VARIABLE = "AUTOPIPE_PARENT"
"""Environment variable with the process number of the parent."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_ORPHANED_EXIT_CODE = 5


def python_command(*words: str) -> list[str]:
    """Return the command line of a child process that runs `words`: a Python file or module, and
    its arguments.

    The flag -P removes the current folder from the module search path. Another user may have put a
    file such as `queue.py` there.
    """
    return [sys.executable, "-P", "-u", "-m", "autopipe.backends.torch.child", *words]


@contextlib.contextmanager
def temporary_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Context manager that sets environment variables of this process, which child processes
    inherit, and restores them afterwards.
    """
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


def end_with_parent(parent: int) -> None:
    """Let Linux kill this process as soon as its parent ends. `parent` is the parent's process
    number; exit at once if that process is no longer the parent. Linux watches the thread of the
    parent that started this process, so parents start children from their main thread.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(_ORPHANED_EXIT_CODE)


@contextlib.contextmanager
def adopt_orphans() -> Iterator[None]:
    """Context manager during which Linux makes this process the parent of each descendant whose own
    parent ends.
    """
    libc = ctypes.CDLL(None)
    before = ctypes.c_int(0)
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def show_rank() -> None:
    """Set the name of this process to its rank, such as `rank 3`. `ps -e` and `top` show the name.
    Do nothing without the environment variable RANK.
    """
    if sys.platform == "linux" and "RANK" in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"rank {os.environ['RANK']}".encode(), 0, 0, 0)


def run(words: Sequence[str]) -> None:
    """Run `words`, a Python file or module and its arguments, as the main program of this
    process.
    """
    sys.argv[:] = words
    if words[0].endswith(".py"):
        runpy.run_path(words[0], run_name="__main__")
    else:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def main() -> None:
    """Run the program that the command line names. First tie this process to its parent, because
    imports may take long.
    """
    if PARENT_VARIABLE in os.environ:
        end_with_parent(int(os.environ[PARENT_VARIABLE]))
    show_rank()
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
