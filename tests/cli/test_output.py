"""What goes to which stream, and what JSON is made of."""

from __future__ import annotations

import enum
import io
import itertools
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
from rich.console import Console

from autopipe.cli.bars import PrintedBar
from autopipe.cli.output import Output, Verbosity


class Mode(enum.Enum):
    TRAIN = "train"


@dataclass(frozen=True)
class Point:
    x: float
    path: Path


def plain(terminal: bool = False) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=40,
        markup=False,
        highlight=False,
        emoji=False,
    )


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
    people, program = (
        Output(as_json=as_json, stdout=plain(), stderr=plain()) for as_json in (False, True)
    )
    for output in (people, program):
        output.line("step 1 loss 3.2")
    assert (written(people.stdout), written(people.stderr)) == ("step 1 loss 3.2\n", "")
    assert (written(program.stdout), written(program.stderr)) == ("", "step 1 loss 3.2\n")


@pytest.mark.parametrize(
    ("terminal", "verbosity", "shown"),
    [
        (True, Verbosity.NORMAL, True),
        (True, Verbosity.QUIET, False),
        (False, Verbosity.NORMAL, False),
    ],
)
def test_progress_shows_bound_and_note_on_a_terminal_only(
    terminal: bool, verbosity: Verbosity, shown: bool
) -> None:
    output = Output(
        verbosity=verbosity,
        stdout=plain(),
        stderr=Console(file=io.StringIO(), force_terminal=terminal),
    )
    with output.progress("searching", total=40) as bar:
        bar.advance(2, note="best 140 [bound 136]")
        bar.reach(30)
        bar.advance()
    text = written(output.stderr)
    assert ("searching" in text) is shown
    assert ("31/40" in text) is shown
    assert ("best 140 [bound 136]" in text) is shown
    assert written(output.stdout) == ""


def test_a_line_of_progress_says_what_is_done_and_for_how_long() -> None:
    clock = itertools.count(0, 20.4).__next__
    bar = PrintedBar(print, "searching", 1400, 10, clock)
    bar.advance(2, note="best 140 [bound 136]")
    bar.reach(1234)
    assert bar.line() == "searching: 1,234 of 1,400, 20 s, best 140 [bound 136]"
    assert PrintedBar(print, "steps", None, 10, lambda: 600.0).line() == "steps: 0, 0 s"


def test_work_that_was_reported_otherwise_waits_for_the_whole_interval() -> None:
    seconds = [0.0]
    bar = PrintedBar(print, "steps", None, 10, lambda: seconds[0])
    seconds[0] = 7.0
    assert bar.wait_s() == 3
    bar.postpone()
    assert bar.wait_s() == 10


def test_progress_prints_lines_without_a_call_of_the_work_where_stderr_is_no_terminal() -> None:
    output = Output(stdout=plain(), stderr=plain(), interval_s=0.001)
    with output.progress("planning", total=3) as bar:
        bar.advance(note="read")
        while written(output.stderr).count("s, read\n") < 3:
            time.sleep(0.001)
    assert written(output.stderr).splitlines()[-1].startswith("planning: 1 of 3, ")
    assert written(output.stdout) == ""


def test_lines_of_progress_are_10_s_apart_and_silent_with_q() -> None:
    assert Output().interval_s == 10
    output = Output(verbosity=Verbosity.QUIET, stdout=plain(), stderr=plain(), interval_s=0)
    with output.progress("planning", total=3) as bar:
        bar.advance(note="read")
        time.sleep(0.01)
    assert written(output.stderr) == ""
