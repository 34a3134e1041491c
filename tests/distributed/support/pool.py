"""Processes that run the ranks of generated programs one after the other, so that torch and gloo
start only once.
"""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import os
import runpy
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest import mock

from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.errors import LaunchError

TIMEOUT_S = 300.0
"""A program of a test takes well under a second; one that takes this long waits for something that
never comes.
"""


START_TIMEOUT_S = 240.0
"""Importing torch on a busy machine may take a minute."""


class RankFailure(AssertionError):
    """A rank of a program failed or never finished."""


@dataclass(slots=True)
class Pool:
    """`size` processes in one gloo world. A failure ends them; the next run starts new ones."""

    size: int
    _processes: list[ForkServerProcess] = field(default_factory=list, repr=False)
    _connections: list[Connection[object, object]] = field(default_factory=list, repr=False)
    _folder: str = field(default="", repr=False)

    def run(self, folder: Path, *arguments: object, timeout_s: float = TIMEOUT_S) -> list[str]:
        """Run every rank's file in `folder` with these command-line arguments; what each printed,
        by rank.

        Raises RankFailure with the first failing rank's traceback, or with the ranks that did not
        finish in time.
        """
        try:
            if not self._processes:
                self._start()
                self._replies(START_TIMEOUT_S)
            for connection in self._connections:
                connection.send(
                    (str(folder), os.getcwd(), [str(argument) for argument in arguments])
                )
            return self._replies(timeout_s)
        except RankFailure:
            self.stop()
            raise

    def _replies(self, timeout_s: float) -> list[str]:
        deadline = time.monotonic() + timeout_s
        printed = [""] * self.size
        waiting = dict(enumerate(self._connections))
        while waiting:
            ready = wait(list(waiting.values()), deadline - time.monotonic())
            if not ready:
                raise RankFailure(
                    f"ranks {sorted(waiting)} of {self.size} did not finish within {timeout_s:g} s"
                )
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                try:
                    error, text = waiting.pop(rank).recv()
                except EOFError:
                    raise RankFailure(f"the process of rank {rank} died") from None
                if error:
                    raise RankFailure(f"rank {rank} failed:\n{error}")
                printed[rank] = text
        return printed

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        # Imported once by the server; its children find them there. Optimizers import
        # torch._dynamo: a second each.
        context.set_forkserver_preload(
            ["torch", "torch.distributed", "torch._dynamo", "autopipe.backends.torch.runtime"]
        )
        self._folder = tempfile.mkdtemp(prefix="autopipe-pool-")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, f"{self._folder}/store", theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes.clear()
        self._connections.clear()


@dataclass(slots=True, eq=False)
class Pools:
    """A pool for every number of ranks that is asked for."""

    _by_size: dict[int, Pool] = field(default_factory=dict, repr=False)

    def of(self, size: int) -> Pool:
        """The pool of `size` processes."""
        return self._by_size.setdefault(size, Pool(size))

    def stop(self) -> None:
        """End all processes."""
        for pool in self._by_size.values():
            pool.stop()


@contextlib.contextmanager
def ranks_in(pools: Pools) -> Iterator[None]:
    """Commands run programs in processes that are kept: to import torch in ten new ones takes
    longer than a journey.
    """

    def run(size: int, folder: Path, arguments: list[str]) -> None:
        try:
            pools.of(size).run(folder, *arguments)
        except RankFailure as error:
            raise LaunchError(str(error).strip().splitlines()[-1], where=folder.name) from error

    def together(
        manifest: Manifest,
        arguments: list[str],
        config: object,
        note: object = None,
        poll: Callable[[], None] = lambda: None,
        server: object = None,
    ) -> None:
        run(manifest.world_size, manifest.folder, arguments)
        poll()

    def alone(folder: Path, arguments: list[str], server: object = None) -> None:
        run(1, folder, arguments)

    with (
        mock.patch("autopipe.backends.torch.launcher.launch_program", together),
        mock.patch("autopipe.backends.torch.profiler.communication.launch_program", together),
        mock.patch("autopipe.api.launching.launch_program", together),
        mock.patch("autopipe.api.verification.launch_program", together),
        mock.patch("autopipe.api.verification.run_single_rank", alone),
        mock.patch("autopipe.api.export_check.run_single_rank", alone),
        mock.patch("autopipe.api.launching.fork_server", contextlib.nullcontext),
        mock.patch("autopipe.api.verification.fork_server", contextlib.nullcontext),
    ):
        yield


def _serve(rank: int, size: int, store: str, connection: Connection[object, object]) -> None:
    """Run rank files until the other end closes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": "1",
        }
    )
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    sys.dont_write_bytecode = True
    if size > 1:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
    gc.freeze()  # To look through torch after every program would take longer than a program.
    connection.send(("", ""))
    while True:
        try:
            folder, cwd, arguments = connection.recv()
        except EOFError:
            os._exit(0)
        printed = io.StringIO()
        error = ""
        try:
            with contextlib.redirect_stdout(printed), _as_main(folder, cwd, arguments):
                runpy.run_path(str(Path(folder) / f"rank_{rank:03d}.py"), run_name="__main__")
        except BaseException:  # noqa: BLE001 - whatever ends a rank is the test's to see
            error = traceback.format_exc()
        connection.send((error, printed.getvalue()))
        # Groups end their threads where nothing refers to them any more; each polls a hundred times
        # a second.
        gc.collect()


@contextlib.contextmanager
def _as_main(folder: str, cwd: str, arguments: list[str]) -> Iterator[None]:
    """The working folder, module path and command line that a process of its own would have."""
    os.chdir(cwd)
    sys.argv = ["rank", *arguments]
    path = list(sys.path)
    modules = set(sys.modules)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path[:] = path
        # Those of the next program, and of its data, may have the same names; ours and installed
        # ones are kept.
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None) or ""
            kept = name.split(".")[0] in ("autopipe", "tests") or file.startswith(sys.prefix)
            if file.startswith((folder, cwd)) and not kept:
                del sys.modules[name]
