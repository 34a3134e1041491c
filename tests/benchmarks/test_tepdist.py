"""`python -m benchmarks tepdist`: its figures beside the paper's; a large last layer comes out
split by its classes.
"""

from __future__ import annotations

import json

import pytest

from benchmarks.tepdist import (
    SIZES,
    SimulatedPlan,
    Training,
    cases,
    class_parts,
    simulated_plan,
    step_flops,
)
from tests.cli.command_line import CommandLine

WIDE = (("image", 32), ("width", 4), ("hidden", 512), ("classes", 200_000))
"""A VGG whose last layer is nearly all of it."""


def test_every_part_has_its_cases() -> None:
    parts = {(case.name, case.part) for case in cases()}
    assert {(f"gpt-{size}/p=8", "optimisation levels") for size in SIZES} <= parts
    for devices, gpt, moe in (
        (1, "350m", "380m"),
        (2, "760m", "690m"),
        (4, "1.3b", "1.3b"),
        (8, "2.7b", "2.4b"),
    ):
        assert {
            (f"gpt-{gpt}/p={devices}", "model extension"),
            (f"moe-{moe}/p={devices}", "model extension"),
        } <= parts
    names = {name for name, part in parts if part == "general"}
    assert len(names) == 16
    assert {
        "vgg19-million/p=8",
        "bert-dnabert/p=8",
        "unet-paper/p=8",
        "wide-resnet-2b/p=8",
    } <= names


def test_what_levels_find_is_told_with_their_times(command_line: CommandLine) -> None:
    rows = json.loads(command_line.done("tepdist", "--only", "gpt-1.3b/p=8", "--json").out)["rows"]
    found = {(row["variant"], row["metric"]): row["ours"] for row in rows}
    assert {variant for variant, metric in found if metric == "search_time_s"} == {"O2", "O3"}
    assert found["O3", "objective"] == pytest.approx(found["O2", "objective"], rel=0.02)
    assert all(row["theirs"] is None and "picture" in row["note"] for row in rows if row["variant"])


@pytest.mark.parametrize("devices", [2, 4])
def test_a_large_last_layer_is_split_by_its_classes(devices: int) -> None:
    step = simulated_plan(Training("vgg19", WIDE, devices, 16 * devices))
    assert isinstance(step, SimulatedPlan)
    assert class_parts(step.problem, step.placement) == devices
    base = simulated_plan(Training("vgg19", WIDE, 1, 16))
    assert isinstance(base, SimulatedPlan)
    assert class_parts(base.problem, base.placement) == 1
    assert step.flops / base.flops > 0.5, "data parallelism would exchange the layer's gradients"


def test_operations_are_those_of_all_samples_whatever_the_micro_batches() -> None:
    training = Training("gpt", (("layers", 1),), 2, 8)
    assert step_flops(training.free) == pytest.approx(step_flops(training.given(2)))
    assert step_flops(training.given(2)) == pytest.approx(step_flops(training.given(1)))


def test_a_step_that_memory_does_not_hold_is_told_by_why() -> None:
    refused = simulated_plan(Training("gpt", (("layers", 1),), 1, 4, memory_limit=2**10))
    assert isinstance(refused, str)
    assert "GiB" in refused or "KiB" in refused
