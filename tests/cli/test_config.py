"""`autopipe config` from its arguments to what it prints."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner, Result

from autopipe.cli.config import config
from autopipe.configs.cluster import cluster_names, cluster_preset, read_cluster
from autopipe.ir.errors import ConfigurationError
from autopipe.passes import registry
from tests.cli.command_line import CommandLine
from tests.configs.texts import parse_configuration


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(config, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_show_prints_a_configuration_that_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("batch_size: 8\noptimizer: {lr: 0.5}\n")
    flags = ("--gpus", "4", "--cluster", "summit", "--dim", "seq=7", "--set", "seed=3")
    arguments = ("show", "--config", str(path), *flags)
    read = parse_configuration(run(*arguments).stdout, "shown")
    assert (read.batch_size, read.optimizer.lr, read.gpus, read.cluster.preset) == (
        8,
        0.5,
        4,
        "summit",
    )
    assert (read.model.dims, read.seed) == ((("seq", 7),), 3)
    as_json = json.loads(run(*arguments, "--json").stdout)
    assert (as_json["gpus"], as_json["model"]["dims"]) == (4, {"seq": 7})


def test_show_shows_long_values_whole() -> None:
    match = "re:" + "x" * 300
    shown = run("show", "--set", f"constraints=[{{match: '{match}', stage: 0}}]").stdout
    assert parse_configuration(shown, "shown").constraints[0].match == match


def test_show_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--gpus 0: gpus is 0"):
        run("show", "--gpus", "0")
    with pytest.raises(ConfigurationError, match="the file cannot be read"):
        run("show", "--config", str(tmp_path / "absent.yaml"))


@dataclass(frozen=True, slots=True)
class Search:
    """Stands for a strategy or a scheduler."""

    steps: int = 1


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A strategy and a scheduler called `search`, and no other."""
    entry = {"search": f"{__name__}:Search"}
    monkeypatch.setitem(sys.modules, __name__, ModuleType(__name__))
    monkeypatch.setattr(sys.modules[__name__], "Search", Search, raising=False)
    monkeypatch.setattr(registry, "STRATEGIES", entry)
    monkeypatch.setattr(registry, "SCHEDULERS", entry)


CHOSEN = "strategy: {name: search, steps: 2}\nschedule: {name: search}\n"


@pytest.mark.usefixtures("registered")
def test_check_takes_configurations_and_clusters(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(CHOSEN + "cluster: {preset: summit}\ngpus: 8\n")
    assert "a valid configuration (8 devices of summit)" in run("check", str(path)).stdout
    cluster = Path(__file__).parents[2] / "autopipe/configs/clusters/h200.yaml"
    answer = json.loads(run("check", str(cluster), "--json").stdout)
    assert answer == {
        "file": str(cluster),
        "kind": "cluster",
        "valid": True,
        "cluster": "h200",
        "devices": 8,
    }
    path.write_text("seed: 1\ngpuz: 8\n")
    with pytest.raises(ConfigurationError) as caught:
        run("check", str(path))
    assert str(caught.value) == f"{path}:2: unknown key 'gpuz' (did you mean 'gpus'?)"


@pytest.mark.usefixtures("registered")
def test_check_refuses_what_a_strategy_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(CHOSEN.replace("steps", "step"))
    with pytest.raises(ConfigurationError) as caught:
        run("check", str(path))
    assert str(caught.value) == f"{path}:1: unknown key 'step' in strategy (did you mean 'steps'?)"
    path.write_text(CHOSEN.replace("{name: search}", "{name: serch}"))
    with pytest.raises(
        ConfigurationError, match=r"schedule 'serch' is unknown \(did you mean search\?\)"
    ):
        run("check", str(path))


def test_clusters_lists_the_presets() -> None:
    shown = run("clusters").stdout
    assert all(name in shown for name in ("summit", "a100-80gb", "cpu-local"))
    listed = {
        entry["preset"]: entry for entry in json.loads(run("clusters", "--json").stdout)["clusters"]
    }
    assert listed["h200"]["memory_bytes"] == 141 * 10**9
    assert listed["summit"]["levels"][0]["size"] == 4


def test_help_names_every_flag() -> None:
    text = run("show", "--help").stdout
    assert all(
        flag in text
        for flag in ("--config", "--batch-size", "--memory-limit", "--dim", "--set", "--json")
    )


@pytest.mark.parametrize("name", cluster_names())
def test_a_preset_is_printed_as_a_file_that_is_read(command_line: CommandLine, name: str) -> None:
    Path("cluster.yaml").write_text(
        command_line.done("config", "clusters", name).out, encoding="utf-8"
    )
    assert read_cluster("cluster.yaml") == cluster_preset(name)
    printed = json.loads(command_line.done("config", "clusters", name, "--json").out)
    assert printed["name"] == cluster_preset(name).name


def test_a_preset_that_is_none(command_line: CommandLine) -> None:
    command_line.refuses(
        2, ("config", "clusters", "h100"), "cluster preset 'h100' is unknown", "h100-80gb"
    )


@pytest.mark.parametrize(
    ("command", "names", "option"),
    [
        ("strategies", registry.strategy_names(), ("grid", "strategy.pipeline")),
        ("schedules", registry.scheduler_names(), ("kfkb", "schedule.k")),
    ],
)
def test_choices_are_listed_with_their_options(
    command_line: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    names: tuple[str, ...],
    option: tuple[str, str],
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    listed = json.loads(command_line.done("config", command, "--json").out)["choices"]
    assert tuple(each["name"] for each in listed) == names
    assert all(each["summary"] for each in listed)
    for name in names:
        shown = command_line.done("config", command, name).out
        for each in next(entry["options"] for entry in listed if entry["name"] == name):
            assert each["key"] in shown and each["meaning"], each["key"]
    name, key = option
    assert key in [
        each["key"] for entry in listed if entry["name"] == name for each in entry["options"]
    ]


def test_a_strategy_that_is_none(command_line: CommandLine) -> None:
    command_line.refuses(2, ("config", "strategies", "grit"), "'grit'", "did you mean grid")
