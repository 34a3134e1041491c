"""`autopipe schedule` and `show` of its file: what they say, and one line for everything that
cannot be scheduled.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopipe.ir.block_schedule import read_block_schedule
from autopipe.passes.schedule.published.blocks import shape_blocks
from tests.cli.command_line import CommandLine

GOOD = """\
format: autopipe.placement/1
devices: 2
memory: [4, 2]
blocks:
  - {name: F0, devices: [0], time: 1, memory: 1}
  - {name: F1, devices: [1], time: 1, memory: 1, after: [F0]}
  - {name: B1, devices: [1], time: 2, memory: -1, after: [F1]}
  - {name: B0, devices: [0], time: 2, memory: -1, after: [B1]}
"""


def written(text: str = GOOD) -> Path:
    path = Path("placement.yaml")
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_is_scheduled_and_its_schedule_shown(command_line: CommandLine) -> None:
    told = command_line.done("schedule", written(), "--micro-batches", 8, "-o", "s.json")
    assert "placement.yaml: 4 blocks on 2 devices, 8 micro-batches, tessel" in told.out
    assert "period 3 (optimal, proven); makespan 27\n" in told.out
    assert "bubble 0.0% in the steady state, 11.1% in all" in told.out
    assert "0 F0-" in told.out and "memory (" in told.out and "schedule in s.json" in told.out
    assert not told.err
    shown = command_line.done("show", "s.json").out
    assert shown.splitlines()[0] == "s.json: 4 blocks on 2 devices, 8 micro-batches"
    assert shown.splitlines()[1:] == told.out.splitlines()[1:-1]
    command_line.done("show", "s.json", "--svg", "s.svg")
    assert Path("s.svg").read_text(encoding="utf-8").startswith("<svg")


def test_the_object_is_the_file(command_line: CommandLine) -> None:
    words = ("schedule", "--shape", "m", "--memory", "6", "--micro-batches", "32")
    told = json.loads(command_line.done(*words, "-o", "m.json", "--json").out)
    held = json.loads(Path("m.json").read_text(encoding="utf-8"))
    assert {**held, "schedule": "tessel", "file": "m.json"} == told
    figures = (
        "format",
        "devices",
        "units",
        "period",
        "lower_bound",
        "optimal",
        "gap",
        "steady_bubble_rate",
    )
    assert [held[key] for key in figures] == ["autopipe.schedule/1", 4, 32, 6, 6, True, 0.0, 0.0]
    assert held["makespan"] == max(
        task["start"] + held["blocks"][task["block"]]["time"] for task in held["tasks"][0]
    )
    assert max(held["peak_memory"]) <= 6
    assert read_block_schedule(Path("m.json")).graph == shape_blocks("m", 4, True, 6)
    assert json.loads(command_line.done("show", "m.json", "--json").out)["tasks"] == held["tasks"]


def test_published_schedules_and_inference(command_line: CommandLine) -> None:
    words = ("schedule", "--shape", "v", "--devices", "4", "--micro-batches", "16", "--json")
    assert json.loads(command_line.done(*words, "--schedule", "1f1b").out)["makespan"] == 76
    assert (
        json.loads(command_line.done(*words, "--schedule", "gpipe").out)["peak_memory"] == [16] * 4
    )
    inference = json.loads(command_line.done(*words, "--mode", "infer").out)
    assert (inference["period"], inference["makespan"]) == (1, 19)


def test_the_same_seed_gives_the_same_schedule(command_line: CommandLine) -> None:
    words = (
        "schedule",
        "--shape",
        "x",
        "--micro-batches",
        "6",
        "--memory",
        "4",
        "--seed",
        "3",
        "--json",
    )
    first, second = (json.loads(command_line.done(*words).out) for _ in range(2))
    assert first["tasks"] == second["tasks"]


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


PLACEMENTS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "cyclic dependencies": (
        2, changed("memory: 1}\n  - {name: F1", "memory: 1, after: [B0]}\n  - {name: F1"),
        ("placement.yaml:5", "wait in a circle: 'F0' after 'B0' after 'B1' after 'F1' after 'F0'"),
    ),
    "device out of range": (
        2, changed("F1, devices: [1]", "F1, devices: [2]"), ("placement.yaml:6", "'F1' is on device 2", "0 to 1")
    ),
    "device below zero": (2, changed("F1, devices: [1]", "F1, devices: [-1]"), (":6", "devices[0] is -1")),
    "time of zero": (2, changed("B0, devices: [0], time: 2", "B0, devices: [0], time: 0"), (":8", "time is 0")),
    "negative time": (2, changed("B0, devices: [0], time: 2", "B0, devices: [0], time: -2"), (":8", "time is -2")),
    "block on no device": (2, changed("B1, devices: [1]", "B1, devices: []"), (":7", "'B1' is on no device")),
    "memory that no schedule meets": (
        4, changed("memory: [4, 2]", "memory: [4, 0]"), ("device 1", "limit is 0", "1 is needed")
    ),
    "memory that fills up": (
        4, changed("memory: -1, after: [B1]", "memory: 0, after: [B1]"), ("device 0", "limit is 4", "6 is needed")
    ),
    "no YAML": (2, "blocks: [", ("placement.yaml",)),
    "an empty file": (2, "", ("placement.yaml",)),
    "no blocks": (2, GOOD.partition("blocks:")[0] + "blocks: []\n", ("the file describes 0 blocks",)),
}  # fmt: skip
"""Exit code, the file, and what is said."""


@pytest.mark.parametrize("name", PLACEMENTS)
def test_placements_that_cannot_be_scheduled(command_line: CommandLine, name: str) -> None:
    code, text, says = PLACEMENTS[name]
    command_line.refuses(
        code, ("schedule", written(text), "--micro-batches", 6, "-o", "s.json"), *says
    )


REQUESTS: dict[str, tuple[int, tuple[object, ...], tuple[str, ...]]] = {
    "nothing": (2, (), ("a placement file or --shape is required", "--shape")),
    "a file and a shape": (2, ("placement.yaml", "--shape", "v"), ("a placement file and --shape are both set",)),
    "devices of a file": (2, ("placement.yaml", "--devices", 4), ("--devices requires --shape",)),
    "mode of a file": (2, ("placement.yaml", "--mode", "infer"), ("--mode requires --shape",)),
    "memory of a file": (2, ("placement.yaml", "--memory", 4), ("--memory requires --shape",)),
    "a file that is not there": (2, ("other.yaml",), ("other.yaml",)),
    "a shape that is not there": (2, ("--shape", "w"), ("'w'", "v, x, m, nn, k")),
    "an odd number of devices": (2, ("--shape", "v", "--devices", 3), ("even number of devices",)),
    "one device": (2, ("--shape", "v", "--devices", 1), ("--devices",)),
    "no units": (2, ("--shape", "v", "--micro-batches", 0), ("--micro-batches",)),
    "units beyond counting": (2, ("--shape", "v", "--micro-batches", 10**9), ("--micro-batches is 1000000000", "the maximum for 8 blocks is 250000")),
    "no time": (2, ("--shape", "v", "--time-limit", 0), ("--time-limit is 0", "above 0")),
    "no number of seconds": (2, ("--shape", "v", "--time-limit", "nan"), ("--time-limit is nan",)),
    "a seed below zero": (2, ("--shape", "v", "--seed", -1), ("--seed",)),
    "memory of a shape": (4, ("--shape", "k", "--memory", 1), ("device 0", "limit is 1", "2 is needed")),
    "memory of a published schedule": (
        4, ("--shape", "v", "--schedule", "gpipe", "--memory", 4, "--micro-batches", 5), ("device 0", "5")
    ),
    "a schedule that is not there": (2, ("--shape", "v", "--schedule", "tesel"), ("'tesel'", "tessel")),
    "a schedule for other blocks": (4, ("--shape", "m", "--schedule", "1f1b"), ("1f1b",)),
    "a folder that is not there": (2, ("--shape", "v", "-o", "gone/s.json"), ("gone", "folder does not exist")),
    "a folder as file": (2, ("--shape", "v", "-o", "."), ("is a folder",)),
}  # fmt: skip
"""Exit code, the words, and what is said."""


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_that_cannot_be_met(command_line: CommandLine, name: str) -> None:
    code, words, says = REQUESTS[name]
    written()
    command_line.refuses(code, ("schedule", *words), *says)


def form() -> dict[str, object]:
    """A schedule as its file holds it."""
    return dict(json.loads(Path("s.json").read_text(encoding="utf-8")))


WRONG: dict[str, tuple[tuple[object, ...], object, tuple[str, ...]]] = {
    "a dependency broken": (("tasks", 1, 0, "start"), 0, ("'F1' of micro-batch 0 starts at 0", "'F0'")),
    "two blocks at a time": (("blocks", 2, "time"), 30, ("B1", "s.json")),
    "a block that is not there": (("tasks", 0, 0, "block"), 9, ("tasks[0][0].block", "a block on device 0")),
    "a block of another device": (("tasks", 0, 0, "block"), 1, ("the index of a block on device 0",)),
    "a unit that is not there": (("tasks", 0, 0, "unit"), 7, ("tasks[0][0].unit", "a micro-batch below 3")),
    "a task left out": (("tasks", 0, 0), None, ("tasks[0][0]",)),
    "a block renamed away": (("blocks", 3, "after"), [8], ("'B0'", "does not exist")),
    "less memory": (("memory",), [0, 0], ("device 0", "above the limit of 0")),
    "another makespan": (("makespan",), 99, ("makespan",)),
    "another count of devices": (("devices",), 3, ("s.json",)),
    "another format": (("format",), "autopipe.plan/1", ("format",)),
    "a circle": (("blocks", 0, "after"), [3], ("wait in a circle",)),
    "no time": (("blocks", 0, "time"), 0, ("time of the block is 0",)),
    "no device": (("blocks", 0, "devices"), [], ("no device",)),
}  # fmt: skip
"""Where in the file, what stands there, and what is said."""


@pytest.mark.parametrize("name", WRONG)
def test_a_schedule_that_does_not_match_its_blocks(command_line: CommandLine, name: str) -> None:
    place, value, says = WRONG[name]
    command_line.done(
        "schedule", written(), "--micro-batches", 3, "--schedule", "1f1b", "-o", "s.json"
    )
    whole = form()
    inner: object = whole
    for key in place[:-1]:
        inner = inner[key]  # type: ignore[index]
    inner[place[-1]] = value  # type: ignore[index]
    Path("s.json").write_text(json.dumps(whole), encoding="utf-8")
    command_line.refuses(2, ("show", "s.json", "--svg", "s.svg"), *says)
