"""What messages take of a rank's time comes from the model's own pipeline: how that is cut, and
what is read off it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopipe.api import exchange_costs, model_programs, profile_samples
from autopipe.api.exchange_costs import exchanges_of, in_pipeline
from autopipe.api.model_programs import Pipeline, write_pipeline
from autopipe.api.profile_samples import samples_of
from autopipe.api.synthetic_programs import MESSAGE_BYTES
from autopipe.backends.torch.profiler.communication import measure_period
from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.configs.zoo import build, configure
from autopipe.ir.cluster import Device
from autopipe.ir.measured_costs import (
    AffineTime,
    DeviceCosts,
    ExchangeCost,
    TaskCosts,
    TensorCosts,
    Timing,
)
from autopipe.ir.problem import Mode
from autopipe.passes.cost.roofline import posting_seconds
from autopipe.passes.frontend import Model, read_model

SETTINGS = {
    "layers": "4",
    "hidden": "32",
    "vocabulary": "64",
    "sequence": "8",
    "loss": "true",
    "weights": "random",
}
NOTHING = TensorCosts(0.0, 0.0)
POST = ExchangeCost("post", 2, AffineTime(1.0, 1e-3), ())
FOLLOW = ExchangeCost("follow", 2, AffineTime(3.0 - MESSAGE_BYTES * 1e-6, 1e-6), ())
SEND = ExchangeCost("send", 2, AffineTime(2.0, 1e-6), ())


@pytest.fixture
def model(tmp_path: Path) -> Model:
    build(configure("rnnlm", SETTINGS)).save(tmp_path / "rnnlm.onnx")
    return read_model(tmp_path / "rnnlm.onnx", batch=2)


def known(model: Model) -> DeviceCosts:
    """Each operation takes 1 s forward and 2 s backward, and each task as much besides."""
    one = Timing(1.0, 0.0, 5)
    two = Timing(2.0, 0.0, 5)
    operations = {each.operation: each.cost(one, two) for each in samples_of(model, "fp32")}
    tasks = TaskCosts(1.0, 2.0, 0.0, 0.0, NOTHING, NOTHING, (NOTHING,) * 3)
    return DeviceCosts("this", ("by hand",), operations=tuple(operations.values()), tasks=tasks)


def test_the_model_is_cut_where_both_halves_take_equally_long(model: Model, tmp_path: Path) -> None:
    count = len(list(samples_of(model, "fp32")))
    found = write_pipeline(model, "fp32", known(model), tmp_path / "program")
    assert found is not None
    manifest = read_manifest(found.folder)
    assert (manifest.world_size, manifest.micro_batches, len(manifest.stages)) == (2, 8, 2)
    assert manifest.optimizer["lr"] == 0.0, "what is timed for long shall not diverge"
    assert found.messages == len(manifest.channels)
    assert found.period_s == pytest.approx(3.0 * (-(-count // 2) + 1))
    assert found.size_bytes > 0


def test_the_predicted_period_has_messages_on_their_way_but_not_their_ends(
    model: Model, tmp_path: Path
) -> None:
    count = len(list(samples_of(model, "fp32")))
    slow = replace(SEND, fit=AffineTime(30.0, 1e-12)), replace(POST, fit=AffineTime(1000.0, 0.0))
    found = write_pipeline(
        model, "fp32", replace(known(model), exchanges=slow), tmp_path / "program"
    )
    assert found is not None
    # Two micro-batches are under way between the stages: a message there and one back for each.
    assert found.period_s == pytest.approx(3.0 * (count / 2 + 1) + 30.0)


def test_what_is_not_trained_or_too_large_or_in_one_piece_makes_no_pipeline(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = known(model)
    folder = tmp_path / "program"
    assert write_pipeline(replace(model, mode=Mode.INFER), "fp32", costs, folder) is None
    monkeypatch.setattr(model_programs, "_PIPELINE_RANKS", 1000)
    assert write_pipeline(model, "fp32", costs, folder) is None
    monkeypatch.setattr(profile_samples, "_MAX_MODEL_BYTES", 1000)
    assert write_pipeline(model, "fp32", costs, folder) is None
    assert not folder.exists()


@pytest.mark.parametrize(
    ("period", "posting"), [(100.0, 10.0), (93.0, 6.5), (50.0, 2 * FOLLOW.fit.fixed_s)]
)
def test_half_of_what_a_micro_batch_takes_longer_is_an_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, period: float, posting: float
) -> None:
    monkeypatch.setattr(exchange_costs, "measure_period", lambda *_: period)
    made = Pipeline(tmp_path, period_s=80.0, messages=3, size_bytes=1000)
    send, post, follow = in_pipeline((SEND, POST, FOLLOW), made, "cpu")
    assert (send, follow) == (SEND, FOLLOW)
    assert post.fit.fixed_s >= 0 and 0 <= post.fit.per_byte_s <= POST.fit.per_byte_s
    # As a plan of the same pipeline counts them.
    device = Device("cpu", 1, (("fp32", 1.0),), 1.0, 0.0, (), post=post.fit, follow=follow.fit)
    assert posting_seconds(device, made.messages, made.size_bytes) == pytest.approx(posting)


def test_small_pipelines_tell_what_the_ends_of_any_messages_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange_costs, "measure_exchanges", lambda *_: (SEND, POST))
    monkeypatch.setattr(exchange_costs, "measure_post_overhead", lambda *_: (700.0, 3.0))
    send, post, follow = exchanges_of(2, "cpu", 1.0)
    assert (send, post.kind, follow.kind) == (SEND, "post", "follow")
    assert post.fit.seconds(MESSAGE_BYTES) == pytest.approx(700.0)
    assert follow.fit.seconds(MESSAGE_BYTES) == pytest.approx(3.0)


@pytest.mark.distributed
def test_the_period_of_a_pipeline(here: None, model: Model, tmp_path: Path) -> None:
    found = write_pipeline(model, "fp32", known(model), tmp_path / "program")
    assert found is not None
    assert 0 < measure_period(found.folder, "cpu") < 1.0
