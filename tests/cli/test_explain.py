"""`autopipe explain`: its prices are those of the plans it names, and it refuses what there is
not.
"""

from __future__ import annotations

import json
import shlex

import pytest
import yaml

from autopipe.configs.zoo import build, configure
from autopipe.ir.plan import Alternative, Choice, best_per_strategy
from tests.cli.command_line import CommandLine

GPT = {
    "layers": "1",
    "hidden": "16",
    "heads": "2",
    "sequence": "8",
    "vocabulary": "32",
    "loss": "true",
}
MODELS = {
    "gpt": GPT,
    "dlrm": {"loss": "true"},
    "mmt": {"layers": "1", "branches": "2", "loss": "true"},
    "moe": {"layers": "1", "loss": "true"},
    "candle-uno": {"loss": "true"},
}


def explained(here: CommandLine, *words: object) -> dict:
    """What `explain --json` says of the plan in p."""
    return json.loads(here.done("explain", "p", *words, "--json", "-q").out)


def planned(here: CommandLine, model: str, *words: object) -> str:
    """The screen that planning a model for two devices, into p, ends with."""
    build(configure(model, MODELS[model])).save(here.folder / "m.onnx")
    return here.done("plan", "m.onnx", "--gpus", "2", "--batch-size", "8", "-o", "p", *words).out


def check_commands(here: CommandLine, wanted: int) -> None:
    """Plan the best of each strategy, with a step, and the next best, by the command line that is
    told.
    """
    told = explained(here)
    rows = [each for each in told["alternatives"] if each.get("step_time_s") is not None]
    assert told["summary"]["step_time_s"] == min(each["step_time_s"] for each in rows)
    best: dict[tuple[str, ...], dict] = {}
    for each in sorted(rows, key=lambda each: each["step_time_s"]):
        best.setdefault((each["choice"]["strategy"],), each)
    for each in [told["next_best"], *list(best.values())[:wanted]]:
        words = shlex.split(each["command"])
        assert words[:2] == ["autopipe", "plan"]
        found = json.loads(here.done(*words[1:], "--json", "-q").out)
        assert found["summary"]["step_time_s"] == each["step_time_s"], each["command"]
        assert found["summary"]["schedule"] == each["choice"]["schedule"]


def test_alternatives_forced_take_what_was_stated(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    screen = planned(command_line, "gpt").splitlines()
    assert any(line.startswith("data_parallel") for line in screen)
    assert "of the step: ideal" in command_line.done("explain", "p").out
    check_commands(command_line, 4)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "words", [(), ("--micro-batches", "4"), ("--micro-batch-size", "2", "--schedule", "1f1b")]
)
def test_alternatives_of_many_models_forced_take_what_was_stated(
    command_line: CommandLine, model: str, words: tuple[str, ...]
) -> None:
    planned(command_line, model, *words)
    check_commands(command_line, 20)


def test_a_nodes_other_places_take_what_planning_the_edited_file_gives(
    command_line: CommandLine,
) -> None:
    planned(command_line, "gpt", "--strategy", "data_parallel", "--schedule", "gpipe")
    found = explained(command_line, "--node", "*query/MatMul")
    assert found["node"]["op"] == "MatMul"
    assert found["split"] == {"b0": 2}
    whole = next(each for each in found["others"] if each["what"] == "not split")
    placement = command_line.folder / "p/placement.yaml"
    document = yaml.safe_load(placement.read_text())
    document["strategy"]["placement"][0]["splits"].append(
        {"split": {}, "nodes": [found["node"]["name"]]}
    )
    placement.write_text(yaml.safe_dump(document))
    edited = json.loads(command_line.done("plan", "--from", "p", "-o", "q", "--json", "-q").out)
    assert edited["summary"]["step_time_s"] == whole["step_time_s"]


def test_a_device_does_or_waits_all_of_the_step(command_line: CommandLine) -> None:
    planned(command_line, "gpt", "--strategy", "pipedream", "--schedule", "1f1b")
    for device in range(2):
        found = explained(command_line, "--device", device)
        report = found["device"]
        waits = (
            sum(seconds for _, seconds in report["waits"]) + report["messages_s"] + report["end_s"]
        )
        assert found["busy_s"] + waits == pytest.approx(found["step_time_s"])
    shown = command_line.done("explain", "p", "--device", 1).out
    assert "waits for device 0" in shown
    assert "forward of stage 1" in shown


def test_json_holds_the_breakdown_of_the_step(command_line: CommandLine) -> None:
    build(configure("gpt", GPT)).save(command_line.folder / "m.onnx")
    words = ("m.onnx", "--gpus", "2", "--strategy", "pipedream", "--schedule", "1f1b", "-o", "p")
    told = json.loads(command_line.done("plan", *words, "--json", "-q").out)
    assert sum(told["breakdown"].values()) == pytest.approx(told["summary"]["step_time_s"])
    assert told["alternatives"] == []
    found = explained(command_line)
    assert found["breakdown"] == told["breakdown"]
    assert found["next_best"] is None
    assert {each["what"] for each in found["helps"]} >= {"twice the memory", "twice the devices"}
    rates = {each["what"]: each["samples_per_s"] for each in found["helps"]}
    better = [
        rate
        for what, rate in rates.items()
        if what.startswith(("twice the bandwidth", "twice the memory"))
    ]
    assert len(better) >= 2 and min(better) >= found["summary"]["samples_per_s"], (
        "better conditions are never worse"
    )


def test_the_screens_of_a_named_strategy(command_line: CommandLine) -> None:
    planned(command_line, "gpt", "--strategy", "pipedream", "--schedule", "1f1b")
    whole = command_line.done("explain", "p").out
    for words in (
        "ideal",
        "of the step:",
        "the strategy was named",
        "twice the devices",
        "twice the memory",
    ):
        assert words in whole
    stage = command_line.done("explain", "p", "--stage", 0).out
    assert "what else" in stage
    assert "its forward is run again for its backward" in stage or "in stage 1" in stage


def test_what_there_is_not_is_refused(command_line: CommandLine) -> None:
    planned(command_line, "gpt", "--strategy", "pipedream", "--schedule", "1f1b")
    refuses = command_line.refuses
    refuses(
        2,
        ("explain", "p", "--node", "quary"),
        "'quary' matches the name of no node",
        "the most similar name",
    )
    refuses(2, ("explain", "p", "--node", "*"), "nodes", "use the number of one node")
    refuses(2, ("explain", "p", "--node", "99999"), "no node has the index 99999")
    refuses(
        2,
        ("explain", "p", "--stage", "7"),
        "stage 7 does not exist in the plan",
        "use stage 0 to 1",
    )
    refuses(
        2,
        ("explain", "p", "--device", "2"),
        "device 2 does not exist in the plan",
        "use device 0 to 1",
    )
    refuses(2, ("explain", "absent"), "absent does not exist", "autopipe plan MODEL")
    refuses(2, ("explain", "p", "--device", "0", "--stage", "0"), "mutually exclusive")


def test_the_best_of_each_strategy_comes_first() -> None:
    rows = (
        Alternative(Choice("slow"), 3.0),
        Alternative(Choice("none"), refused="too large"),
        Alternative(Choice("fast", schedule="a"), 2.0),
        Alternative(Choice("fast", schedule="b"), 1.0),
        Alternative(Choice("slow", schedule="b"), refused="no"),
    )
    assert best_per_strategy(rows) == (rows[3], rows[0], rows[1])
    same = Alternative(Choice("same"), 1.0, same_as="fast")
    assert best_per_strategy((same, *rows))[:2] == (rows[3], same)
