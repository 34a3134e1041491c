"""Timelines and memory as text: places, widths, colours, what is left out."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console

from autopipe.api.timeline_figure import Bar, Picture, block_picture, plan_picture
from autopipe.cli.drawing.terminal import draw_memory, draw_timeline, draw_timelines
from autopipe.cli.output import Output
from autopipe.ir.schedule import Phase, Task
from tests.cli.drawing.examples import chain_plan, split_embedding


def drawn(picture, width):
    lines = (
        *draw_timeline(picture, width, colour=False),
        *draw_memory(picture, width, colour=False),
    )
    return "\n".join(line.plain for line in lines) + "\n"


@pytest.mark.parametrize(("width", "micro_batches"), [(120, 6), (60, 6), (100, 64)])
def test_a_plan_as_text(golden, width, micro_batches):
    picture = plan_picture(*chain_plan(micro_batches=micro_batches))
    golden(drawn(picture, width), f"show/chain_{micro_batches}_in_{width}.txt")


@pytest.mark.parametrize(("width", "units"), [(130, 8), (80, 64)])
def test_blocks_as_text(golden, width, units):
    golden(
        drawn(block_picture(split_embedding(units), "blocks"), width),
        f"show/blocks_{units}_in_{width}.txt",
    )


@pytest.mark.parametrize("width", [24, 40, 79, 200])
def test_no_line_is_wider_than_the_terminal(width):
    for micro_batches in (1, 2, 40):
        picture = plan_picture(*chain_plan(12, micro_batches))
        limited = dataclasses.replace(picture, limits=(2**25,) * 12)
        ending = plan_picture(*chain_plan(12, micro_batches, gradient_s=0.01, update_s=5.0))
        for each in (
            picture,
            limited,
            ending,
            block_picture(split_embedding(micro_batches), "blocks"),
        ):
            for line in (*draw_timeline(each, width, True), *draw_memory(each, width, True)):
                assert line.cell_len <= width


def test_every_task_is_where_it_is_in_time():
    plan, timeline = chain_plan(micro_batches=3)
    rows = [
        line.plain[2:]
        for line in draw_timeline(plan_picture(plan, timeline), 2 + 180, colour=False)
    ][:4]
    for span in timeline.spans:
        cells = rows[span.device][
            round(span.start / timeline.end * 180) : round(span.end / timeline.end * 180)
        ]
        assert cells.startswith(f"{span.task.phase.value}{span.task.micro_batch}")
        assert " " not in cells


def test_a_block_on_several_devices_stands_on_each_row():
    first, second = [
        line.plain[2:] for line in draw_timeline(block_picture(split_embedding(1), ""), 150, False)
    ][:2]
    for start in (0, 17):
        place = slice(round(start / 18 * 148), round((start + 1) / 18 * 148))
        assert first[place] == second[place]
        assert first[place].startswith("f0" if start == 0 else "b0")


@pytest.mark.parametrize("width", [40, 60, 90])
def test_names_of_neighbours_do_not_run_into_one_another(width):
    tasks = [Task(stage, phase, unit) for stage in (0, 1) for phase in Phase for unit in range(12)]
    bars = tuple(
        Bar(
            0,
            place,
            place + 1,
            str(task),
            task.stage,
            task.phase,
            task.micro_batch,
            task.phase.value,
        )
        for place, task in enumerate(tasks)
    )
    picture = Picture("", bars[:16], (((0, 0),),), (None,), 16, False)
    row = next(draw_timeline(picture, width, False)).plain[2:]
    names = (
        {str(task) for task in tasks}
        | {bar.label for bar in bars}
        | {phase.value for phase in Phase}
    )
    for shown in re.findall(r"\d*[FBIW]\d*", row):
        assert shown in names


def test_names_that_are_no_letters_of_one_column_break_no_row():
    picture = block_picture(split_embedding(1, first_name="\x1b[31m名\r\n\ud800"), "")
    several = dataclasses.replace(
        picture, bars=tuple(dataclasses.replace(bar, letter="F") for bar in picture.bars)
    )
    row = next(draw_timeline(several, 400, False))
    assert row.cell_len == 400
    assert row.plain.startswith("0 ?[31m????·0--")


def test_memory_is_told_against_its_limit():
    within, over = (
        [
            line.plain
            for line in draw_memory(block_picture(split_embedding(memory=memory), ""), 60, False)
        ]
        for memory in (3, 2)
    )
    assert within[0] == "memory (a full bar is 3, the limit)"
    assert within[1].endswith(" 3 of 3")
    assert over[1].endswith(" 3 over 2")


@pytest.mark.parametrize("setting", ["", "1"])
def test_colours_stand_for_stages_unless_none_are_wanted(monkeypatch, setting):
    monkeypatch.setenv("NO_COLOR", setting)
    picture = plan_picture(*chain_plan())
    output = Output(stdout=Console(file=io.StringIO(), force_terminal=True, width=100))
    lines = (
        *draw_timeline(picture, output.width, output.coloured),
        *draw_memory(picture, 100, output.coloured),
    )
    assert len({str(span.style) for line in lines for span in line.spans} - {"cyan"}) == (
        0 if setting else 8
    )
    assert not Output(stdout=Console(file=io.StringIO())).coloured


@pytest.mark.parametrize("colour", [False, True])
def test_stages_of_one_device_are_told_apart(colour):
    """Two stages a device, in 80 columns: stages by number, or by letter and colour; a key says
    so.
    """
    phases = ((Phase.FORWARD, "F"), (Phase.BACKWARD, "B"))
    bars = [
        Bar(
            device,
            10.0 * turn + device,
            10.0 * turn + device + 5,
            f"{stage}{letter}0",
            stage,
            phase,
            0,
            letter,
        )
        for device in range(2)
        for turn, (stage, (phase, letter)) in enumerate(
            (stage, each) for each in phases for stage in (device, device + 2)
        )
    ]
    picture = dataclasses.replace(plan_picture(*chain_plan(2, 1)), bars=tuple(bars), end=40.0)
    lines = list(draw_timeline(picture, 80, colour))
    text = "\n".join(line.plain for line in lines)
    cells = [(each[0], each[-1]) for each in lines[0].plain[2:].split()]
    letters = ["F", "F", "B", "B"] if colour else ["0", "2", "0", "2"]
    assert cells == list(zip(letters, "--==", strict=True))
    if colour:
        assert "F- forward, B= backward" in text
        assert text.splitlines()[-1].split() == ["stages", "0", "1", "2", "3"]
    else:
        assert "a task is its stage's number; - forward, = backward" in text


def test_gradient_sums_and_updates_take_a_column_at_least():
    """27 s of tasks, then 0.1 s and 0.001 s: both stand at the end of the row, the last task gives
    up columns.
    """
    picture = plan_picture(*chain_plan(gradient_s=0.1, update_s=0.001))
    lines = [line.plain for line in draw_timeline(picture, 80, colour=False)]
    assert lines[0].endswith("=GU")
    assert {len(line) for line in lines[:4]} == {80}
    for line in lines[1:4]:
        assert re.search(r"B5=+GU *$", line)
    assert "  F- forward, B= backward, G: gradient sum, U# update" in lines


def test_long_gradient_sums_and_updates_are_as_long_as_they_take():
    picture = plan_picture(*chain_plan(1, 1, gradient_s=3.0, update_s=4.0))
    row = next(draw_timeline(picture, 102, colour=False)).plain
    assert row == "0 " + "F0" + "-" * 8 + "B0" + "=" * 18 + "G" + ":" * 29 + "U" + "#" * 39


def test_timelines_on_one_scale_have_a_key():
    one = plan_picture(*chain_plan(gradient_s=0.1))
    other = plan_picture(*chain_plan(2, update_s=0.1))
    lines = [
        line.plain for line in draw_timelines([("one", one), ("other", other)], 80, colour=False)
    ]
    assert lines[-1] == "  F- forward, B= backward, G: gradient sum, U# update"
    assert lines[2].endswith("G") and lines[7].rstrip().endswith("U")


def test_the_key_of_many_stages_is_wrapped():
    picture = plan_picture(*chain_plan(30, update_s=0.1))
    lines = [line.plain for line in draw_timeline(picture, 80, colour=True)]
    first = next(place for place, line in enumerate(lines) if line.strip().startswith("stages"))
    assert [word for line in lines[first : first + 2] for word in line.split()] == [
        "stages",
        *map(str, range(30)),
    ]
    assert max(map(len, lines)) <= 80
