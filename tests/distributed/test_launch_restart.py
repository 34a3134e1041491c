"""A rank is killed in the middle of a step: all start again and compute, bit by bit, what they
would have.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from autopipe.backends.torch.checkpoint import committed_steps
from autopipe.backends.torch.verification import read_losses
from autopipe.ir.problem import Optimizer
from tests.distributed.support.launching import (
    finish,
    rank_pids,
    runs,
    spell_data,
    start,
    wait_for,
    write_chain,
)
from tests.distributed.support.pool import Pools

pytestmark = pytest.mark.distributed

STEPS = 6
# Rank 0 stops in step 4 until it is killed with the others; started again, it finds that it has
# been there.
BLOCK = """if step == 4 and rank == 0 and not (here / 'reached').exists():
            (here / 'reached').write_text('')
            time.sleep(10**6)"""
# Rank 0 takes its time once, so that rank 1 is stopped while it waits.
SLOW = """if step == 4 and rank == 0 and not (here / 'reached').exists():
            (here / 'reached').write_text('')
            time.sleep(2)"""


@pytest.mark.parametrize(
    "optimizer",
    [
        Optimizer("adamw", lr=0.05, weight_decay=0.1),
        pytest.param(Optimizer("sgd", lr=0.05, momentum=0.9), marks=pytest.mark.sweep),
    ],
    ids=["adamw", "momentum"],
)
def test_losses_after_a_restart_are_those_of_an_undisturbed_run(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, optimizer: Optimizer
) -> None:
    monkeypatch.chdir(tmp_path)
    program = write_chain(tmp_path / "program", optimizer, groups=((0, 1), (2,)))
    report = tmp_path / "report.jsonl"
    pools.of(3).run(
        program,
        "--device",
        "cpu",
        "--steps",
        STEPS,
        "--report",
        report,
        "--data",
        spell_data(tmp_path),
    )
    undisturbed = read_losses(report)
    flags = ("--checkpoint", tmp_path / "saved", "--checkpoint-every", 2)
    process = start(
        program, "--steps", STEPS, "--json", "--data", spell_data(tmp_path, BLOCK), *flags
    )
    wait_for((tmp_path / "reached").exists, process)
    os.kill(rank_pids(process.pid)[1], signal.SIGKILL)
    ended = finish(process)
    assert ended.code == 0, ended.stderr
    assert (
        "rank 1: killed by SIGKILL" in ended.stderr and "starting all ranks again" in ended.stderr
    )
    assert len(set(undisturbed)) == STEPS
    assert ended.losses == undisturbed
    assert committed_steps(tmp_path / "saved") == [4, 6]


def test_a_rank_that_hangs_is_started_again_from_the_last_checkpoint(tmp_path: Path) -> None:
    program = write_chain(tmp_path / "program", Optimizer("sgd", lr=0.05, momentum=0.9))
    flags = (
        "--checkpoint",
        tmp_path / "saved",
        "--checkpoint-every",
        2,
        "--step-timeout",
        5,
        "--json",
    )
    process = start(program, "--steps", STEPS, "--data", spell_data(tmp_path, SLOW), *flags)
    wait_for((tmp_path / "reached").exists, process)
    os.kill(rank_pids(process.pid)[1], signal.SIGSTOP)
    ended = finish(process)
    assert ended.code == 0, ended.stderr
    assert re.search(r"rank 1 hangs in task 1[FB]\d for \d+ s", ended.stderr), ended.stderr
    assert "starting all ranks again" in ended.stderr
    assert [step["step"] for step in ended.result["steps"]] == list(range(STEPS))


def test_without_restarts_a_killed_rank_ends_the_run(tmp_path: Path) -> None:
    program = write_chain(tmp_path / "program")
    process = start(program, "--steps", STEPS, "--data", spell_data(tmp_path, BLOCK))
    wait_for((tmp_path / "reached").exists, process)
    pids = rank_pids(process.pid)
    os.kill(pids[1], signal.SIGKILL)
    ended = finish(process)
    assert ended.code == 5
    assert "error: rank 1: killed by SIGKILL" in ended.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    program = write_chain(tmp_path / "program")
    process = start(program, "--steps", STEPS, "--data", spell_data(tmp_path, BLOCK))
    wait_for((tmp_path / "reached").exists, process)
    pids = rank_pids(process.pid)
    assert set(pids) == {0, 1}
    process.kill()
    finish(process)
    deadline = time.monotonic() + 120
    while any(runs(pid) for pid in pids.values()):
        assert time.monotonic() < deadline, "a rank outlives its launcher"
        time.sleep(0.1)
