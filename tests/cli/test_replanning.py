"""`config.yaml` records what a plan chose: planning again with this file makes no other choice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from autopipe.api.plan_folder import open_plan, read_plan
from autopipe.configs.configuration import Configuration, load_configuration
from autopipe.configs.zoo import Settings, build, configure
from autopipe.passes.pipeline import PlanResult
from autopipe.passes.registry import strategy_names
from benchmarks.small_models import SIZES
from tests.cli.command_line import CommandLine

SLOW_LINKS = """\
name: slow-links
device:
  {name: small, memory: 100GB, peak: {fp32: 1TFLOP/s}, bandwidth: 100GB/s, launch_latency: 0s, efficiency: {
    matmul: 0.5, convolution: 0.5, elementwise: 0.5, normalization: 0.5, reduction: 0.5, memory: 0.5, recurrent: 0.5}}
levels:
  - {name: node, size: 4, latency: 0s, bandwidth: 1GB/s}
  - {name: cluster, latency: 0s, bandwidth: 250MB/s}
"""
"""Devices that pay nothing for small operators: stages, micro-batches and their sizes are many."""


def option(text: str) -> tuple[str, str]:
    return "--set", f"strategy.{text}"


WITH_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "graphpipe, own sizes": ("--strategy", "graphpipe", *option("per_stage_micro_batch=true")),
    "graphpipe, pase": ("--strategy", "graphpipe", *option("intra=pase")),
    "grid, one degree": ("--strategy", "grid", *option("data=2")),
    "grid, wave": ("--strategy", "grid", *option("stages_per_rank=2"), *option("style=v")),
    "grid, opposite": ("--strategy", "grid", *option("opposite=true"), "--schedule", "chimera"),
    "pase, stages": ("--strategy", "pase", "--stages", "2", *option("overlap=true")),
    "pipedream, sweep": (
        "--strategy",
        "pipedream",
        *option("sweep=true"),
        *option("replicate=false"),
    ),
    "tepdist, O4": (
        "--strategy",
        "tepdist",
        *option("level=O4"),
        *option("imbalance_tolerance=0.2"),
    ),
    "tessel_shapes, chunks": (
        "--strategy",
        "tessel_shapes",
        *option("stages_per_rank=2"),
        "--schedule",
        "interleaved_1f1b",
    ),
    "zero-1, recomputed": (
        "--strategy",
        "grid",
        "--recompute",
        "full",
        "--set",
        "optimizer.zero_stage=1",
    ),
}
"""Flags with options that place differently, by name."""
ALONE: Mapping[str, tuple[str, ...]] = {
    "breadth_first": ("candle-uno", "--gpus", "2"),
    "manual": ("gpt", "--set", "constraints=[{match: '*', stage: 0, devices: [0, 1, 2, 3]}]"),
    "one_weird_trick": ("alexnet",),
}
"""The model for strategies that do not take gpt as it is, and further flags."""
LARGE_TABLES: Mapping[str, Settings] = {"mt5": {"vocabulary": "480"}}
OPEN = (None, "auto")
"""Values that leave a decision to the next plan."""


@pytest.fixture
def here(command_line: CommandLine) -> CommandLine:
    Path("slow.yaml").write_text(SLOW_LINKS)
    return command_line


def write_model(name: str) -> None:
    build(configure(name, {**SIZES[name], **LARGE_TABLES.get(name, {}), "loss": "true"})).save(
        Path("model.onnx")
    )


def planned_twice(here: CommandLine, model: str, *words: str) -> tuple[Configuration, PlanResult]:
    """Plan `model` with the flags, then with the configuration of that plan alone. Return this one
    and the plan.
    """
    write_model(model)
    batch = ("--gpus", "4", "--cluster", "slow.yaml", "--batch-size", "16", "--no-cache")
    here.done("plan", "model.onnx", *batch, *words, "-o", "one")
    here.done("plan", "model.onnx", "--config", "one/config.yaml", "--no-cache", "-o", "two")
    one = open_plan(Path("one"))
    two = open_plan(Path("two"))
    assert two.digest == one.digest
    assert two.plan.placement == one.plan.placement
    assert two.plan.schedule.tasks == one.plan.schedule.tasks
    assert Path("two/config.yaml").read_text() == Path("one/config.yaml").read_text()
    return load_configuration("one/config.yaml"), one


def options_of(configuration: Configuration) -> dict[str, object]:
    return {name: entry.plain() for name, entry in configuration.strategy.options}


@pytest.mark.parametrize("strategy", sorted({*strategy_names()} - {"explicit"}))
def test_every_strategy(here: CommandLine, strategy: str) -> None:
    """Nothing is left open: each option has a value, and so do micro-batches, recomputation and the
    optimizer.
    """
    model, *words = ALONE.get(strategy, ("gpt",))
    found, planned = planned_twice(
        here, model, "--strategy", strategy, "--schedule", "kfkb", *words
    )
    assert (found.strategy.name, found.schedule.name) == (strategy, "kfkb")
    assert not [name for name, value in options_of(found).items() if value in OPEN]
    assert found.micro_batches == planned.problem.micro_batches
    assert (found.recompute, found.optimizer.shard) == ("none", False)
    assert options_of(found).get("tensor") != 0, "0 leaves the degree of expert open"
    stages = len(planned.plan.placement.stages)
    named = {
        name: value for name, value in options_of(found).items() if name in ("stages", "max_stages")
    }
    assert set(named.values()) <= {stages}


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_options_and_decisions(here: CommandLine, name: str) -> None:
    schedule = () if "--schedule" in WITH_OPTIONS[name] else ("--schedule", "kfkb")
    planned_twice(here, "gpt", *WITH_OPTIONS[name], *schedule)


@pytest.mark.parametrize(("model", "shape"), [("gpt", "v"), ("mt5", "nn"), ("two-branch", "k")])
def test_a_shape_that_was_chosen_is_named(here: CommandLine, model: str, shape: str) -> None:
    found, _ = planned_twice(here, model, "--strategy", "tessel_shapes", "--schedule", "kfkb")
    assert options_of(found)["shape"] == shape


def test_strategy_auto_is_settled_too(here: CommandLine) -> None:
    found, planned = planned_twice(here, "gpt", "--gpus", "2", "--micro-batches", "4")
    assert found.strategy.name == planned.plan.summary.strategy != "auto"
    assert found.schedule.name == planned.plan.summary.schedule != "auto"
    assert not [name for name, value in options_of(found).items() if value in OPEN]


def test_recomputation_that_memory_asks_for(here: CommandLine) -> None:
    write_model("gpt")
    words = (
        "--strategy",
        "grid",
        *option("pipeline=4"),
        "--micro-batches",
        "8",
        "--schedule",
        "1f1b",
    )
    here.done(
        "plan",
        "model.onnx",
        "--gpus",
        "4",
        "--cluster",
        "slow.yaml",
        "--batch-size",
        "16",
        *words,
        "-o",
        "p",
    )
    limit = max(read_plan(Path("p")).summary.peak_memory_bytes) - 1
    found, planned = planned_twice(
        here, "gpt", *words, "--recompute", "auto", "--memory-limit", str(limit)
    )
    stages = [stage.recompute for stage in planned.plan.placement.stages]
    assert any(stages) and not all(stages)
    assert found.recompute == "auto"


def test_own_sizes_of_micro_batches_stay_open(here: CommandLine) -> None:
    """A number of micro-batches would give all stages one size, so the configuration leaves it to
    the strategy.

    `plan --from`, which keeps the placement, takes the sizes from there.
    """
    found, planned = planned_twice(
        here, "mmt", *WITH_OPTIONS["graphpipe, own sizes"], "--schedule", "kfkb"
    )
    assert planned.plan.has_different_micro_batch_sizes
    assert found.micro_batches == "auto"
    here.done("plan", "--from", "one", "-o", "three")
    kept = open_plan(Path("three"))
    assert kept.plan.placement == planned.plan.placement
    assert kept.plan.schedule.tasks == planned.plan.schedule.tasks
