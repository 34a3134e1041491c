"""`autopipe zoo` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner

from autopipe.cli.zoo import zoo
from autopipe.configs.zoo import MODELS
from autopipe.ir.errors import ConfigurationError


def test_list_shows_every_model_with_its_sizes_and_settings() -> None:
    shown = json.loads(run("list", "--json"))
    assert [entry["name"] for entry in shown["models"]] == list(MODELS)
    [gpt] = [entry for entry in shown["models"] if entry["name"] == "gpt"]
    heads = gpt["settings"]["heads"]
    assert "11b" in gpt["sizes"]
    assert (heads["default"], heads["meaning"]) == (4, "Attention heads of a layer.")
    text = run("list")
    assert all(name in text for name in MODELS)


def test_build_writes_what_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    words = ["--set", "layers=1", "--set", "loss=true", "--set", "batch=8"]
    shown = json.loads(run("build", "gpt", "-o", str(path), *words, "--json"))
    model = onnx.load(path)
    assert (shown["path"], shown["inputs"], shown["outputs"]) == (
        str(path),
        ["tokens", "labels"],
        ["loss"],
    )
    assert shown["nodes"] == len(model.graph.node)
    assert shown["parameters"] == sum(
        onnx.numpy_helper.to_array(each).size for each in model.graph.initializer
    )
    assert shown["settings"]["layers"] == 1 and shown["settings"]["batch"] == 8


def test_build_names_the_file_after_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "two-branch.onnx" in run("build", "two-branch", "--set", "weights=none")
    assert [path.name for path in tmp_path.iterdir()] == ["two-branch.onnx"]


def test_a_wrong_word_is_a_configuration_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        zoo, ["build", "gpt", "-o", str(tmp_path / "gpt.onnx"), "--set", "layer=2"]
    )
    assert isinstance(result.exception, ConfigurationError) and "layers" in result.exception.hint
    assert not list(tmp_path.iterdir())


def run(*words: str) -> str:
    result = CliRunner().invoke(zoo, list(words), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout
