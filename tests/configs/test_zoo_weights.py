"""Files of the zoo: equal for equal settings, weights inside or beside, never half-written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from autopipe.configs import zoo
from autopipe.configs.zoo import builder as weights
from autopipe.configs.zoo.builder import ONES, ZEROS, Parameter, normal, uniform
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Initializer


def test_same_settings_give_the_same_bytes(tmp_path: Path) -> None:
    for name in zoo.MODELS:
        for path in ("first", "second"):
            zoo.build(zoo.configure(name, {"loss": True})).save(tmp_path / path)
        assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes(), name


def test_another_seed_gives_other_weights() -> None:
    drawn = [
        zoo.build(zoo.configure("gpt", {"seed": seed})).to_proto().graph.initializer
        for seed in (0, 1)
    ]
    changed = [
        first.name
        for first, second in zip(*drawn, strict=True)
        if first.raw_data != second.raw_data
    ]
    assert (
        "layers.0.attention.query.weight" in changed
        and "layers.0.attention.query.bias" not in changed
    )


def test_weights_beside_the_file_are_those_inside(tmp_path: Path) -> None:
    built = zoo.build(zoo.configure("gpt"))
    written: list[int] = []
    built.save(tmp_path / "beside.onnx", written.append, inline_limit=1)
    built.save(tmp_path / "inside.onnx")
    assert sum(written) == built.data_bytes
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "beside.onnx",
        "beside.onnx.data",
        "inside.onnx",
    ]
    onnx.checker.check_model(str(tmp_path / "beside.onnx"), full_check=True)
    tokens = {"tokens": np.arange(32)[None]}
    results = []
    for name in ("beside", "inside"):
        session = onnxruntime.InferenceSession(
            tmp_path / f"{name}.onnx", providers=["CPUExecutionProvider"]
        )
        results.append(session.run(None, tokens)[0])
    np.testing.assert_array_equal(*results)


def test_without_weights_the_file_is_small(tmp_path: Path) -> None:
    zoo.build(zoo.configure("llama", {"size": "70b", "weights": "none"})).save(
        tmp_path / "llama.onnx"
    )
    assert (tmp_path / "llama.onnx").stat().st_size < 2_000_000
    assert [path.name for path in tmp_path.iterdir()] == ["llama.onnx"]


@pytest.mark.parametrize("initializer", [normal(0.02), uniform(0.5), ZEROS, ONES])
def test_values_follow_the_initializer(initializer: Initializer) -> None:
    values = np.concatenate(
        list(weights.initial_values(Parameter("w", (400, 500), initializer), seed=3))
    )
    expected = {
        "normal": (0.0, 0.02),
        "uniform": (0.0, 0.5 / np.sqrt(3)),
        "zeros": (0.0, 0.0),
        "ones": (1.0, 0.0),
    }[initializer.scheme]
    assert values.dtype == np.float32 and values.shape == (200_000,)
    assert (values.mean(), values.std()) == pytest.approx(expected, abs=2e-3)
    if initializer.scheme == "uniform":
        assert np.abs(values).max() <= 0.5


def test_pieces_and_parameters_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PIECE_ELEMENTS", 1000)

    def draw(name: str, seed: int) -> list[np.ndarray]:
        return list(weights.initial_values(Parameter(name, (2500,), normal(1.0)), seed))

    first, second, last = draw("w", 0)
    assert (len(first), len(second), len(last)) == (1000, 1000, 500)
    pieces = [first[:500], second[:500], last, draw("v", 0)[0][:500], draw("w", 1)[0][:500]]
    correlation = np.corrcoef(np.stack(pieces)) - np.eye(5)
    assert np.abs(correlation).max() < 0.2


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gpt.onnx"
    path.write_text("old")
    (tmp_path / "gpt.onnx.data").write_text("old data")

    def full_disk(parameter: Parameter, seed: int) -> Iterator[np.ndarray]:
        yield np.zeros(min(4, parameter.size), dtype=np.float32)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "initial_values", full_disk)
    with pytest.raises(ConfigurationError, match="No space left"):
        zoo.build(zoo.configure("gpt")).save(path, inline_limit=1, force=True)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "gpt.onnx": "old",
        "gpt.onnx.data": "old data",
    }


def test_a_missing_folder_and_a_full_disk_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the folder of the output file does not exist"):
        zoo.build(zoo.configure("gpt")).save(tmp_path / "nowhere" / "gpt.onnx")
    huge = zoo.build(zoo.configure("gpt", {"size": "175b", "layers": 1_000, "hidden": 96_000}))
    with pytest.raises(ConfigurationError, match=r"the weights require .* GiB") as raised:
        huge.save(tmp_path / "gpt.onnx")
    assert "weights=none" in str(raised.value)
    assert not list(tmp_path.iterdir())
