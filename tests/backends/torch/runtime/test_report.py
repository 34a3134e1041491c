"""Reports of steps: those of short ones are shown several at a time, and none is lost."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopipe.backends.torch.runtime.report import Reporter
from autopipe.ir.errors import LaunchError


class AlonePulse:
    @contextlib.contextmanager
    def waiting(self) -> Any:
        yield


@pytest.fixture
def rank(tmp_path: Path) -> Any:
    """Rank 0, alone, as far as a reporter looks at it."""
    return SimpleNamespace(
        number=0,
        train=False,
        steps_done=0,
        stages={},
        device=torch.device("cpu"),
        heartbeat=AlonePulse(),
        clock=SimpleNamespace(spans=list),
        manifest=SimpleNamespace(batch_size=4, predicted_bubble=0.0),
        options=SimpleNamespace(trace=None, report=tmp_path / "report.jsonl"),
        transport=SimpleNamespace(traffic=Counter(), gather_numbers=lambda numbers: [numbers]),
    )


def steps(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text(encoding="utf-8").splitlines()]


def run(reporter: Reporter, rank: Any, count: int, seconds: float) -> None:
    for _ in range(count):
        reporter.end_step(seconds)
        rank.steps_done += 1


def test_the_first_report_is_shown_at_once_and_those_of_short_steps_together(
    rank: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = Reporter(rank)
    run(reporter, rank, 1, 0.06)
    assert capsys.readouterr().out.startswith("step 0 ")
    run(reporter, rank, 3, 0.06)
    assert steps(rank.options.report) == [0], "a quarter of a second holds four"
    run(reporter, rank, 2, 0.06)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["1", "2", "3", "4"]
    reporter.report()
    reporter.report()
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["5"], "each is shown once"
    assert steps(rank.options.report) == list(range(6))


def test_a_report_of_a_long_step_is_shown_at_once(rank: Any, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(rank)
    for number in range(3):
        run(reporter, rank, 1, 0.3)
        assert capsys.readouterr().out.startswith(f"step {number} ")


def test_never_more_than_so_many_steps_wait_for_their_report(rank: Any) -> None:
    reporter = Reporter(rank)
    run(reporter, rank, 17, 1e-6)
    assert steps(rank.options.report) == list(range(17))


def test_figures_of_ranks_come_together_by_step(rank: Any) -> None:
    def gather(numbers: list[float]) -> list[list[float]]:
        other = list(numbers)
        for place in (4, 4 + (len(numbers) - 1) // 2):  # Each step's seconds.
            other[place] *= 2
        return [numbers, other]

    reporter = Reporter(rank)
    run(reporter, rank, 1, 0.125)
    rank.transport.gather_numbers = gather
    reporter.end_step(0.1)
    rank.steps_done += 1
    reporter.end_step(0.2)
    lines = [json.loads(line) for line in rank.options.report.read_text(encoding="utf-8").splitlines()]
    assert [(each["step"], each["step_time_s"]) for each in lines] == [(0, 0.125), (1, 0.2), (2, 0.4)]
    assert all(len(each["peak_memory_bytes"]) == 2 for each in lines[1:])


def test_steps_before_a_loss_that_is_no_number_are_shown(rank: Any) -> None:
    def stage(loss: float) -> Any:
        return SimpleNamespace(losses={1: torch.tensor(loss)}, loss_share=1.0)

    rank.train = True
    reporter = Reporter(rank)
    run(reporter, rank, 1, 0.06)
    for loss in (2.0, float("nan"), 3.0):
        rank.stages = {4: stage(loss)}
        run(reporter, rank, 1, 0.06)
    with pytest.raises(LaunchError, match=r"rank 0, stage 4, micro-batch 1.* at step 2"):
        reporter.report()
    assert steps(rank.options.report) == [0, 1]
