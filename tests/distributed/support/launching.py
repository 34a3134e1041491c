"""Small programs, and the command that launches them, run as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autopipe.backends.torch.codegen.program import ProgramFiles, Provenance, write_program
from autopipe.cli.main import main
from autopipe.ir.batch import batch_axes_of
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Optimizer
from autopipe.passes.lower.lower import lower
from tests.distributed.support.builder import mlp
from tests.distributed.support.running import schedule_of

PATIENCE_S = 240
"""How long a launch may take before a test gives up on it, however busy the machine."""
MICRO_BATCHES = 3
BATCH = 4
ROOT = Path(__file__).resolve().parents[3]


def write_chain(
    folder: Path,
    optimizer: Optimizer | None = None,
    groups: tuple[tuple[int, ...], ...] = ((0,), (1,)),
    plan: str = "plan",
    train: bool = True,
) -> Path:
    """A program of products with tanh, in as many stages as groups; a group of several ranks is
    data-parallel.
    """
    graph, loss = mlp(len(groups) * 2, batch=BATCH)
    batch = batch_axes_of(graph)
    count = len(graph.nodes)
    stages = []
    for number, ranks in enumerate(groups):
        nodes = range(count * number // len(groups), count * (number + 1) // len(groups))
        axes = {node: batch.axis(node) for node in nodes} if len(ranks) > 1 else {}
        splits = tuple((node, (Split(axis, len(ranks)),)) for node, axis in axes.items() if axis)
        stages.append(Stage(tuple(nodes), ranks, BATCH, splits))
    placement = Placement(tuple(stages))
    schedule = schedule_of(graph, placement, MICRO_BATCHES, "1f1b", train)
    program = lower(graph, placement, schedule, loss if train else None)
    titles = tuple("A stage." for _ in program.stages), tuple("A rank." for _ in program.ranks)
    provenance = Provenance(
        "model.onnx", "digest", plan, optimizer or Optimizer(), "fp32", 7, 0.1, 0.2
    )
    write_program([ProgramFiles("", program, *titles)], provenance, folder)
    return folder


def spell_data(folder: Path, body: str = "pass") -> str:
    """A module with a function of batches in `folder`, and its name for --data.

    `body` runs before batch `step` is given; it sees `step`, `rank`, `here` (the folder) and the
    whole of `os`.
    """
    text = f"""
import os, signal, time
from pathlib import Path
import numpy as np

def batches():
    here, rank = Path({str(folder)!r}), int(os.environ["RANK"])
    step = 0
    while True:
        {body}
        yield {{"in0": np.random.default_rng(step).normal(size=({BATCH * MICRO_BATCHES}, 4))}}
        step += 1
"""
    (folder / "batch_source.py").write_text(text, encoding="utf-8")
    return "batch_source:batches"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a launch ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def result(self) -> dict[str, Any]:
        """The last object on stdout of a launch with --json."""
        found: dict[str, Any] = json.loads(self.stdout.splitlines()[-1])
        return found

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [step["loss"] for step in self.result["steps"]]


def start(
    program: Path,
    *arguments: object,
    cwd: Path | None = None,
    path: tuple[Path, ...] = (),
    within: tuple[str, ...] = (),
) -> subprocess.Popen[str]:
    """Start `autopipe launch` on the CPU, in the program's parent folder.

    `path` are folders where modules are looked for first; the command `within` runs the launch.
    """
    command = [*within, sys.executable, "-m", "autopipe", "launch", str(program), "--device", "cpu"]
    command += map(str, arguments)
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (*path, ROOT)))
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    return subprocess.Popen(
        command,
        cwd=cwd or program.parent,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[str]) -> Ended:
    """Wait for a launch; nothing it started is left afterwards."""
    try:
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    return Ended(process.returncode, stdout, stderr)


def launch(program: Path, *arguments: object) -> Ended:
    """`autopipe launch` from start to end."""
    return finish(start(program, *arguments))


def launch_here(capsys: pytest.CaptureFixture[str], program: Path, *arguments: object) -> Ended:
    """The same in this process, for tests whose ranks are those of `here`."""
    capsys.readouterr()
    code = main(["launch", str(program), "--device", "cpu", *map(str, arguments)])
    return Ended(code, *capsys.readouterr())


def write_key(folder: Path) -> Path:
    """A key for `--rdzv-key`."""
    path = folder / "key"
    path.touch(0o600)
    path.write_text(os.urandom(32).hex(), encoding="ascii")
    return path


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
            not in "ZX"
        )
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> list[int]:
    """A process, what it has started, and so on."""
    found = [pid]
    for each in found:
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            found += map(int, children.read_text(encoding="ascii").split())
    return found


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until something is so while a process runs."""
    end = time.monotonic() + PATIENCE_S
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def rank_pids(launcher: int) -> dict[int, int]:
    """Return the process number of each rank that a launcher runs, by rank."""
    found = {}
    for child in (
        Path(f"/proc/{launcher}/task/{launcher}/children").read_text(encoding="ascii").split()
    ):
        name = Path(f"/proc/{child}/comm").read_text(encoding="ascii").strip()
        if name.startswith("rank "):
            found[int(name.removeprefix("rank "))] = int(child)
    return found
