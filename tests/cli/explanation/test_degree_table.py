"""`explain --degrees` and `--why-not`: each row's command gives its step, and each row without a
step has a reason.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable

import pytest

from autopipe.api.plan_folder import open_plan
from autopipe.configs.zoo import build, configure
from autopipe.passes.schedule.breakdown import breakdown, breakdown_under_1f1b
from tests.cli.command_line import CommandLine

GPT = {
    "layers": "4",
    "hidden": "32",
    "heads": "4",
    "sequence": "8",
    "vocabulary": "64",
    "loss": "true",
}


@pytest.fixture
def planned(command_line: CommandLine) -> CommandLine:
    """A folder with the plan p, for four devices on two nodes."""
    build(configure("gpt", GPT)).save(command_line.folder / "m.onnx")
    command_line.done("plan", "m.onnx", "--gpus", 4, "--cluster", "a100-80gb", "--set", "cluster.devices_per_node=2",
                      "--set", "cluster.nodes=2", "--batch-size", 16, "--micro-batches", 8, "--strategy", "grid",
                      "--schedule", "1f1b", "--set", "strategy.pipeline=2", "-o", "p", "-q")  # fmt: skip
    return command_line


def rows_of(here: CommandLine, *words: object) -> list[dict]:
    return json.loads(here.done("explain", "p", *words, "--json", "-q").out)["rows"]


def check_commands(here: CommandLine, rows: Iterable[dict]) -> None:
    """Plan each row by its command and compare steps and memory."""
    for row in rows:
        found = json.loads(here.done(*shlex.split(row["command"])[1:], "--json", "-q").out)[
            "summary"
        ]
        assert found["step_time_s"] == pytest.approx(row["step_time_s"]), row["command"]
        assert max(found["peak_memory_bytes"]) == row["peak_memory_bytes"]
        assert found["schedule"] == row["schedule"]
        assert found["degrees"]["groups"] == [4 // row["pipeline"]] * row["pipeline"]
        assert found["mfu"] == pytest.approx(row["mfu"])


def test_every_factorisation_has_a_row_that_its_command_gives(planned: CommandLine) -> None:
    rows = rows_of(planned, "--degrees")
    found = {(row["pipeline"], row["data"], row["tensor"]) for row in rows}
    # Tensor is at most the two devices of a node.
    assert found == {(1, 4, 1), (2, 2, 1), (4, 1, 1), (1, 2, 2), (2, 1, 2)}
    steps = [row["step_time_s"] for row in rows]
    assert steps == sorted(steps)
    assert [row["reason"] for row in rows if row["is_plan"]] == ["the degrees of the plan"]
    assert all(row["reason"] for row in rows)
    check_commands(planned, rows)
    screen = " ".join(planned.done("explain", "p", "--degrees").out.split())
    assert "MFU" in screen and "the degrees of the plan" in screen


def test_why_not_names_degrees(planned: CommandLine) -> None:
    rows = rows_of(planned, "--why-not", "tp=2")
    assert {(row["pipeline"], row["data"], row["tensor"]) for row in rows} == {(1, 2, 2), (2, 1, 2)}
    (row,) = rows_of(planned, "--why-not", "pipeline=1,tensor=4,data=1")
    assert row["tensor"] == 4, "more than a node's devices, as it is named"
    check_commands(planned, [row])
    (row,) = rows_of(planned, "--why-not", "PP=4,TP=2,DP=8")
    assert row["step_time_s"] is None
    assert (
        row["reason"] == "pipeline 4 x data 8 x tensor 2 is 64, which does not make the 4 devices"
    )
    screen = planned.done("explain", "p", "--why-not", "pp=4,tp=2,dp=8").out
    assert "which does not make the 4 devices" in " ".join(screen.split())


def test_why_not_names_schedules_and_their_placements(planned: CommandLine) -> None:
    rows = rows_of(planned, "--why-not", "schedule=dualpipe")
    assert {row["schedule"] for row in rows} == {"dualpipe", "dualpipe_v"}
    for row in rows:
        placement = "2 directions" if row["schedule"] == "dualpipe" else "2 stages per rank"
        assert placement in row["text"] and not row["is_plan"]
    check_commands(planned, rows)


def test_memory_is_a_reason(planned: CommandLine) -> None:
    limit = max(open_plan(planned.folder / "p").plan.summary.peak_memory_bytes)
    planned.done(
        "plan",
        "m.onnx",
        "--config",
        "p/config.yaml",
        "--memory-limit",
        limit,
        "-o",
        "p",
        "--force",
        "-q",
    )
    rows = rows_of(planned, "--degrees")
    refused = [row for row in rows if row["step_time_s"] is None]
    assert refused and all("over the limit of" in row["reason"] for row in refused)
    assert all(row["peak_memory_bytes"] <= limit for row in rows if row["step_time_s"] is not None)


@pytest.mark.parametrize(
    ("words", "says"),
    [("tensor", "'tensor' is not a degree"), ("tensor=0", "'tensor=0' is not a degree"),
     ("width=2", "'width=2' is not a degree"), ("schedule=dualpip3", "did you mean dualpipe")],
)  # fmt: skip
def test_words_that_are_no_degrees_are_refused(planned: CommandLine, words: str, says: str) -> None:
    planned.refuses(2, ("explain", "p", "--why-not", words), says)


def test_parts_of_a_step_under_1f1b_need_no_list_of_tasks(planned: CommandLine) -> None:
    found = open_plan(planned.folder / "p")
    plan = found.plan
    step_s = plan.summary.step_time_s
    expected = breakdown(found.problem, plan.placement, plan.schedule, plan.prediction, step_s)
    quick = breakdown_under_1f1b(found.problem, plan.placement, plan.prediction, step_s)
    assert dict(quick.losses) == pytest.approx(dict(expected.losses), abs=1e-12)
