"""Keys of the previous release: each still sets its present key and emits one warning."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from autopipe.configs.configuration import (
    Configuration,
    build,
    dump_configuration,
    merged_configuration,
)
from autopipe.configs.yaml_source import read_setting, read_text
from autopipe.ir.codec import decode, encode
from autopipe.ir.errors import ConfigurationError, RenamedWarning
from autopipe.ir.files import JsonRecord
from autopipe.ir.plan import Breakdown, CostCoverage
from autopipe.passes.placement.grid import Grid
from autopipe.passes.placement.handcrafted import Handcrafted
from autopipe.passes.placement.tepdist.strategy import TePDist
from autopipe.passes.registry import FORMER_STRATEGIES, strategy_class
from tests.cli.command_line import CommandLine
from tests.configs.texts import parse_configuration


def strategy_of(configuration: Configuration) -> object:
    return build(configuration.strategy, strategy_class(configuration.strategy.name), "strategy")


@pytest.mark.parametrize(
    ("text", "stage"), [("true", 1), ("false", 0), ("null", None)], ids=["1", "0", "null"]
)
def test_optimizer_shard_is_zero_stage(text: str, stage: int | None) -> None:
    with pytest.warns(RenamedWarning, match=r"c\.yaml:2: optimizer\.shard is deprecated, write"):
        found = parse_configuration(f"optimizer:\n  shard: {text}\n", "c.yaml")
    assert found.optimizer.zero_stage == stage
    assert found.optimizer.for_problem().shard is (stage == 1)
    assert "shard" not in dump_configuration(found)


def test_cluster_straddle_is_allow_mixed_stages() -> None:
    with pytest.warns(RenamedWarning, match="cluster.straddle is deprecated"):
        found = parse_configuration("cluster: {straddle: true}", "c.yaml")
    assert found.cluster.allow_mixed_stages


@pytest.mark.parametrize(
    ("text", "expected", "warning"),
    [
        ("name: grid, chunks: 2", Grid(stages_per_rank=2), "write strategy.stages_per_rank"),
        ("name: grid, wave: true", Grid(style="v"), "write strategy.style: v"),
        ("name: grid, wave: false", Grid(), "write strategy.style: loop"),
        ("name: tepdist, unbalance: 0.2", TePDist(imbalance_tolerance=0.2), "imbalance_tolerance"),
        ("name: expert, tensor: 2", Handcrafted(2), "strategy expert is deprecated"),
    ],
)
def test_options_and_names_of_strategies(text: str, expected: object, warning: str) -> None:
    found = parse_configuration(f"strategy: {{{text}}}", "c.yaml")
    with pytest.warns(RenamedWarning, match=warning) as caught:
        assert strategy_of(found) == expected
    assert len(caught) == 1


def test_a_former_and_a_present_key_exclude_each_other() -> None:
    text = "optimizer:\n  shard: true\n  zero_stage: 0\n"
    with pytest.raises(ConfigurationError) as caught:
        parse_configuration(text, "c.yaml")
    expected = "c.yaml:2: optimizer.shard is the former name of optimizer.zero_stage, and both keys"
    assert f"{expected} are set" in str(caught.value)
    options = parse_configuration("strategy: {name: grid, chunks: 2, stages_per_rank: 3}", "c.yaml")
    with pytest.raises(ConfigurationError, match=r"strategy\.chunks is the former name"):
        strategy_of(options)


@pytest.mark.parametrize("former_is_flag", [False, True])
@pytest.mark.filterwarnings("ignore::autopipe.ir.errors.RenamedWarning")
def test_a_flag_overrides_a_file_whichever_has_the_former_key(former_is_flag: bool) -> None:
    present = {("strategy", "stages_per_rank"): "3", ("optimizer", "zero_stage"): "1"}
    former = {("strategy", "chunks"): "2", ("optimizer", "shard"): "false"}
    file, flags = (present, former) if former_is_flag else (former, present)
    (_, count_key), (_, stage_key) = file
    count, stage = file.values()
    text = f"strategy: {{name: grid, {count_key}: {count}}}\noptimizer: {{{stage_key}: {stage}}}\n"
    settings = [
        (key, read_setting(value, f"--set {'.'.join(key)}")) for key, value in flags.items()
    ]
    found = merged_configuration([read_text(text, "c.yaml")], settings)
    expected = (Grid(stages_per_rank=2), 0) if former_is_flag else (Grid(stages_per_rank=3), 1)
    assert (strategy_of(found), found.optimizer.zero_stage) == expected


@pytest.mark.parametrize("name", FORMER_STRATEGIES)
def test_a_former_strategy_is_the_present_one(name: str) -> None:
    with pytest.warns(RenamedWarning, match=f"strategy {name} is deprecated, write"):
        found = strategy_class(name)
    assert found is strategy_class(FORMER_STRATEGIES[name])


def test_documents_are_read_with_former_keys_and_without_a_warning() -> None:
    parts = Breakdown(0.25, exposed_p2p_s=0.1, redundant_compute_s=0.2, launch_overhead_s=0.3)
    form = encode(parts)
    for present, former in (
        ("exposed_p2p_s", "messages_s"),
        ("redundant_compute_s", "repetition_s"),
        ("launch_overhead_s", "launches_s"),
    ):
        form[former] = form.pop(present)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode(JsonRecord(form, "plan.json"), Breakdown) == parts
        found = decode(JsonRecord({"measured": 1, "judged": 2}, "plan.json"), CostCoverage)
    assert found == CostCoverage(1, 2)


def test_commands_print_one_line_per_former_name(command_line: CommandLine) -> None:
    Path("c.yaml").write_text("optimizer:\n  shard: true\nseed: 1\n")
    shown = command_line.done("config", "show", "--config", "c.yaml", "--json")
    assert shown.err == (
        "warning: c.yaml:2: optimizer.shard is deprecated, write optimizer.zero_stage: 1\n"
    )


def test_units_is_a_former_flag(command_line: CommandLine) -> None:
    words = ("schedule", "--shape", "v", "--devices", 2, "--schedule", "1f1b")
    shown = command_line.done(*words, "--units", 3, "--json")
    assert shown.err == "warning: --units is deprecated, write --micro-batches 3\n"
    assert '"units": 3' in shown.out
    command_line.refuses(2, (*words, "--units", 3, "--micro-batches", 3), "remove --units")
