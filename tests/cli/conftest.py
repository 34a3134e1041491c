"""What tests of the command line may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command_line import CommandLine


@pytest.fixture
def command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    """The command line in an empty folder, `command_line.folder`, which is the working folder
    too.
    """
    return CommandLine.prepare(tmp_path, monkeypatch, capsys)
