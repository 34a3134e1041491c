"""A model whose names are code goes through plan and codegen: in the program they stand in strings
and comments.
"""

from __future__ import annotations

import ast
import io
import json
import tokenize
from pathlib import Path

import onnx
import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autopipe.cli.output import Output
from tests.cli.command_line import CommandLine
from tests.cli.test_bad_requests import MODEL, perceptron
from tests.passes.frontend.building import saved

MARK = "hostile"
"""Every hostile name holds it, so that it is found wherever it goes."""

SPELLINGS = {
    "quotes": "'\"'''\"\"\"{name}",
    "code": "x; __import__('os').system('touch {name}') #",
    "lines": "a\n{name} = 1\r\nimport os\n",
    "keyword": "class {name}(lambda):",
    "path": "../../{name}/../../etc/passwd",
    "backslash": "{name}\\",
    "braces": "{{{name}}}%s%(x)s",
    "terminal": "\x1b[2J\x1b]0;{name}\x07\x9b31m\x08\t",
    "letters": "名{name}\u202e\u2028\U0001f600",
}
"""Ways to spell a name."""


def renamed(spelling: str) -> onnx.ModelProto:
    """The perceptron with every name spelled so; two values differ only where a file name or
    identifier would not.
    """
    proto = perceptron(trains=True)
    kept = {"", "loss"}

    def spell(name: str) -> str:
        return (
            name
            if name in kept
            else spelling.replace("{name}", f"{MARK} {name}").replace("}}", "}")
        )

    graph = proto.graph
    graph.name = spell("graph")
    for each in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        each.name = spell(each.name)
    for each in graph.node:
        each.name = spell("same")
        each.input[:] = [spell(name) for name in each.input]
        each.output[:] = [spell(name) for name in each.output]
    for dimension in graph.input[0].type.tensor_type.shape.dim:
        if dimension.dim_param:
            dimension.dim_param = spell(dimension.dim_param)
    return proto


@pytest.mark.parametrize("kind", SPELLINGS)
def test_names_stay_text(command_line: CommandLine, kind: str) -> None:
    saved(renamed(SPELLINGS[kind]), command_line.folder)
    stages = "strategy={name: manual}"
    split = "constraints=[{match: 're:(?s).*', stage: 0, devices: [0, 1]}]"
    command_line.done("plan", MODEL, "--gpus", "2", "--set", stages, "--set", split, "-o", "plan")
    command_line.done("codegen", "plan")
    for path in Path("plan/program").rglob("*.py"):
        # In the default form, identifiers contain letters and digits of names.
        for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
            if MARK in token.string and token.type != tokenize.NAME:
                assert token.type in (tokenize.STRING, tokenize.COMMENT), token
    command_line.done("codegen", "plan", "--style", "flat")
    sources = sorted(Path("plan/program").rglob("*.py"))
    assert sources
    held = 0
    for path in sources:
        text = path.read_text(encoding="utf-8")
        ast.parse(text)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                held += MARK in token.string
            else:
                assert MARK not in token.string and "passwd" not in token.string, token
        assert all(letter.isprintable() or letter == "\n" for letter in text), path
    assert held, "the names are not shown at all"
    assert (
        MARK
        in json.loads(Path("plan/program/manifest.json").read_text(encoding="utf-8"))["inputs"][0][
            "name"
        ]
    )
    assert not any(MARK in path.name for path in command_line.folder.rglob("*"))


@pytest.mark.parametrize("kind", SPELLINGS)
def test_errors_about_such_names_are_one_line(command_line: CommandLine, kind: str) -> None:
    proto = renamed(SPELLINGS[kind])
    proto.graph.node[1].op_type = "Frobnicate"
    saved(proto, command_line.folder)
    command_line.refuses(3, ("plan", MODEL), "Frobnicate", MARK)
    proto.graph.node[1].op_type = "Relu"
    proto.graph.initializer[0].dims[:] = [7, 16]
    (command_line.folder / MODEL).write_bytes(proto.SerializeToString())
    command_line.refuses(3, ("inspect", MODEL), MARK)


@pytest.mark.parametrize("kind", SPELLINGS)
def test_such_names_are_shown(command_line: CommandLine, kind: str) -> None:
    saved(renamed(SPELLINGS[kind]), command_line.folder)
    command_line.done("plan", MODEL, "--strategy", "pipedream", "-o", "plan")
    for words in (
        ("inspect", MODEL),
        ("show", "plan"),
        ("compare", "plan"),
        ("plan", MODEL, "--strategy", "pipedream", "--dump-after", "read"),
        ("show", "plan", "--tasks"),
        ("explain", "plan", "--node", "0"),
    ):
        shown = command_line.done(*words)
        text = shown.out + shown.err
        assert all(letter.isprintable() for line in text.split("\n") for letter in line), words
        assert not any(line.strip() == "import os" for line in text.split("\n")), words


def test_tables_and_coloured_text_show_control_characters() -> None:
    stream = io.StringIO()
    console = Console(
        file=stream, force_terminal=True, color_system="standard", width=40, markup=False
    )
    table = Table("head")
    table.add_row("a\x1b[2Jb")
    Output(stdout=console).result({}, "c\x9bd\ne", Text("f\x1bg", style="red"), table)
    text = stream.getvalue()
    assert "a\\x1b[2Jb" in text and "c\\x9bd\ne\n" in text and "\x1b[31mf\\x1bg\x1b[0m" in text


def test_an_error_of_megabytes_is_cut(command_line: CommandLine) -> None:
    proto = perceptron(trains=True)
    proto.graph.node[1].op_type = "Frobnicate"
    proto.graph.node[1].name = "n" * (1 << 20)
    (command_line.folder / MODEL).write_bytes(proto.SerializeToString())
    shown = command_line.run("inspect", MODEL)
    assert shown.code == 3 and len(shown.err) < 5000 and "Frobnicate" in shown.err
