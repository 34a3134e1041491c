"""Ctrl-C and SIGTERM save a last checkpoint; minutes between checkpoints; which of them stay."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from autopipe.backends.torch.checkpoint import (
    committed_steps,
    remove_old_checkpoints,
    remove_other_checkpoints,
)
from autopipe.backends.torch.runtime.watch.step_agreement import (
    SAVE_REQUEST,
    STOP_REQUEST,
    StepAgreement,
)
from autopipe.ir.problem import Optimizer
from tests.distributed.support.launching import (
    finish,
    launch,
    launch_here,
    spell_data,
    start,
    wait_for,
    write_chain,
)

pytestmark = pytest.mark.distributed


SLOW = """time.sleep(0.2)
        if step == 3 and rank == 0:
            (here / 'reached').write_text('')"""


@pytest.mark.parametrize(
    "sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.sweep)]
)
def test_who_stops_a_run_may_go_on_as_if_nothing_had_been(
    here: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sent: signal.Signals,
) -> None:
    monkeypatch.chdir(tmp_path)
    program = write_chain(tmp_path / "program", Optimizer("adamw", lr=0.05), groups=((0, 1), (2,)))
    flags = ("--json", "--checkpoint", tmp_path / "saved")
    data = spell_data(tmp_path, SLOW)
    process = start(program, "--steps", 1000, "--data", data, *flags)
    wait_for((tmp_path / "reached").exists, process)
    os.kill(process.pid, sent)
    stopped = finish(process)
    assert stopped.code == (130 if sent is signal.SIGINT else 5), stopped.stderr
    assert "death signal" not in stopped.stderr
    if sent is signal.SIGINT:
        assert "to go on: autopipe launch" in stopped.stderr and "--resume" in stopped.stderr
    (saved,) = committed_steps(tmp_path / "saved")
    assert 4 <= saved < 1000
    resumed = launch_here(capsys, program, "--steps", saved + 2, "--resume", "--data", data, *flags)
    assert resumed.code == 0, resumed.stderr
    whole = launch_here(capsys, program, "--steps", saved + 2, "--data", data, "--json")
    assert resumed.losses == whole.losses[saved:]


class Together:
    """A control group and a store of several threads, in place of ranks."""

    def __init__(self, ranks: int) -> None:
        self.values: dict[str, bytes] = {}
        self.counts: dict[str, int] = {}
        self._lock = threading.Lock()
        self._barrier = threading.Barrier(ranks)
        self._told: dict[int, object] = {}
        self.world_size = ranks

    def group(self, rank: int) -> _Member:
        return _Member(self, rank)

    def gather(self, rank: int, value: object) -> list[object]:
        self._told[rank] = value
        self._barrier.wait()
        found = [self._told[each] for each in range(self.world_size)]
        self._barrier.wait()
        return found

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, value: int) -> int:
        with self._lock:
            self.counts[key] = self.counts.get(key, 0) + value
            return self.counts[key]


class _Member:
    def __init__(self, together: Together, rank: int) -> None:
        self.together = together
        self.rank = rank
        self.world_size = together.world_size

    def run_collectively(self, task: str, act: object) -> list[object]:
        assert callable(act)
        return self.together.gather(self.rank, act())


def test_ranks_at_different_steps_act_after_the_same_one() -> None:
    """Four ranks, each at most two steps ahead of the next, ask in the middle of it, some at the
    same time.
    """
    ranks = 4
    steps = 60
    together = Together(ranks)
    done = [0] * ranks
    acted: list[dict[int, set[str]]] = [{} for _ in range(ranks)]

    def run(rank: int) -> None:
        agreement = StepAgreement(together, together.group(rank))  # type: ignore[arg-type]
        for step in range(1, steps + 1):
            while rank + 1 < ranks and done[rank + 1] < step - 2:
                time.sleep(0.001)  # A pipeline: messages of a later rank are waited for.
            while rank and done[rank - 1] < step - 1:
                time.sleep(0.001)
            time.sleep(0.02)
            if (rank, step) in {(1, 10), (2, 11), (3, 40)}:
                agreement.request(SAVE_REQUEST if step > 20 else STOP_REQUEST)
            done[rank] = step
            if found := agreement.requests_after(step):
                acted[rank][step] = found
        done[rank] = steps + 2
        agreement.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not any(each.is_alive() for each in threads)
    assert acted[0] and all(each == acted[0] for each in acted)
    assert set().union(*acted[0].values()) == {SAVE_REQUEST, STOP_REQUEST}


def test_which_checkpoints_stay(tmp_path: Path) -> None:
    def kept(latest: int, every: int = 0) -> list[int]:
        for step in range(5, 55, 5):
            (tmp_path / f"step_{step:08d}").mkdir(exist_ok=True)
        remove_old_checkpoints(tmp_path, latest, every)
        return committed_steps(tmp_path)

    assert kept(2) == [45, 50]
    assert kept(1, 20) == [20, 40, 50]
    assert kept(0) == list(range(5, 55, 5))
    remove_other_checkpoints(tmp_path, 30)
    assert committed_steps(tmp_path) == [30]


def test_minutes_between_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = write_chain(tmp_path / "program")
    flags = (
        "--checkpoint",
        tmp_path / "saved",
        "--checkpoint-every",
        "0.02m",
        "--keep-latest-k",
        0,
    )
    ended = launch(
        program, "--steps", 30, "--data", spell_data(tmp_path, "time.sleep(0.2)"), *flags
    )
    assert ended.code == 0, ended.stderr
    *between, last = committed_steps(tmp_path / "saved")
    assert last == 30 and between
    wrong = launch_here(
        capsys, program, "--checkpoint", tmp_path / "other", "--checkpoint-every", "5x"
    )
    assert wrong.code == 2 and "neither a number of steps nor minutes" in wrong.stderr
