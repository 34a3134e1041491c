"""Runs ranks of programs on fake CUDA tensors, each in a fork, and writes a JSON line for each of
them:

python -m autopipe.backends.torch.fake_cuda LIBRARY tests/fake_cuda/programs.py FOUND
PROGRAM[:RANK]...
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from autopipe.backends.torch.runtime import rank
from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.backends.torch.runtime.modes import dry_run
from tests.fake_cuda.watching import Watcher, line

_watcher = Watcher()


class _Tracker(dry_run.MemoryTracker):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        _watcher.see(function, args, kwargs, result)
        return result


def _watched_run(run: Callable[..., Any]) -> Callable[..., Any]:
    def watched(self: rank.Rank, step: Callable[[], None]) -> Any:
        _watcher.watching = True
        result = run(self, step)
        _watcher.watching = False
        return result

    return watched


def _unwatched_end(end_step: Callable[..., None]) -> Callable[..., None]:
    def unwatched(self: dry_run.DryReporter, *arguments: Any) -> None:
        _watcher.watching = False
        end_step(self, *arguments)

    return unwatched


def _run(folder: Path, number: int) -> None:
    """Run a rank in this process, which is good for nothing else afterwards."""
    world = read_manifest(folder).world_size
    os.environ.update(RANK=str(number), LOCAL_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE="1")
    dry_run.MemoryTracker = _Tracker  # type: ignore[misc]
    rank.Rank.run = _watched_run(rank.Rank.run)  # type: ignore[method-assign]
    dry_run.DryReporter.end_step = _unwatched_end(dry_run.DryReporter.end_step)  # type: ignore[method-assign]
    sys.argv = ["rank", "--dry-run", "--device", "cuda"]
    sys.path.insert(0, str(folder))
    with _watcher.waits_noted():
        runpy.run_path(str(folder / f"rank_{number:03d}.py"), run_name="__main__")


def main() -> None:
    out = Path(sys.argv[1])
    for word in sys.argv[2:]:
        name, _, only = word.partition(":")
        folder = Path(name).resolve()
        for number in [int(only)] if only else range(read_manifest(folder).world_size):
            if child := os.fork():
                assert os.waitpid(child, 0)[1] == 0
                continue
            error = ""
            try:
                _run(folder, number)
            except BaseException as caught:  # noqa: BLE001
                frames = traceback.extract_tb((caught.__cause__ or caught).__traceback__)
                ours = [each for each in frames if "site-packages" not in each.filename]
                error = f"{caught}, in {ours}"
            found = [
                (kind, place, count) for (kind, place), count in sorted(_watcher.found.items())
            ]
            with out.open("a", encoding="utf-8") as file:
                file.write(line(program=str(folder), rank=number, error=error, found=found))
            os._exit(0)


main()
