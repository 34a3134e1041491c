"""Validation on the ranks that train: ONNX Runtime's loss over the same samples, the best state
kept, an early end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

from autopipe.backends.onnxruntime import ReferenceModel
from autopipe.backends.torch.checkpoint import committed_steps
from autopipe.backends.torch.launcher import read_evaluations, read_reports
from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.cli.main import main
from autopipe.passes.frontend import read_model
from tests.distributed.support.dropping import GPT, save_with_batch_statistics, save_with_dropout
from tests.distributed.support.pool import Pools

pytestmark = pytest.mark.distributed

TWO_PIPELINES = (
    "[{match: '*', stage: 0, devices: [0], pipeline: 0}, {match: '*', stage: 0, devices: [1], "
    "pipeline: 1}]"
)
"""The whole model on either device, which take micro-batches in turn."""
HELD_OUT = 21
"""Samples to validate on: two whole batches of eight, and five, the last micro-batch of one."""


def save_text(path: Path, samples: int, seed: int) -> dict[str, np.ndarray]:
    """Sequences that count upwards from a number of their own."""
    vocabulary = int(GPT["vocabulary"])
    length = int(GPT["sequence"])
    text = np.random.default_rng(seed).integers(0, vocabulary, (samples, 1)) + np.arange(length + 1)
    found = {"tokens": text[:, :-1] % vocabulary, "labels": text[:, 1:] % vocabulary}
    np.savez(path, **found)  # type: ignore[arg-type]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two programs for a GPT with Dropout, in two stages and split over samples, with data to train
    and validate on.
    """
    folder = tmp_path_factory.mktemp("evaluation")
    save_with_dropout(folder / "model.onnx", weights="random")
    save_text(folder / "data.npz", 64, 0)
    save_text(folder / "held_out.npz", HELD_OUT, 1)
    size = ("--batch-size", 8, "--micro-batches", 4)
    evaluated = ("--set", f"eval={{data: {folder / 'held_out.npz'}, interval: 2}}")
    for name, strategy in (("stages", "pipedream"), ("samples", "data_parallel")):
        words = (
            folder / "model.onnx",
            "--gpus",
            2,
            *size,
            "--strategy",
            strategy,
            "--set",
            "optimizer={name: sgd, lr: 0.2}",
        )
        assert (
            main(["plan", *map(str, words), *map(str, evaluated), "-o", str(folder / name), "-q"])
            == 0
        )
        assert main(["codegen", str(folder / name), "-q"]) == 0
    return folder


