"""`autopipe compare`: figures side by side."""

from __future__ import annotations

import json

import pytest

from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    settings = {"layers": "2", "hidden": "32", "heads": "2", "sequence": "16", "vocabulary": "64", "loss": "true"}
    build(configure("gpt", settings)).save(folder / "gpt.onnx")
    for name, words in (
        ("one", ["--gpus", "1"]),
        ("two", ["--gpus", "2"]),
        ("gpipe", ["--gpus", "2", "--schedule", "gpipe"]),
    ):
        words = [
            "plan",
            str(folder / "gpt.onnx"),
            "--batch-size",
            "16",
            "--strategy",
            "pipedream",
            "-q",
            "-o",
            str(folder / name),
            *words,
        ]
        assert main(words) == 0
    return folder


def test_plans_stand_side_by_side(plans, capsys):
    assert main(["compare", *(str(plans / name) for name in ("one", "two", "gpipe"))]) == 0
    lines = {line.split("  ")[0].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert lines["schedule"].split() == ["schedule", "tessel", "tessel", "gpipe"]
    assert lines["devices"].split() == ["devices", "1", "2", "2"]


def test_json_holds_every_summary_and_the_speed_up(plans, capsys):
    assert main(["compare", str(plans / "one"), str(plans / "two"), "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out)["plans"]
    assert one["speedup"] == 1.0
    assert two["speedup"] == pytest.approx(one["summary"]["step_time_s"] / two["summary"]["step_time_s"])
    assert two["summary"] == json.loads((plans / "two/plan.json").read_text())["summary"]


def test_plans_for_different_batches_are_told(plans, capsys, tmp_path):
    words = [
        "plan",
        str(plans / "gpt.onnx"),
        "--batch-size",
        "4",
        "--strategy",
        "pipedream",
        "-q",
        "-o",
        str(tmp_path / "small"),
        "--gpus",
        "1",
    ]
    assert main(words) == 0
    assert main(["compare", str(plans / "one"), str(tmp_path / "small")]) == 0
    assert "different batches: 16, 4" in capsys.readouterr().err


def test_what_is_no_plan_is_refused(plans, capsys):
    assert main(["compare", str(plans / "one"), str(plans)]) == 2
    assert "holds no plan" in capsys.readouterr().err
