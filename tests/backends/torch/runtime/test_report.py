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

from autopipe.backends.torch.runtime import report
from autopipe.backends.torch.runtime.report import Reporter


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
        pulse=AlonePulse(),
        clock=SimpleNamespace(spans=list),
        manifest=SimpleNamespace(batch_size=4, predicted_bubble=0.0),
        options=SimpleNamespace(trace=None, report=tmp_path / "report.jsonl"),
        transport=SimpleNamespace(traffic=Counter(), gather_numbers=lambda numbers: [numbers]),
    )


def steps(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text(encoding="utf-8").splitlines()]


def run(reporter: Reporter, rank: Any, count: int) -> None:
    for _ in range(count):
        reporter.end_step(0.5)
        rank.steps_done += 1


def test_the_first_report_is_shown_at_once_and_the_next_ones_together(
    rank: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "_EVERY_S", 1000.0)
    reporter = Reporter(rank)
    run(reporter, rank, 3)
    assert capsys.readouterr().out.count("\n") == 1
    assert steps(rank.options.report) == [0]
    reporter.show()
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["1", "2"]
    assert steps(rank.options.report) == [0, 1, 2]
    reporter.show()
    assert not capsys.readouterr().out, "each is shown once"


def test_a_report_is_shown_at_once_where_the_last_one_was_long_ago(
    rank: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "_EVERY_S", 0.0)
    reporter = Reporter(rank)
    for number in range(3):
        run(reporter, rank, 1)
        assert capsys.readouterr().out.startswith(f"step {number} ")
