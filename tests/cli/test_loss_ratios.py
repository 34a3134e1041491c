"""Losses that are ratios of totals, from the command line: what is told, verified, trained on and
validated by.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from tests.cli.command_line import CommandLine
from tests.passes.loss_cases import LOSSES, batch, exported, loss_of


@pytest.mark.parametrize("name", ["mean over chosen, at least one", "root mean square"])
def test_a_ratio_in_micro_batches_is_that_of_all_samples(
    command_line: CommandLine, name: str
) -> None:
    folder = command_line.folder
    model = exported(next(each for each in LOSSES if each.name == name), folder)
    train = batch(16, 5)
    held_out = batch(24, 6)
    np.savez(folder / "train.npz", **train)
    np.savez(folder / "eval.npz", **held_out)
    assert (
        json.loads(command_line.done("inspect", model, "--json").out)["loss_form"]["kind"]
        == "ratio"
    )
    words = (
        "--batch-size",
        8,
        "--micro-batches",
        4,
        "--gpus",
        2,
        "--strategy",
        "data_parallel",
        "-o",
        "p",
        "-q",
    )
    settings = ("training.gradient_accumulation_steps=2", "optimizer.name=sgd", "optimizer.lr=1e-9")
    command_line.done(
        "plan", model, *words, *(word for each in settings for word in ("--set", each))
    )
    command_line.done("codegen", "p", "-q")
    command_line.done("verify", "p/program", "--device", "cpu", "-q")
    data = ("--data", "train.npz", "--eval-data", "eval.npz")
    shown = command_line.done("launch", "p/program", "--steps", 1, "--device", "cpu", *data).out
    losses = [float(each) for each in re.findall(r"loss (\d+\.\d+)", shown)]
    assert losses == pytest.approx([loss_of(model, train), loss_of(model, held_out)], rel=2e-6)


def test_another_model_in_the_place_of_a_ratio_is_refused(command_line: CommandLine) -> None:
    folder = command_line.folder
    cases = {each.name: each for each in LOSSES}
    model = exported(cases["mean over chosen"], folder)
    words = ("--batch-size", 8, "--micro-batches", 4, "--gpus", 1, "--strategy", "pipedream")
    command_line.done("plan", model, *words, "-o", "p", "-q")
    exported(cases["log of a mean"], folder).replace(model)
    command_line.refuses(4, ("codegen", "p"), "do not give the loss 'loss'")
