"""What tests of the papers' benchmarks may ask for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import benchmarks
from tests.cli.command_line import CommandLine


@pytest.fixture
def command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    """`python -m benchmarks` in an empty folder, which is the working folder too."""
    return replace(CommandLine.prepare(tmp_path, monkeypatch, capsys), command=benchmarks)
