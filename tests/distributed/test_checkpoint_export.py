"""Trained, saved, exported: ONNX Runtime computes on the exported file the loss that the ranks
compute next.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest

from autopipe.backends.onnxruntime import ReferenceModel
from autopipe.backends.torch.runtime.manifest import Manifest, read_manifest
from autopipe.backends.torch.verification import read_losses
from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure
from tests.distributed.support.pool import Pools
from tests.distributed.support.zoo import SIZES
from tests.exports.export import Export, onnx_file
from tests.exports.journey import dimensions

pytestmark = pytest.mark.distributed

SAVED = 2
"""Steps before the checkpoint that is exported; the next one's loss is compared."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and how it is planned on two ranks."""

    strategy: str
    micro_batch: int
    export: Export | None = None
    zoo: str = ""
    weights: str = "none"

    def file(self, folder: Path) -> Path:
        """The model's file."""
        if self.export is not None:
            return onnx_file(self.export, folder)
        path = folder / "model.onnx"
        build(
            configure(self.zoo, {**SIZES[self.zoo], "loss": "true", "weights": self.weights})
        ).save(path)
        return path


CASES = {
    "gpt without weights": Case("handcrafted", 4, zoo="gpt"),
    "a network with batch normalisation": Case(
        "data_parallel", 2, zoo="wide-resnet", weights="random"
    ),
    "gpt2 of torch's exporter, a tied table's copy folded": Case(
        "pipedream", 2, Export("gpt2", "dynamo", dynamic=False, loss=True)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_exported_model_has_the_trained_loss(pools: Pools, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model = case.file(tmp_path)
    manifest = planned(model, case, tmp_path / "plan")
    batches = batches_of(manifest)
    np.savez(tmp_path / "data.npz", **batches)
    losses = trained(pools, manifest, tmp_path)
    exported = tmp_path / "trained.onnx"
    arguments = ["checkpoint", "export", tmp_path / "saved", "--step", SAVED, "-o", exported, "-q"]
    assert main(list(map(str, arguments))) == 0
    onnx.checker.check_model(str(exported), full_check=True)
    assert same_but_for_weights(model, exported)
    assert loss_of(exported, manifest, batches) == pytest.approx(losses[SAVED], rel=1e-5)
    assert abs(losses[SAVED] - losses[0]) > 1e-3 * abs(losses[0]), "training changed nothing"


def planned(model: Path, case: Case, folder: Path) -> Manifest:
    """The program of two ranks, two micro-batches a step."""
    size = ["--batch-size", 2 * case.micro_batch, "--micro-batches", 2]
    arguments = [model, "--gpus", 2, "--strategy", case.strategy, *size, *dimensions(model)]
    settings = ["--set", "optimizer={name: sgd, lr: 0.05}"]
    assert main(["plan", *map(str, arguments), *settings, "-o", str(folder), "-q"]) == 0
    assert main(["codegen", str(folder), "-q"]) == 0
    return read_manifest(folder / "program")


def batches_of(manifest: Manifest) -> dict[str, np.ndarray]:
    """Random data for all steps."""
    generator = np.random.default_rng(0)
    found = {}
    for entry in manifest.inputs:
        shape = list(entry.value.shape)
        if entry.batch_axis is not None:
            shape[entry.batch_axis] *= manifest.micro_batches * (SAVED + 1)
        whole = entry.value.dtype.is_integer
        drawn = (
            generator.integers(0, entry.below or 2, shape)
            if whole
            else generator.normal(size=shape)
        )
        found[entry.value.name] = drawn.astype(entry.value.dtype.value)
    return found


def trained(pools: Pools, manifest: Manifest, folder: Path) -> list[float]:
    """The losses of the steps, of which one more than SAVED are run."""
    flags = ["--steps", SAVED + 1, "--checkpoint", folder / "saved", "--checkpoint-every", SAVED]
    report = folder / "report.jsonl"
    data = ["--data", folder / "data.npz"]
    pools.of(manifest.world_size).run(
        manifest.folder, "--device", "cpu", *data, *flags, "--report", report
    )
    return read_losses(report)


def loss_of(model: Path, manifest: Manifest, batches: dict[str, np.ndarray]) -> float:
    """What ONNX Runtime computes on the last step's data, a micro-batch at a time."""
    reference = ReferenceModel(model, {})
    axes = {entry.value.name: entry.batch_axis for entry in manifest.inputs}
    count = manifest.micro_batches * (SAVED + 1)
    losses = []
    for number in range(manifest.micro_batches * SAVED, count):
        feeds = {
            name: array if axes[name] is None else np.split(array, count, axes[name])[number]
            for name, array in batches.items()
        }
        losses.append(float(reference.run(feeds)[str(manifest.loss)].reshape(())))
    return float(np.mean(losses))


def same_but_for_weights(model: Path, exported: Path) -> bool:
    """Whether nodes, inputs, outputs and metadata are the model's, and all its initializers are
    there.
    """
    ours, given = (onnx.load(path, load_external_data=False) for path in (exported, model))
    assert {each.name for each in given.graph.initializer} <= {
        each.name for each in ours.graph.initializer
    }
    for proto in (ours, given):
        del proto.graph.initializer[:]
        del proto.graph.value_info[:]
        proto.ir_version = 10
    return bool(ours == given)


def test_what_inspect_and_verify_say(
    pools: Pools, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES["gpt without weights"]
    manifest = planned(case.file(tmp_path), case, tmp_path / "plan")
    np.savez(tmp_path / "data.npz", **batches_of(manifest))
    trained(pools, manifest, tmp_path)
    capsys.readouterr()
    assert main(["checkpoint", "inspect", str(tmp_path / "saved"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [each["step"] for each in said["checkpoints"]] == [SAVED, SAVED + 1]
    assert said["world_size"] == 2
    assert {each["name"]: tuple(each["shape"]) for each in said["parameters"]} == {
        each.value.name: each.value.shape for each in manifest.parameters
    }
    assert any(len(each["shards"]) > 1 for each in said["parameters"])
    assert main(["checkpoint", "verify", str(tmp_path / "saved"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["whole"]
    file = tmp_path / "saved" / f"step_{SAVED:08d}" / "rank_00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["checkpoint", "verify", str(tmp_path / "saved")]) == 5
    assert str(file) in capsys.readouterr().err
    assert (
        main(
            [
                "checkpoint",
                "export",
                str(tmp_path / "saved"),
                "--step",
                "2",
                "-o",
                str(tmp_path / "out.onnx"),
            ]
        )
        == 5
    )
    assert not (tmp_path / "out.onnx").exists()