def run(
    pools: Pools, folder: Path, name: str, *flags: object
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The reports of a launch's steps and of its validations."""
    report = folder / "report.jsonl"
    report.unlink(missing_ok=True)
    flags = ("--device", "cpu", "--data", folder / "data.npz", "--report", report, *flags)
    pools.of(2).run(folder / name / "program", *flags)
    return read_reports(report), read_evaluations(report)


def test_the_best_state_has_the_validation_loss(pools: Pools, folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    steps, found = run(pools, folder, "stages", "--steps", 5, "--checkpoint", saved)
    assert [each["step"] for each in steps] == list(range(5))
    assert [each["step"] for each in found] == [1, 3, 4]
    assert {each["eval_samples"] for each in found} == {HELD_OUT}
    best = min(found, key=lambda each: each["eval_loss"])
    assert found[-1]["best_step"] == best["step"] and found[-1]["best_loss"] == best["eval_loss"]
    assert committed_steps(saved / "best") == [best["step"] + 1]
    exported = tmp_path / "best.onnx"
    assert main(["checkpoint", "export", str(saved / "best"), "-o", str(exported), "-q"]) == 0
    model = ReferenceModel(exported, {})
    loss = model.run(dict(np.load(folder / "held_out.npz")))[
        str(read_manifest(folder / "stages" / "program").loss)
    ]
    assert best["eval_loss"] == pytest.approx(float(loss), rel=1e-5)
    without, _ = run(pools, folder, "stages", "--steps", 5, "--eval-interval", 5)
    assert [each["loss"] for each in without] == [each["loss"] for each in steps], (
        "validating changed the training"
    )
    _, apart = run(pools, folder, "samples", "--steps", 2, "--blocking")
    assert apart[0]["eval_loss"] == pytest.approx(found[0]["eval_loss"], rel=1e-5)


def test_a_run_ends_early_and_knows_its_best_when_it_goes_on(
    pools: Pools, folder: Path, tmp_path: Path
) -> None:
    program = folder / "stages" / "program" / "manifest.json"
    before = program.read_text(encoding="utf-8")
    manifest = json.loads(before)
    manifest["eval"] |= {"patience": 2, "interval": 1}
    manifest["optimizer"]["lr"] = 0.0  # So that no loss is lower than the first.
    program.write_text(json.dumps(manifest), encoding="utf-8")
    try:
        flags = ("--checkpoint", tmp_path / "saved")
        _, found = run(pools, folder, "stages", "--steps", 2, *flags)
        assert [each["best_step"] for each in found] == [0, 0]
        steps, found = run(pools, folder, "stages", "--steps", 9, *flags, "--resume")
    finally:
        program.write_text(before, encoding="utf-8")
    assert [each["step"] for each in steps] == [each["step"] for each in found] == [2]
    assert found[0]["best_step"] == 0
    assert committed_steps(tmp_path / "saved") == [2, 3] and committed_steps(
        tmp_path / "saved" / "best"
    ) == [1]


def test_batch_statistics_move_alike_on_any_number_of_ranks(pools: Pools, tmp_path: Path) -> None:
    """A validation normalises by the running ones, which an exported state has too."""
    model = tmp_path / "model.onnx"
    save_with_batch_statistics(model, weights="random")
    inputs = read_model(model, batch=HELD_OUT).graph.inputs
    draw = np.random.default_rng(0)
    held_out = {
        each.name: draw.normal(size=each.shape).astype(np.float32)
        if each.dtype.is_floating
        else draw.integers(0, 12, each.shape)
        for each in inputs
    }
    np.savez(tmp_path / "held_out.npz", **held_out)  # type: ignore[arg-type]
    size = ("--batch-size", 8, "--micro-batches", 2)
    found = {}
    for name, words in {
        "stages": ("--gpus", 2, "--strategy", "pipedream"),
        "samples": ("--gpus", 2, "--strategy", "data_parallel"),
        "pipelines": ("--gpus", 2, "--strategy", "manual", "--set", f"constraints={TWO_PIPELINES}"),
        "one": ("--gpus", 1, "--strategy", "data_parallel"),
    }.items():
        words = (
            "plan",
            model,
            *words,
            *size,
            "--set",
            "optimizer={name: sgd, lr: 0.001}",
            "-o",
            tmp_path / name,
            "-q",
        )
        assert main([*map(str, words)]) == 0
        assert main(["codegen", str(tmp_path / name), "-q"]) == 0
        program = tmp_path / name / "program"
        report = tmp_path / f"{name}.jsonl"
        saved = tmp_path / f"{name}.saved"
        data = ("--data", tmp_path / "held_out.npz", "--eval-data", tmp_path / "held_out.npz")
        flags = ("--device", "cpu", "--steps", 2, "--report", report, "--checkpoint", saved)
        pools.of(1 if name == "one" else 2).run(program, *data, *flags)
        (found[name],) = (each["eval_loss"] for each in read_evaluations(report))
        exported = tmp_path / f"{name}.onnx"
        assert main(["checkpoint", "export", str(saved / "best"), "-o", str(exported), "-q"]) == 0
        loss = ReferenceModel(exported, {}, train=False).run(held_out)[
            str(read_manifest(program).loss)
        ]
        assert found[name] == pytest.approx(float(loss), rel=1e-5)
    for name, loss in found.items():
        assert loss == pytest.approx(found["one"], rel=1e-5), name
    moved = {
        each.name: onnx.numpy_helper.to_array(each)
        for each in onnx.load(str(exported)).graph.initializer
    }
    still = {
        each.name: onnx.numpy_helper.to_array(each)
        for each in onnx.load(str(model)).graph.initializer
    }
    means = [
        each.input[3]
        for each in onnx.load(str(model)).graph.node
        if each.op_type == "BatchNormalization"
    ]
    assert means and not any(np.allclose(moved[name], still[name]) for name in means)
