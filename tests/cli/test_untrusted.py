"""Plans, configurations and manifests name no Python code: only `launch --data` does."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.cli.command_line import CommandLine
from tests.cli.test_bad_folders import MODEL, PLAN, PROGRAM, made

__all__ = ["made"]

NAMES = ("os:abort", "os.path:join", "trap:spring")
SAYS = "launch PROGRAM --data module:function"


@pytest.fixture
def here(made: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """The command line in a copy of `made`, and a module `trap` that must not be imported."""
    shutil.copytree(made, command_line.folder, dirs_exist_ok=True)
    Path("trap.py").write_text("raise SystemExit('the trap was imported')\n")
    monkeypatch.syspath_prepend(command_line.folder)
    return command_line


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", ["data: {path", "eval: {data"])
def test_a_configuration_names_no_code(here: CommandLine, key: str, name: str) -> None:
    Path("c.yaml").write_text(f"{key}: '{name}'}}\n")
    here.refuses(
        2, ("plan", MODEL, "--gpus", 1, "--config", "c.yaml", "-o", "p"), "is Python code", SAYS
    )
    here.refuses(2, ("config", "check", "c.yaml"), "is Python code", SAYS)
    setting = f"{key.replace(': {', '.')}={name}"
    here.refuses(
        2, ("plan", MODEL, "--gpus", 1, "--set", setting, "-o", "p"), "is Python code", SAYS
    )
    assert "trap" not in sys.modules


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_and_its_program_name_no_code(here: CommandLine, name: str) -> None:
    path = PLAN / "config.yaml"
    path.write_text(path.read_text() + f"data: {{path: '{name}'}}\n")
    here.refuses(2, ("codegen", PLAN), "is Python code", SAYS)
    here.refuses(2, ("plan", "--from", PLAN), "is Python code", SAYS)
    for key, form in (("data", {"path": name}), ("eval", {"data": name})):
        manifest = json.loads((PROGRAM / "manifest.json").read_text())
        before = (PROGRAM / "manifest.json").read_text()
        (PROGRAM / "manifest.json").write_text(json.dumps(manifest | {key: form}))
        for command in ("launch", "verify"):
            here.refuses(
                2,
                (command, PROGRAM, "--device", "cpu"),
                name,
                "only `launch --data` accepts Python code",
            )
        (PROGRAM / "manifest.json").write_text(before)
    assert "trap" not in sys.modules
