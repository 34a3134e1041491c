"""`plan` with a named strategy says which options only strategy `auto` would have tried."""

from __future__ import annotations

import json

import pytest

from autopipe.configs.zoo import build, configure
from tests.cli.command_line import CommandLine

SETTINGS = {
    "layers": "2",
    "hidden": "32",
    "heads": "2",
    "sequence": "16",
    "vocabulary": "64",
    "loss": "true",
}
WORDS = ("plan", "gpt.onnx", "--gpus", 2, "--cluster", "a100-80gb", "--schedule", "1f1b")
BATCH = ("--batch-size", 8, "--micro-batches", 4)
RECOMPUTE = "--recompute"
SHARD = "optimizer.zero_stage=1"
TIGHT = ("--memory-limit", "1MiB")
"""A device holds each stage, but not the whole model and all that a step saves."""


@pytest.fixture
def here(command_line: CommandLine) -> CommandLine:
    build(configure("gpt", SETTINGS)).save(command_line.folder / "gpt.onnx")
    return command_line


def untried(here: CommandLine, *words: object) -> list[str]:
    """The options in the JSON output, which the terminal names in one line if there are any."""
    named = (*WORDS, *words, "-o", "plan")
    options: list[str] = json.loads(here.done(*named, "--json").out)["untried"]
    lines = [line for line in here.done(*named).out.splitlines() if line.startswith("not tried:")]
    pronoun = "it" if len(options) == 1 else "both"
    expected = (
        [f"not tried: {', '.join(options)} (strategy auto tries {pronoun})"] if options else []
    )
    assert lines == expected
    return options


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (("--strategy", "data_parallel"), [SHARD]),
        (("--strategy", "data_parallel", "--set", "optimizer.zero_stage=0"), []),
        (("--strategy", "data_parallel", "--set", "optimizer.zero_stage=1"), []),
        (("--strategy", "data_parallel", "--optimizer", "muon"), []),
        (("--strategy", "data_parallel", "--mode", "infer"), []),
        (("--strategy", "grid", "--set", "strategy.pipeline=2"), []),
        (("--strategy", "grid", "--set", "strategy.pipeline=2", *TIGHT), [RECOMPUTE]),
        (("--strategy", "grid", "--set", "strategy.data=2", *TIGHT), [RECOMPUTE, SHARD]),
        (
            ("--strategy", "grid", "--set", "strategy.data=2", *TIGHT, "--recompute", "none"),
            [SHARD],
        ),
        (
            ("--strategy", "grid", "--set", "strategy.data=2", *TIGHT, "--recompute", "auto"),
            [SHARD],
        ),
        (("--strategy", "grid", "--set", "strategy.pipeline=2", *TIGHT, "--mode", "infer"), []),
    ],
)
def test_options_that_are_open_and_can_matter_are_named(
    here: CommandLine, words: tuple[object, ...], options: list[str]
) -> None:
    assert untried(here, *BATCH, *words) == options


def test_strategy_auto_leaves_nothing_to_name(here: CommandLine) -> None:
    assert untried(here, *BATCH, *TIGHT, "--strategy", "auto") == []


def test_a_kept_placement_has_decided(here: CommandLine) -> None:
    """`plan --from` takes both decisions from the plan folder."""
    here.done(*WORDS, *BATCH, "--strategy", "data_parallel", "-o", "base")
    assert (
        json.loads(here.done("plan", "--from", "base", "-o", "again", "--json").out)["untried"]
        == []
    )
