"""autopipe's command line in this process, in a folder whose every byte is compared before and
after.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from autopipe.cli.main import main


@dataclass(frozen=True, slots=True)
class Shown:
    """What a command gave back."""

    code: int
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Runs commands in `folder`, their temporary files beside it."""

    folder: Path
    capture: pytest.CaptureFixture[str]
    command: click.Command | None = None
    """Another program than `autopipe`."""

    @staticmethod
    def prepare(
        root: Path, monkeypatch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]
    ) -> CommandLine:
        """Make `root/work` the working folder and `root/temporary` the one for temporary files."""
        for name in ("work", "temporary"):
            (root / name).mkdir()
        monkeypatch.chdir(root / "work")
        monkeypatch.setattr(tempfile, "tempdir", str(root / "temporary"))
        return CommandLine(root / "work", capture)

    def run(self, *words: object) -> Shown:
        """The exit code and both streams of one command."""
        self.capture.readouterr()
        code = main([str(word) for word in words], self.command)
        return Shown(code, *self.capture.readouterr())

    def done(self, *words: object) -> Shown:
        """As `run`, for a command that must succeed."""
        shown = self.run(*words)
        assert shown.code == 0, shown.err
        return shown

    def refuses(self, code: int, words: tuple[object, ...], *says: str) -> str:
        """Assert that the command ends with `code` and one line that holds every text of `says`;
        return that line.

        One hint may follow, warnings may come before. With --json stdout is one object that says
        the same, without it nothing. No file is made, changed or removed.
        """
        before = self._contents()
        plain = self.run(*words)
        as_json = self.run(*words, "--json")
        assert (plain.code, as_json.code) == (code, code), plain.err
        assert plain.out == ""
        for shown in (plain, as_json):
            line, hint = _only_error(shown.err)
            for text in says:
                assert text in f"{line}\n{hint}", f"{text!r} is not in {line!r} and {hint!r}"
        assert as_json.out.count("\n") == 1, as_json.out
        described = json.loads(as_json.out)["error"]
        assert described["exit_code"] == code
        assert " ".join(described["message"].split()) in line
        assert (described["where"] in line, described["hint"]) == (True, hint)
        assert self._contents() == before
        return line

    def _contents(self) -> dict[str, tuple[object, ...]]:
        """Everything below the root: kind, permissions and identity by path, with a file's
        bytes.
        """
        found: dict[str, tuple[object, ...]] = {}
        for parent, folders, files in os.walk(self.folder.parent):
            for name in (*folders, *files):
                path = Path(parent, name)
                status = path.lstat()
                held: object = None
                if stat.S_ISREG(status.st_mode):
                    held = (status.st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
                elif stat.S_ISLNK(status.st_mode):
                    held = os.readlink(path)
                found[os.fspath(path)] = (status.st_mode, status.st_ino, held)
        return found


def _only_error(text: str) -> tuple[str, str]:
    """The one error line and the hint, where there is one; nothing else but warnings stands in
    `text`.
    """
    assert "Traceback" not in text
    lines = [
        line for line in text.removesuffix("\n").split("\n") if not line.startswith("warning: ")
    ]
    assert lines and lines[0].startswith("error: "), text
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: ")), text
    assert all(letter.isprintable() for line in lines for letter in line), text
    assert "internal error" not in lines[0]
    return lines[0].removeprefix("error: "), lines[1].removeprefix("hint: ") if len(
        lines
    ) == 2 else ""
