"""The commands of the tutorial and of the page that continues it run in order, and print the output
that the pages show.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from autopipe.cli.main import main

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "export_gpt2.py"
PAGES = ("start/tutorial.md", "guides/manual-placement.md")
"""Pages below docs/ whose commands run in one folder, in this order."""
TUTORIAL = "\n".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in PAGES)

BLOCK = re.compile(
    r"^```(?P<kind>\w+)\n(?P<text>.*?)^```$|`(?P<inline>autopipe [^`]+)`", re.MULTILINE | re.DOTALL
)
"""A code block, or a command inside a sentence."""
WITHOUT = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"the tutorial does not install {name}", name=name)

sys.meta_path.insert(0, Finder())
from autopipe.cli.main import main
sys.exit(main(sys.argv[2:]))
"""
"""Program that runs a command of autopipe without the modules of its first argument, a list
separated by commas.
"""
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
"""Requirements of each extra of autopipe, by its name."""
EXPORTER = "onnxscript"
"""Package that torch's exporter imports and that neither torch nor transformers requires."""
EDIT = "cp -r four.plan edited.plan && $EDITOR edited.plan/placement.yaml"
EDITS = (
    ("    layers: [0, 0]\n", "    layers: [0, 1]\n"),
    ("    # model.transformer.h.1\n    - [node_layer_norm_2, node_add_351]\n", ""),
    ("    nodes:\n    # model.transformer.h.1\n    - [node_layer_norm_3, node_add_418]\n", ""),
)
"""Texts of four.plan/placement.yaml, and their replacements that give layer 1 to the first stage."""
LACKING = "    layers: [3, 3]\n"
"""A line of four.plan/placement.yaml without which a layer is in no stage."""


@dataclass
class Reader:
    """A run of the pages in one folder, which compares the output of commands with the pages."""

    folder: Path
    capture: pytest.CaptureFixture[str]
    problems: list[str] = field(default_factory=list)
    """Differences between the pages and the output of commands."""
    missing: set[str] = field(default_factory=set)
    """Modules of the exporter that the commands `pip install` of the pages do not install."""
    configurations: Iterator[str] = field(
        default_factory=lambda: iter(("four", "by-hand", "by-name", "chimera", "placement"))
    )

    def do(self, kind: str, text: str) -> None:
        """Run the commands of a block, or write or compare its file."""
        if kind == "python" and text.startswith('"""Create'):
            assert text == SCRIPT.read_text(encoding="utf-8")
            shutil.copy(SCRIPT, self.folder)
            subprocess.run(
                [sys.executable, SCRIPT.name], cwd=self.folder, check=True, capture_output=True
            )
        elif kind == "python":
            self._find_in_programs(text)
        elif kind == "yaml":
            self._write(next(self.configurations), text)
        elif kind == "sh":
            for command in text.splitlines():
                if command.startswith("pip install"):
                    self.missing = {EXPORTER} - installed(shlex.split(command, comments=True)[2:])
                else:
                    self._type(command, "")
        else:
            assert kind == "console", kind
            for command in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                self._type(*command.split("\n", 1))

    def _find_in_programs(self, text: str) -> None:
        """Report lines of `text` that no generated file contains."""
        lines = {
            line.rstrip()
            for path in self.folder.glob("*.plan/program/*.py")
            for line in path.open()
        }
        missing = [
            line
            for line in text.splitlines()
            if line.strip() not in ("", "...") and line not in lines
        ]
        if missing:
            self.problems.append("\n".join(["no program contains", *missing]))

    def _write(self, name: str, text: str) -> None:
        """Write a configuration: the file `four`, with its last lines replaced by `text`."""
        if name == "placement":
            head = (self.folder / "four.plan" / "placement.yaml").read_text(encoding="utf-8")
            if text not in head:
                self.problems.append(f"four.plan/placement.yaml is\n{head}")
            return
        if name != "four":
            four = (self.folder / "four.yaml").read_text(encoding="utf-8")
            text = re.sub(r"^strategy:.*\n", "", four, flags=re.MULTILINE) + text
        (self.folder / f"{name}.yaml").write_text(text, encoding="utf-8")

    def _type(self, command: str, shown: str) -> None:
        if command == EDIT:
            shutil.copytree(self.folder / "four.plan", self.folder / "edited.plan")
            self._edit(first=True)
            return
        words = shlex.split(command)
        assert words[0] == "autopipe", command
        failing = shown.startswith("error: ")
        if failing and "edited.plan" in words:
            self._edit(first=False)
        self.capture.readouterr()
        if words[1] == "export":
            start = [sys.executable, "-c", WITHOUT, ",".join(self.missing)]
            done = subprocess.run(
                [*start, *words[1:]], cwd=self.folder, check=False, capture_output=True, text=True
            )
            code = done.returncode
            said = done.stdout + done.stderr
        else:
            code = main(words[1:])
            said = "".join(self.capture.readouterr())
        assert bool(code) == failing, f"{command} ended with {code}: {said}"
        labels = {label(line) for line in said.splitlines()}
        missing = {label(line) for line in shown.splitlines() if line != "..."} - labels
        if missing:
            self.problems.append(f"{command} printed no {sorted(missing)} but\n{said}")

    def _edit(self, *, first: bool) -> None:
        """Give layer 1 to the first stage if `first`; otherwise delete layer 3."""
        text = (self.folder / "four.plan" / "placement.yaml").read_text(encoding="utf-8")
        for old, new in EDITS if first else ((LACKING, ""),):
            assert old in text
            text = text.replace(old, new)
        (self.folder / "edited.plan" / "placement.yaml").write_text(text, encoding="utf-8")


def installed(words: Iterable[str]) -> set[str]:
    """Return the names of the packages that `pip install WORDS` installs, also those of autopipe's
    extras.
    """
    found: set[str] = set()
    for word in words:
        name, _, rest = re.split(r"[<>=;]", word)[0].partition("[")
        found.add(name)
        for extra in rest.rstrip("]").split(",") if name in (".", "autopipe") and rest else ():
            found |= installed(EXTRAS[extra])
    return found


def label(line: str) -> str:
    """Return the words at the start of a line, up to its first digit, column or path; "" if there are
    none.
    """
    start = re.split(r"\d|\s{2,}|/", line.strip(" │┃"))[0].strip()
    return start if len(start) >= 3 and start[0].isalpha() else ""


@pytest.mark.distributed
@pytest.mark.timeout(1800)  # torch exports and ranks start slowly where other work has the cores
def test_every_command(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # Rows of tables that the tutorial shows are one line each.
    monkeypatch.setenv("COLUMNS", "132")
    reader = Reader(tmp_path, capfd)
    for found in BLOCK.finditer(TUTORIAL):
        if inline := found["inline"]:
            reader.do("sh", inline.replace("\n", " "))
        else:
            reader.do(found["kind"], found["text"])
    assert not reader.problems, "\n\n".join(reader.problems)
