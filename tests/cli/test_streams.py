"""What every command keeps to: --json is one object and nothing else on stdout, -q says nothing
more, --help shows an example.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from autopipe.cli.main import autopipe, main
from tests.cli.command_line import CommandLine
from tests.cli.test_bad_requests import MODEL, perceptron
from tests.cli.test_checkpoint import WEIGHT, write_checkpoint
from tests.cli.test_outputs import FACTORY
from tests.passes.frontend.building import model, node, saved

COMMANDS: dict[tuple[str, ...], tuple[object, ...]] = {
    ("inspect",): (MODEL,),
    ("plan",): (MODEL, "--gpus", "1", "-o", "new.plan"),
    ("codegen",): ("plan", "-o", "program"),
    ("profile",): (
        MODEL,
        "--source",
        "onnxruntime",
        "--seconds",
        "0.1",
        "--micro-batch-sizes",
        "1",
        "-o",
        "costs.json",
    ),
    ("show",): ("plan",),
    ("explain",): ("plan",),
    ("compare",): ("plan", "plan"),
    ("schedule",): ("--shape", "v", "--micro-batches", "4"),
    ("export",): ("linear.py:factory", "--no-check"),
    ("checkpoint", "inspect"): ("saved",),
    ("checkpoint", "verify"): ("saved",),
    ("checkpoint", "export"): ("saved", "-o", "trained.onnx"),
    ("checkpoint", "import"): (MODEL, "--model", MODEL, "-o", "started.onnx"),
    ("zoo", "list"): (),
    ("zoo", "build"): ("dlrm", "--set", "weights=none"),
    ("config", "show"): ("--gpus", "4"),
    ("config", "check"): ("plan/config.yaml",),
    ("config", "clusters"): (),
    ("config", "strategies"): (),
    ("config", "schedules"): (),
    ("config", "solvers"): (),
}
"""A command that works without starting ranks, and words to give it."""
MAKING = {
    ("plan",), ("codegen",), ("profile",), ("export",), ("checkpoint", "export"), ("checkpoint", "import"),
    ("zoo", "build"),
}  # fmt: skip
"""Commands that are asked for what they make, and say nothing of it with -q."""
RUNNING = {("launch",), ("generate",), ("verify",), ("bench",)}
"""Commands that start ranks, or only say where others are: what they print is tested where they do.
"""


def _commands(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from _commands(command, *path, name)


ALL = dict(_commands(autopipe))
LEAVES = {path for path, command in ALL.items() if not isinstance(command, click.Group)}


@pytest.fixture
def here(command_line: CommandLine) -> CommandLine:
    """The command line in a folder with a model and its plan, and a product and its checkpoint."""
    saved(perceptron(trains=True), command_line.folder)
    (command_line.folder / "linear.py").write_text(FACTORY)
    product = saved(
        model([node("MatMul", "x w", "y")], {"x": [2, 6]}, "y", {"w": WEIGHT}),
        command_line.folder,
        "w.onnx",
    )
    write_checkpoint(command_line.folder / "saved", product, 3, WEIGHT)
    command_line.done("plan", MODEL, "--gpus", "2", "--strategy", "pipedream", "-o", "plan")
    return command_line


def test_every_command_is_tried() -> None:
    assert set(COMMANDS) | RUNNING == LEAVES


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_json_is_one_object_and_quiet_is_quiet(here: CommandLine, path: tuple[str, ...]) -> None:
    words = (*path, *COMMANDS[path])
    shown = here.done(*words, "--json")
    assert shown.out.count("\n") == 1
    assert json.loads(shown.out).keys() and isinstance(json.loads(shown.out), dict)
    assert here.done(*words, "--json", "-q").err == ""
    quiet = here.done(*words, "-q")
    assert (quiet.err, bool(quiet.out)) == ("", path not in MAKING)
    assert json.loads(here.done(*words, "--json", "-v").out).keys() == json.loads(shown.out).keys()


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_has_an_example_of_the_command(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*path, "--help"]) == 0
    text = capsys.readouterr().out
    example = text.partition("Example:\n")[2]
    assert f"autopipe {' '.join(path)}" in example
    if path in LEAVES:
        assert all(
            option in text for option in ("--json", "-q, --quiet", "-v, --verbose", "--debug")
        )


@pytest.mark.parametrize("path", sorted(LEAVES), ids=" ".join)
def test_every_command_refuses_what_it_does_not_know(
    command_line: CommandLine, path: tuple[str, ...]
) -> None:
    command_line.refuses(2, (*path, "--bogus"), "--bogus")
    command_line.refuses(2, (*path, *("word",) * 3, "--debug=1"), "--debug")


@pytest.mark.parametrize("words", [("pln",), ("zoo", "buld"), ("config", "chek")], ids=" ".join)
def test_commands_that_are_none(command_line: CommandLine, words: tuple[str, ...]) -> None:
    message = "the command 'pln' does not exist" if len(words) == 1 else "No such command"
    command_line.refuses(2, words, message, f"'{words[-1]}'", "id you mean")


def test_nothing_is_left_of_what_ran(here: CommandLine) -> None:
    before = sorted(here.folder.iterdir())
    for words in (
        ("inspect", MODEL),
        ("show", "plan"),
        ("codegen", "plan"),
        ("config", "clusters"),
    ):
        here.done(*words)
    assert sorted(here.folder.iterdir()) == before
    assert not list(Path(here.folder.parent, "temporary").iterdir())
