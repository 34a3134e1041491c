"""The run of the full model corrects the measured times of single operators."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopipe.api import model_correction, profile_samples
from autopipe.api.model_correction import ModelCorrection, measure_whole
from autopipe.api.profile_samples import samples_of
from autopipe.backends.torch.profiler.operators import TaskStartOverhead
from autopipe.configs.zoo import build, configure
from autopipe.ir.measured_costs import OperationCost, TaskCosts, TensorCosts, Timing
from autopipe.passes.frontend import Model, read_model

SETTINGS = {
    "hidden": "16",
    "vocabulary": "32",
    "sequence": "4",
    "loss": "true",
    "weights": "random",
}
NOTHING = TensorCosts(0.0, 0.0)
TASKS = TaskCosts(0.0, 0.0, 0.0, 0.0, NOTHING, NOTHING, (NOTHING,) * 3)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    build(configure("rnnlm", SETTINGS)).save(tmp_path / "rnnlm.onnx")
    return read_model(tmp_path / "rnnlm.onnx", batch=2)


def costs(model: Model, seconds: float) -> list[OperationCost]:
    """All operations of the model, as if each took so long forward and twice that backward."""
    timing = Timing(seconds, 0.5, 7)
    return [
        each.cost(timing, replace(timing, seconds=2 * seconds))
        for each in samples_of(model, "fp32")
    ]


@pytest.mark.distributed
def test_the_factor_is_that_of_the_whole_model_to_its_operators(
    model: Model, tmp_path: Path
) -> None:
    known = costs(model, 1.0)
    count = len(list(samples_of(model, "fp32")))
    found = measure_whole(
        model, "fp32", known, TASKS, TaskStartOverhead(), "cpu", tmp_path / "program", 0.1
    )
    assert found is not None
    assert 0 < found.forward < 0.5 / count
    assert 0 < found.backward < 0.5 / count
    assert 0 < found.forward_s < 0.5
    assert 0 < found.backward_s < 0.5
    again = measure_whole(
        model, "fp32", known, TASKS, TaskStartOverhead(1.0, 1.0), "cpu", tmp_path / "again", 0.1
    )
    assert again is not None
    assert 0 < again.forward < found.forward
    assert 0 < again.backward < found.backward


def test_starts_are_no_part_of_operators_and_not_most_of_a_small_model(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_correction, "measure_in_process", lambda *_: (10.0, 10.0, 0.25, 0.5))
    known = costs(model, 1.0)
    count = len(list(samples_of(model, "fp32")))
    words = "cpu", tmp_path / "program", 0.1
    found = measure_whole(model, "fp32", known, TASKS, TaskStartOverhead(1.0, 2.0), *words)
    assert found == ModelCorrection(
        pytest.approx(9.0 / count), pytest.approx(8.0 / (2 * count)), 1.25, 2.5
    )
    small = measure_whole(model, "fp32", known, TASKS, TaskStartOverhead(9.0, 7.0), *words)
    assert small == ModelCorrection(
        pytest.approx(4.0 / count), pytest.approx(4.0 / (2 * count)), 6.25, 6.5
    )
    assert found.tasks(TASKS) == replace(TASKS, forward_s=1.25, backward_s=2.5)


def test_what_was_not_measured_or_is_too_large_is_not_compared(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_correction, "measure_in_process", lambda *_: (1.0, 1.0, 0.0, 0.0))
    known = costs(model, 1.0)
    words = TASKS, TaskStartOverhead(), "cpu", tmp_path / "program", 0.1
    assert measure_whole(model, "fp32", known, *words) is not None
    some = [each for each in known if each.operation != known[0].operation]
    assert measure_whole(model, "fp32", some, *words) is None
    monkeypatch.setattr(profile_samples, "_MAX_MODEL_BYTES", 1000)
    assert measure_whole(model, "fp32", known, *words) is None


def test_adding_up_gradients_is_no_part_of_operators(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_correction, "measure_in_process", lambda *_: (10.0, 10.0, 0.25, 0.5))
    known = costs(model, 1.0)
    count = len(list(samples_of(model, "fp32")))
    tensors = sum(each.trainable for each in model.graph.parameters)
    tasks = replace(TASKS, accumulate=TensorCosts(4.0 / tensors, 0.0))
    found = measure_whole(
        model, "fp32", known, tasks, TaskStartOverhead(), "cpu", tmp_path / "program", 0.1
    )
    assert found is not None
    assert found.forward == pytest.approx(10.0 / count)
    assert found.backward == pytest.approx((10.0 - 3.0) / (2 * count))


def test_times_are_multiplied_and_the_rest_stays(model: Model) -> None:
    (first, *_) = costs(model, 1.0)
    found = ModelCorrection(0.5, 3.0).of(first)
    assert found == replace(first, forward=Timing(0.5, 0.5, 7), backward=Timing(6.0, 0.5, 7))
    assert ModelCorrection(0.5, 3.0).of(replace(first, backward=None)).backward is None
