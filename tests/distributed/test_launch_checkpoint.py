"""What goes wrong with a checkpoint ends a launch in one line with the right exit code, and harms
no other one.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autopipe.backends.torch.checkpoint import (
    checkpoint_path,
    committed_steps,
    read_checkpoint,
    verify_file,
)
from autopipe.ir.problem import Optimizer
from tests.distributed.support.launching import Ended, finish, start, write_chain
from tests.distributed.support.pool import Pools

pytestmark = pytest.mark.distributed

LARGEST_FILE = 5000
"""Bytes: less than a rank's file, of which a generator's state takes 5056, more than what else a
launch writes.
"""


@pytest.fixture
def program(pools: Pools, tmp_path: Path) -> Path:
    """A program of two ranks that has saved after steps 1 and 2."""
    made = write_chain(tmp_path / "program", Optimizer("adamw"))
    pools.of(2).run(
        made,
        "--device",
        "cpu",
        "--steps",
        2,
        "--checkpoint",
        tmp_path / "saved",
        "--checkpoint-every",
        1,
    )
    return made


@contextmanager
def small_disk() -> Iterator[None]:
    """What is started meanwhile cannot write larger files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def go_on(program: Path) -> Ended:
    """Two more steps."""
    saved = program.parent / "saved"
    return finish(
        start(program, "--steps", 4, "--checkpoint", saved, "--checkpoint-every", 1, "--resume")
    )


def assert_untouched(folder: Path, *steps: int) -> None:
    """These checkpoints are there and whole, and nothing else is."""
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock",
        *(f"step_{step:08d}" for step in steps),
    ]
    for step in committed_steps(folder):
        path = checkpoint_path(folder, step)
        for file in read_checkpoint(path).files:
            verify_file(path, file)


def test_a_disk_that_takes_no_more(program: Path) -> None:
    with small_disk():
        saved = program.parent / "saved"
        process = start(
            program, "--steps", 4, "--checkpoint", saved, "--checkpoint-every", 1, "--resume"
        )
    ended = finish(process)
    assert ended.code == 5, ended.stderr
    (line,) = (line for line in ended.stderr.splitlines() if line.startswith("error:"))
    assert line.startswith("error: rank 0, task checkpoint: ")
    assert "the checkpoint cannot be written: File too large" in line
    assert "earlier checkpoints are unchanged" in ended.stderr
    assert_untouched(saved, 1, 2)


@pytest.fixture
def full_disk(program: Path, tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for the second checkpoint and half of another."""
    newest = program.parent / "saved" / "step_00000002"
    pages = sum(-(-path.stat().st_size // 4096) for path in newest.iterdir())
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"size={4096 * (pages + pages // 2)}",
        "tmpfs",
        str(disk),
    ]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    shutil.copytree(newest, disk / newest.name)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.sweep
def test_a_full_disk(program: Path, full_disk: Path) -> None:
    ended = finish(
        start(program, "--steps", 4, "--checkpoint", full_disk, "--checkpoint-every", 1, "--resume")
    )
    assert ended.code == 5, ended.stderr
    (line,) = (line for line in ended.stderr.splitlines() if line.startswith("error:"))
    assert (
        "task checkpoint: " in line
        and "the checkpoint cannot be written: No space left on device" in line
    )
    assert_untouched(full_disk, 2)


@pytest.mark.sweep
@pytest.mark.parametrize("damage", ["flip", "remove", "manifest"])
def test_a_damaged_newest_one(program: Path, damage: str) -> None:
    newest = program.parent / "saved" / "step_00000002"
    path = newest / ("manifest.json" if damage == "manifest" else "rank_00001.safetensors")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data)
    ended = go_on(program)
    assert ended.code == 5, ended.stderr
    (line,) = (line for line in ended.stderr.splitlines() if line.startswith("error:"))
    assert "task restore" in line and str(path) in line and "the checkpoint is damaged" in line
    assert "remove step_00000002 to go on from the one before" in ended.stderr
    shutil.rmtree(newest)
    assert_untouched(program.parent / "saved", 1)
    assert go_on(program).code == 0


@pytest.mark.sweep
def test_one_of_another_model(program: Path) -> None:
    manifest = json.loads((program / "manifest.json").read_text())
    manifest["parameters"][0]["name"] = "another"
    (program / "manifest.json").write_text(json.dumps(manifest))
    ended = go_on(program)
    assert ended.code == 2, ended.stderr
    (line,) = (line for line in ended.stderr.splitlines() if line.startswith("error:"))
    assert "the checkpoint was written for another model: it has no parameter 'another'" in line
    assert_untouched(program.parent / "saved", 1, 2)
