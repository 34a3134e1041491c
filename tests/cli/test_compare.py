"""`autopipe compare`: figures, time, decisions, timelines and memory side by side."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure

SETTINGS = {
    "layers": "2",
    "hidden": "32",
    "heads": "2",
    "sequence": "16",
    "vocabulary": "64",
    "loss": "true",
}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans")
    build(configure("gpt", SETTINGS)).save(folder / "gpt.onnx")
    shared = ["--strategy", "pipedream", "--batch-size", "16", "--micro-batches", "8", "-q"]
    for name, words in (
        ("one", ["--gpus", "1"]),
        ("two", ["--gpus", "2"]),
        ("gpipe", ["--gpus", "2", "--schedule", "gpipe"]),
    ):
        assert (
            main(["plan", str(folder / "gpt.onnx"), *shared, "-o", str(folder / name), *words]) == 0
        )
    shutil.copytree(folder / "two", folder / "moved")
    placement = folder / "moved/placement.yaml"
    text = (
        placement.read_text()
        .replace("devices: [1]", "devices: [x]")
        .replace("devices: [0]", "devices: [1]")
    )
    placement.write_text(text.replace("devices: [x]", "devices: [0]").replace("false", "true", 1))
    assert main(["plan", "--from", str(folder / "moved"), "-q"]) == 0
    return folder


def rows(out: str) -> dict[str, list[str]]:
    """The cells of the lines that are rows of a table, by their first one."""
    lines = [
        [cell.strip() for cell in line.split("  ") if cell.strip()] for line in out.splitlines()
    ]
    return {line[0]: line[1:] for line in lines if len(line) > 1}


def test_plans_stand_side_by_side(
    plans: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a narrow terminal a short task has no room for its name.
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["compare", *(str(plans / name) for name in ("one", "two", "gpipe"))]) == 0
    out = capsys.readouterr().out
    found = rows(out)
    assert found["schedule"] == ["tessel", "tessel", "gpipe"]
    assert found["devices"] == ["1", "2", "2"]
    assert len(found["tokens/s per device"]) == len(found["ideal"]) == 3
    assert len(found["exposed P2P"]) == 3
    for text in ("timelines on one scale", "memory on one scale", "▄", "B7"):
        assert text in out


def test_parts_of_a_step_add_up_to_it(plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(plans / "two"), str(plans / "gpipe"), "--json"]) == 0
    for each in json.loads(capsys.readouterr().out)["plans"]:
        assert sum(each["breakdown"].values()) == pytest.approx(each["summary"]["step_time_s"])


def test_json_holds_every_summary_and_the_speed_up(
    plans: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(plans / "one"), str(plans / "two"), "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out)["plans"]
    assert one["speedup"] == 1.0
    assert two["speedup"] == pytest.approx(
        one["summary"]["step_time_s"] / two["summary"]["step_time_s"]
    )
    assert two["summary"] == json.loads((plans / "two/plan.json").read_text())["summary"]


def test_plans_for_different_batches_are_told_and_compared_by_their_samples(
    plans: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [
        "plan",
        str(plans / "gpt.onnx"),
        "--strategy",
        "pipedream",
        "--batch-size",
        "4",
        "--micro-batches",
        "4",
    ]
    assert main([*words, "-q", "-o", str(tmp_path / "small"), "--gpus", "1"]) == 0
    capsys.readouterr()
    assert main(["compare", str(plans / "one"), str(tmp_path / "small"), "--json"]) == 0
    shown = capsys.readouterr()
    assert "differ in their batches: 16, 4" in shown.err
    one, small = json.loads(shown.out)["plans"]
    rates = [each["summary"]["samples_per_s"] for each in (one, small)]
    assert small["speedup"] == pytest.approx(rates[1] / rates[0])
    assert small["speedup"] < 1 < one["summary"]["step_time_s"] / small["summary"]["step_time_s"]


def test_what_is_decided_otherwise(plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(plans / name) for name in ("two", "gpipe", "moved", "two")]
    assert main(["compare", *folders]) == 0
    told = capsys.readouterr().out.partition(f"{folders[1]} against {folders[0]}:\n")[2]
    assert told.startswith("  the same placement, tasks in another order\n")
    moved = told.partition(f"{folders[2]} against {folders[0]}:\n")[2]
    stages = [
        stage["nodes"]
        for stage in json.loads((plans / "two/plan.json").read_text())["placement"]["stages"]
    ]
    first, second = (sum(stop - start for start, stop in ranges) for ranges in stages)
    assert moved.startswith(f"  devices of {first + second} nodes\n")
    assert f"0 → 1: {first} nodes (" in moved and f"1 → 0: {second} nodes (" in moved
    assert re.search(r"0 → 1: \d+ nodes \(embedding, layers? 0", moved)
    assert f"  recompute of {first} nodes\n    no → yes: {first} nodes (" in moved
    assert f"{folders[3]} against {folders[0]}:\n  the same decisions\n" in moved
    assert main(["compare", *folders, "--json"]) == 0
    contrast = json.loads(capsys.readouterr().out)["plans"][2]["differences"]
    assert {change["before"]: change["nodes"] for change in contrast["devices"]} == {
        "0": first,
        "1": second,
    }


def test_a_model_that_is_gone_is_told(
    plans: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A plan folder of an earlier version has no graph, which is then read from the ONNX file."""
    shutil.copytree(plans / "two", tmp_path / "plan")
    (tmp_path / "plan" / "graph.json").unlink()
    assert main(["compare", str(plans / "moved"), str(tmp_path / "plan")]) == 0
    assert "nodes cannot be compared: " in capsys.readouterr().out


def test_a_page_holds_all_plans(
    plans: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "page.html"
    assert main(["compare", str(plans / "two"), str(plans / "gpipe"), "--html", str(target)]) == 0
    assert str(target) in capsys.readouterr().out
    page = target.read_text()
    assert page.count("the same placement, tasks in another order") == 1
    assert main(["compare", str(plans / "two"), "--html", str(tmp_path / "no/page.html")]) == 2


def test_what_is_no_plan_is_refused(plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(plans / "one"), str(plans)]) == 2
    assert "contains no plan" in capsys.readouterr().err
