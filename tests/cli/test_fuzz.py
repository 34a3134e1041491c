"""Damaged files of every kind that a command reads: any exit code is right but that of an internal error.

Each case changes one file at random, by bytes or by the values of its JSON and YAML, and runs the commands that read
the file. The numbers come from the number of the case, so that a failure is repeated by its name.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command_line import CommandLine
from tests.cli.test_bad_folders import MODEL, PLAN, PROGRAM, made

__all__ = ["made"]

INTERNAL = 70
"""Exit code of an internal error."""
FEW = 8
"""Changes of each file in the default suite: about 20 s of one core in all."""
MANY = 400
"""Changes of each file under the marker `sweep`."""
ODD_NUMBERS = (-1, 0, -1.5, 1e308, 2**31, 2**63, -(2**63), 2**70, float("nan"), float("inf"))
ODD_VALUES = (*ODD_NUMBERS, None, True, "", "x", "\0", "\ud800", "a" * 5000, [], {}, [[]], {"x": 1}, [None])
CONFIGURATION = Path("c.yaml")


def _changed_bytes(content: bytes, source: random.Random) -> bytes:
    """Cut, replace, repeat or insert a few bytes."""
    found = bytearray(content)
    for _ in range(source.choice((1, 1, 2, 8))):
        place = source.randrange(len(found) + 1)
        length = source.choice((1, 1, 4, 32))
        match source.randrange(5):
            case 0:
                del found[place:]
            case 1:
                found[place : place + length] = source.randbytes(length)
            case 2:
                del found[place : place + length]
            case 3:
                found[place:place] = found[place : place + length]
            case _:
                found[place:place] = source.choice((b"\xff", b"\0", b"-", b"9" * 30, b"[", b"{", b'"', b": "))
    return bytes(found)


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) in a document of mappings and lists."""
    found = []
    if isinstance(document, dict | list):
        for key in list(document) if isinstance(document, dict) else range(len(document)):
            found += [(document, key), *_places(document[key])]
    return found


def _changed_values(content: bytes, source: random.Random) -> bytes:
    """Replace, negate or remove a value of a JSON document."""
    document = json.loads(content)
    container, key = source.choice(_places(document))
    old = container[key]
    match source.randrange(4):
        case 0:
            del container[key]
        case 1 if isinstance(old, int | float):
            container[key] = -old
        case 2 if isinstance(container, list):
            container.append(old)
        case _:
            container[key] = source.choice(ODD_VALUES)
    return json.dumps(document).encode()


Change = Callable[[bytes, random.Random], bytes]
PLAN_AGAIN = ("plan", MODEL, "--gpus", 2, "--strategy", "pipedream", "-o", "p", "-q")
CODEGEN = ("codegen", PLAN, "-q", "--force")
LAUNCH = ("launch", PROGRAM, "--device", "cpu", "--dry-run", "-q")
CASES: dict[str, tuple[Path, Change, tuple[tuple[object, ...], ...]]] = {
    "model": (Path(MODEL), _changed_bytes, (("inspect", MODEL), PLAN_AGAIN)),
    "plan": (PLAN / "plan.json", _changed_values, (("show", PLAN), ("compare", PLAN, PLAN), CODEGEN)),
    "plan's bytes": (PLAN / "plan.json", _changed_bytes, (("show", PLAN), CODEGEN)),
    "schedule": (PLAN / "schedule.json", _changed_values, (("show", PLAN / "schedule.json"), ("show", PLAN))),
    "plan's configuration": (PLAN / "config.yaml", _changed_bytes, (CODEGEN, ("plan", "--from", PLAN, "-q"))),
    "plan's placement": (PLAN / "placement.yaml", _changed_bytes, (("plan", "--from", PLAN, "-q"),)),
    "configuration": (CONFIGURATION, _changed_bytes, (("config", "check", CONFIGURATION),)),
    "manifest": (PROGRAM / "manifest.json", _changed_values, (LAUNCH,)),
}  # fmt: skip
"""The file that is changed, how, and the commands that read it."""


@pytest.fixture
def here(made: Path, command_line: CommandLine) -> CommandLine:
    """The command line in a copy of `made`, with a configuration."""
    shutil.copytree(made, command_line.folder, dirs_exist_ok=True)
    text = "strategy: {name: pipedream}\nmicro_batches: 2\noptimizer: {name: adamw, lr: 0.1}\ncluster: a100-80gb\n"
    CONFIGURATION.write_text(text)
    return command_line


def _run(here: CommandLine, name: str, numbers: range) -> None:
    path, change, commands = CASES[name]
    pristine = here.folder.parent / "pristine"
    shutil.copytree(here.folder, pristine, symlinks=True)
    content = path.read_bytes()
    failures = []
    for number in numbers:
        changed = change(content, random.Random(f"{name} {number}"))
        for words in commands:
            shutil.rmtree(here.folder / PLAN)
            shutil.copytree(pristine / PLAN, here.folder / PLAN)
            path.write_bytes(changed)
            shown = here.run(*words)
            if shown.code == INTERNAL or "internal error" in shown.err:
                failures.append(f"{name} {number}, {' '.join(map(str, words))}: {shown.err.strip()[:300]}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file_is_no_internal_error(here: CommandLine, name: str) -> None:
    _run(here, name, range(FEW))


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_many_damaged_files_are_no_internal_errors(here: CommandLine, name: str) -> None:
    _run(here, name, range(FEW, MANY))
