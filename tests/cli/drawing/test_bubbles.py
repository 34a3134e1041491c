"""Bubbles of measured steps, charged to a rank, a task and the message that it waited for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from autopipe.api.measured_steps import measured_steps, predicted_bubbles, worst_bubbles
from autopipe.api.timeline_figure import plan_picture
from autopipe.api.timeline_files import END, MEASURED, PREDICTED, chrome_trace, read_measured
from tests.cli.drawing.examples import chain_plan


def times(step: int = 3, began: float = 100.0) -> dict[int, list[dict[str, Any]]]:
    """Rank 1 waits 4 s for its first task, of those 3 for a message of rank 0, and 2 s at the
    end.
    """
    first = {"step": step, "began": began, "seconds": 10.0, "waits": []}
    first["spans"] = [
        {"task": "0F0", "start": 0.0, "end": 4.0},
        {"task": "0B0", "start": 4.0, "end": 10.0},
    ]
    second = {"step": step, "began": began + 1, "seconds": 9.0}
    second["spans"] = [
        {"task": "1F0", "start": 4.0, "end": 6.0},
        {"task": "1B0", "start": 6.0, "end": 7.0},
    ]
    second["waits"] = [{"task": "1F0", "peer": 0, "channel": 5, "start": 0.5, "end": 3.5}]
    return {0: [first], 1: [second]}


def test_a_bubble_is_charged_to_the_task_behind_it_and_to_the_message_that_came_late() -> None:
    found = measured_steps(times())
    assert [(each.rank, each.before, each.start, each.duration) for each in found.bubbles] == [
        (1, "1F0", pytest.approx(1e6), pytest.approx(4e6)),
        (1, END, pytest.approx(8e6), pytest.approx(2e6)),
    ]
    first, last = found.bubbles
    assert first.worst is not None and (first.worst.peer, first.worst.channel) == (0, 5)
    assert first.late == pytest.approx(3e6) and not last.late
    assert worst_bubbles(found.bubbles, 1) == [first]
    assert found.steps == range(3, 4)


def test_predicted_bubbles_and_tasks_fill_the_step() -> None:
    picture = plan_picture(*chain_plan(2, 3))
    found = predicted_bubbles(picture)
    for rank, row in enumerate(picture.rows):
        idle = sum(length for (device, _), length in found.items() if device == rank)
        assert idle + sum(bar.end - bar.start for bar in row) == pytest.approx(picture.end)
    assert found[1, "1F0"] > 0


def test_the_trace_holds_both_timelines_and_each_late_message_within_its_bubble(
    tmp_path: Any,
) -> None:
    found = measured_steps(times())
    path = tmp_path / "timeline.json"
    path.write_text(chrome_trace(plan_picture(*chain_plan(2, 1)), found.tasks, found.bubbles))
    events = [each for each in json.loads(path.read_text())["traceEvents"] if each["ph"] == "X"]
    assert {each["pid"] for each in events} == {PREDICTED, MEASURED}
    (late,) = (each for each in events if each["cat"] == "late message")
    (bubble,) = (each for each in events if each["name"] == "bubble before 1F0")
    assert bubble["ts"] <= late["ts"] and late["ts"] + late["dur"] <= bubble["ts"] + bubble["dur"]
    assert late["args"] == {
        "task": "1F0",
        "step": 3,
        "peer": 0,
        "channel": 5,
        "seconds": pytest.approx(3.0),
    }
    assert min(each["ts"] for each in events if each["pid"] == PREDICTED) == pytest.approx(0.0)
    assert read_measured(path) == found.tasks, "bubbles and the prediction are no measured tasks"
