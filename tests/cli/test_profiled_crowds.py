"""How much longer ranks take that share processors, measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.cli.profiling import crowds, timed
from autopipe.cli.profiling.crowds import measure_oversubscription
from autopipe.configs.zoo import build, configure
from autopipe.ir.costs import Oversubscription
from autopipe.ir.errors import LaunchError
from autopipe.passes.frontend import Model, read_model

SETTINGS = {"hidden": "16", "vocabulary": "32", "sequence": "4", "loss": "true", "weights": "random"}


@pytest.fixture
def model(tmp_path: Path) -> Model:
    build(configure("rnnlm", SETTINGS)).save(tmp_path / "rnnlm.onnx")
    return read_model(tmp_path / "rnnlm.onnx", batch=2)


@pytest.mark.distributed
def test_the_model_runs_in_as_many_processes_as_ranks(model: Model, tmp_path: Path) -> None:
    found = measure_oversubscription(model, "fp32", 1, 3, tmp_path / "program", 0.1)
    assert [each.ranks for each in found] == [2, 3]
    assert 1.0 <= found[0].slowdown <= found[1].slowdown < 100


def test_slowdowns_are_of_the_time_with_a_processor_each_and_never_fall(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def numbers(_worker: str, _program: Path, setting: str, _seconds: float) -> list[float]:
        asked.append(setting)
        return [2.0, 1.9, 3.0, 2.5]

    monkeypatch.setattr(crowds, "numbers_of", numbers)
    found = measure_oversubscription(model, "fp32", 2, 12, tmp_path / "program", 1.0)
    assert asked == ["2,4,8,12"]
    assert found == (Oversubscription(4, 1.0), Oversubscription(8, 1.5), Oversubscription(12, 1.5))


def test_nothing_is_measured_where_it_need_not_or_cannot_be(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> list[float]:
        raise LaunchError("no")

    monkeypatch.setattr(crowds, "numbers_of", lambda *_: [1.0, 2.0])
    words = tmp_path / "program", 1.0
    assert measure_oversubscription(model, "fp32", 2, 2, *words) == ()
    assert measure_oversubscription(model, "fp32", 2, 4, *words) == (Oversubscription(4, 2.0),)
    monkeypatch.setattr(timed, "_MOST_BYTES", 1000)
    assert measure_oversubscription(model, "fp32", 2, 4, *words) == ()
    monkeypatch.setattr(timed, "_MOST_BYTES", 2**32)
    monkeypatch.setattr(crowds, "numbers_of", fails)
    assert measure_oversubscription(model, "fp32", 2, 4, *words) == ()
