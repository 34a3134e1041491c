"""`loss.scores` on the command line: what plans, explanations and files say of it, and values that
are refused.
"""

from __future__ import annotations

import json
import re

import pytest

from autopipe.api.plan_folder import open_plan
from autopipe.cli.plan_report import strategy_text
from autopipe.configs.configuration import Loss, load_configuration
from autopipe.ir.plan import Alternative, Choice
from tests.cli.command_line import CommandLine

SIZES = {
    "layers": 1,
    "hidden": 8,
    "heads": 1,
    "sequence": 8,
    "vocabulary": 16_384,
    "loss": "true",
    "weights": "none",
}
PLAN = (
    "plan",
    "gpt.onnx",
    "--gpus",
    1,
    "--cluster",
    "cpu-local",
    "--strategy",
    "data_parallel",
    "--batch-size",
    2,
)
TIMES = r"its product and the loss take [\d.]+ .s, [\d.]+ .s if"


@pytest.fixture
def here(command_line: CommandLine) -> CommandLine:
    settings = [word for name, value in SIZES.items() for word in ("--set", f"{name}={value}")]
    command_line.done("zoo", "build", "gpt", "-o", "gpt.onnx", *settings)
    return command_line


def test_what_is_decided_is_told_and_written(here: CommandLine) -> None:
    shown = here.done(*PLAN, "-o", "p").out
    assert re.search(rf"loss: scores kept, [\d,]+ KiB per micro-batch; {TIMES} recomputed\n", shown)
    summary = json.loads((here.folder / "p" / "plan.json").read_text())["summary"]
    assert summary["scores"]["choice"] == "keep"
    assert load_configuration(here.folder / "p" / "config.yaml").loss == Loss(
        output="loss", scores="keep"
    )
    assert re.search(rf"loss: scores kept, .*; {TIMES} recomputed\n", here.done("explain", "p").out)
    told = json.loads(here.done("explain", "p", "--json", "-q").out)
    assert told["summary"]["scores"] == summary["scores"]


def test_too_little_memory_is_told_and_planned_again(here: CommandLine) -> None:
    (most,) = json.loads(here.done(*PLAN, "-o", "kept", "--json", "-q").out)["summary"][
        "peak_memory_bytes"
    ]
    shown = here.done(
        *PLAN, "--micro-batches", 1, "--memory-limit", most - 1, "-o", "p"
    ).out.replace("\n", " ")
    assert re.search(
        rf"loss: scores recomputed, saves [\d,]+ KiB .*{TIMES} kept \(no plan: stage 0 .*\)", shown
    )
    planned = open_plan(here.folder / "p")
    assert planned.model.scores == "recompute"
    here.done("plan", "gpt.onnx", "--config", "p/config.yaml", "-o", "again")
    assert open_plan(here.folder / "again").digest == planned.digest
    here.done("codegen", "p")
    assert (
        "operators.linear_cross_entropy("
        in (here.folder / "p" / "program" / "stage_00.py").read_text()
    )


def test_a_search_says_which_candidates_recompute(here: CommandLine) -> None:
    found = json.loads(
        here.done(*PLAN[:6], "--batch-size", 2, "--no-cache", "-o", "kept", "--json", "-q").out
    )
    limit = min(found["summary"]["peak_memory_bytes"]) - 1
    words = (
        *PLAN[:6],
        "--batch-size",
        2,
        "--no-cache",
        "--memory-limit",
        limit,
        "--set",
        "recompute=none",
    )
    found = json.loads(here.done(*words, "--micro-batches", 1, "-o", "p", "--json", "-q").out)
    assert {each["choice"]["scores"] for each in found["alternatives"]} == {"keep", "recompute"}
    assert found["summary"]["scores"]["choice"] == "recompute"
    told = json.loads(here.done("explain", "p", "--json", "-q").out)["alternatives"]
    commands = {each["choice"]["scores"]: each["command"] for each in told}
    assert "loss.scores=keep" in commands["keep"]
    assert "loss.scores" not in commands["recompute"]


def test_an_inspection_reads_the_form_that_is_asked_for(here: CommandLine) -> None:
    found = [
        here.done("inspect", "gpt.onnx", "--set", f"loss.scores={scores}").out
        for scores in ("keep", "recompute")
    ]
    assert ["LinearCrossEntropy" in each for each in found] == [False, True]


def test_candidates_are_told_apart() -> None:
    assert (
        strategy_text(Alternative(Choice("grid", scores="recompute"))) == "grid (recomputed scores)"
    )
    assert strategy_text(Alternative(Choice("grid", scores="keep"))) == "grid"


def test_another_value_is_refused(here: CommandLine) -> None:
    here.refuses(
        2, (*PLAN, "--set", "loss.scores=drop"), "loss.scores", "drop", "keep", "recompute", "auto"
    )
    (here.folder / "c.yaml").write_text("loss:\n  scores: 3\n")
    here.refuses(2, (*PLAN, "--config", "c.yaml"), "c.yaml:2", "loss.scores")


@pytest.mark.parametrize("written", ["loss: total\n", "loss: {output: total, normalize: tokens}\n"])
def test_a_named_output_stays(here: CommandLine, written: str) -> None:
    path = here.folder / "c.yaml"
    path.write_text(written)
    found = load_configuration(path, assignments=["loss.scores=recompute"]).loss
    assert isinstance(found, Loss)
    assert (found.output, found.scores) == ("total", "recompute")
    assert found.normalize == ("tokens" if "tokens" in written else "auto")
