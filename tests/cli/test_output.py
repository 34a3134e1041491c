"""What goes to which stream, and what JSON is made of."""

from __future__ import annotations

import enum
import io
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
from rich.console import Console

from autopipe.cli.output import Output, Verbosity


class Mode(enum.Enum):
    TRAIN = "train"


@dataclass(frozen=True)
class Point:
    x: float
    path: Path


def plain(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=40, markup=False, highlight=False, emoji=False)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_result_as_json_keeps_structure_and_names_what_is_not_finite() -> None:
    output = Output(as_json=True, stdout=plain(), stderr=plain())
    values = {
        "time": numpy.float32(0.5),
        "peaks": numpy.array([1, 2]),
        "gap": math.inf,
        "unknown": math.nan,
        "where": Point(1.5, Path("a/b")),
        "mode": Mode.TRAIN,
        "names": frozenset({"b", "a"}),
        "optimal": True,
        "none": None,
    }
    output.result(values, "for people")
    assert json.loads(written(output.stdout)) == {
        "time": 0.5,
        "peaks": [1, 2],
        "gap": "inf",
        "unknown": "nan",
        "where": {"x": 1.5, "path": "a/b"},
        "mode": "train",
        "names": ["a", "b"],
        "optimal": True,
        "none": None,
    }
    assert written(output.stdout).count("\n") == 1


def test_a_value_without_json_form_is_our_bug() -> None:
    with pytest.raises(TypeError, match="object has no JSON form"):
        Output(as_json=True, stdout=plain(), stderr=plain()).result({"what": object()})


def test_text_is_neither_wrapped_nor_read_as_markup() -> None:
    output = Output(stdout=plain(), stderr=plain())
    text = "[bold]/model/layers.0/self_attn[/bold] " + "long " * 30
    output.result({}, text)
    assert written(output.stdout) == text + "\n"


@pytest.mark.parametrize(
    ("verbosity", "expected"),
    [
        (Verbosity.QUIET, ["warning: careful (or not)"]),
        (Verbosity.NORMAL, ["planning", "warning: careful (or not)"]),
        (Verbosity.DETAILED, ["planning", "tried 12", "warning: careful (or not)"]),
    ],
)
def test_verbosity_rules_notes_but_not_warnings(verbosity: Verbosity, expected: list[str]) -> None:
    output = Output(verbosity=verbosity, stdout=plain(), stderr=plain())
    output.note("planning")
    output.detail("tried 12")
    output.warn("careful", hint="or not")
    assert written(output.stderr).splitlines() == expected
    assert written(output.stdout) == ""


def test_lines_of_a_growing_result_leave_stdout_to_the_object() -> None:
    people, program = (Output(as_json=as_json, stdout=plain(), stderr=plain()) for as_json in (False, True))
    for output in (people, program):
        output.line("step 1 loss 3.2")
    assert (written(people.stdout), written(people.stderr)) == ("step 1 loss 3.2\n", "")
    assert (written(program.stdout), written(program.stderr)) == ("", "step 1 loss 3.2\n")


@pytest.mark.parametrize(
    ("terminal", "verbosity", "shown"),
    [(True, Verbosity.NORMAL, True), (True, Verbosity.QUIET, False), (False, Verbosity.NORMAL, False)],
)
def test_progress_shows_bound_and_note_on_a_terminal_only(terminal: bool, verbosity: Verbosity, shown: bool) -> None:
    output = Output(verbosity=verbosity, stdout=plain(), stderr=Console(file=io.StringIO(), force_terminal=terminal))
    with output.progress("searching", total=40) as bar:
        bar.advance(2, note="best 140 [bound 136]")
        bar.reach(30)
        bar.advance()
    text = written(output.stderr)
    assert ("searching" in text) is shown
    assert ("31/40" in text) is shown
    assert ("best 140 [bound 136]" in text) is shown
    assert written(output.stdout) == ""
