"""Two steps of SGD on two ranks end where torch's own module ends: every parameter, and no buffer
has moved.

What comes out of `checkpoint export` is compared, read back as any other model; ONNX Runtime
computes on that file the loss that the module has after the same steps.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from autopipe.backends.onnxruntime import ReferenceModel
from autopipe.backends.torch.runtime.manifest import Manifest, read_manifest
from autopipe.cli.main import main
from tests.distributed.support.pool import Pools
from tests.exports import traced as exported_models
from tests.exports.traced import UNOPTIMIZED, Traced, file_of, module_of
from tests.exports.trained_parameters import NOT_EXPORTED, holds, paired, same, trained_here
from tests.exports.with_loss import Tensors

pytestmark = pytest.mark.distributed

STEPS = 2
RATE = 0.05
MICRO_BATCHES = 2
TOLERANCE = 1e-5
MASKED = -50.0
"""Below it a number of a table is hidden by a mask."""
MODELS = ("qwen3_moe", "mamba", "swin", "phi3", "deberta", "unet")
STRATEGIES = ("data_parallel", "pipedream", "pase")
FAST = (
    ("mamba", "torchscript", "pipedream"),
    ("unet", "dynamo", "data_parallel"),
    ("qwen3_moe", "dynamo", "pase"),
)
"""Model, exporter and strategy of the tests that run by default."""
EVERY = [
    (model, exporter, strategy)
    for model in MODELS
    # Optimized by the exporter, DeBERTa's file holds products of its parameters in their place.
    for exporter in (UNOPTIMIZED if model == "deberta" else "dynamo", "torchscript")
    for strategy in STRATEGIES
    if (model, exporter) not in NOT_EXPORTED
]


@pytest.mark.parametrize(
    ("model", "exporter", "strategy"),
    [pytest.param(*each, marks=() if each in FAST else pytest.mark.sweep) for each in EVERY],
)
def test_two_steps_are_torchs(
    model: str, exporter: str, strategy: str, pools: Pools, tmp_path: Path
) -> None:
    traced = Traced(model, exporter)
    module, first = module_of(traced)
    batches = [
        _unpadded(each)
        for each in (first, *(_drawn(traced, seed) for seed in range(1, MICRO_BATCHES)))
    ]
    begun = {name: each.detach().numpy().copy() for name, each in module.named_parameters()}
    losses = _trained_by_torch(module, batches)
    path = file_of(traced)
    exported = _trained_here(path, strategy, batches, pools, tmp_path)

    before = trained_here(path)
    after = trained_here(exported)
    assert before.keys() == after.keys()
    ended = {name: each.detach().numpy() for name, each in module.named_parameters()}
    reached = {
        name: begun[name] for name, each in module.named_parameters() if each.grad is not None
    }
    groups, lacking, extra = paired(reached, before)
    assert not lacking and not extra
    for names, places in groups:
        one = _joined(begun, names)
        two = _joined(before, places)
        theirs = _joined(ended, names)[_order(one, two)]
        ours = _joined(after, places)[np.argsort(two, kind="stable")]
        difference = float(np.abs(theirs - ours).max())
        assert difference <= TOLERANCE * max(1.0, float(np.abs(theirs).max())), (names, places)
    assert any(np.abs(ended[name] - begun[name]).max() > 100 * TOLERANCE for name in reached), (
        "nothing was trained"
    )
    _require_unmoved(path, exported, before)
    found = [
        float(ReferenceModel(exported, {}).run(_arrays(each))["loss"].reshape(()))
        for each in batches
    ]
    assert np.mean(found) == pytest.approx(losses[-1], rel=TOLERANCE)


def _joined(tensors: dict[str, np.ndarray], names: tuple[str, ...]) -> np.ndarray:
    return np.concatenate([tensors[name].ravel() for name in names])


def _order(theirs: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """Where the numbers that both have stand, from the least to the greatest.

    An exporter leaves out rows that no position reads: they have no gradient.
    """
    places = np.argsort(theirs, kind="stable")
    return places if theirs.size == ours.size else places[np.isin(theirs[places], ours)]


def _drawn(traced: Traced, seed: int) -> Tensors:
    """Another batch for the same module."""
    torch.manual_seed(seed)
    return exported_models.MODELS[traced.model].inputs()


def _unpadded(batch: Tensors) -> Tensors:
    """The batch without the padding's token: torch gives its row no gradient, and no ONNX file says
    which it is.
    """
    return {
        name: tensor.clamp(min=1) if name == "input_ids" else tensor
        for name, tensor in batch.items()
    }


def _trained_by_torch(module: torch.nn.Module, batches: list[Tensors]) -> list[float]:
    """The losses of the steps, and the one behind them."""
    optimizer = torch.optim.SGD(
        [each for each in module.parameters() if each.requires_grad], lr=RATE
    )
    losses = []
    for step in range(STEPS + 1):
        loss = torch.stack([module(*each.values()) for each in batches]).mean()
        losses.append(loss.item())
        if step < STEPS:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return losses


def _trained_here(
    path: Path, strategy: str, batches: list[Tensors], pools: Pools, folder: Path
) -> Path:
    """The exported file after the steps."""
    size = sum(next(iter(each.values())).shape[0] for each in batches)
    plan = ["plan", path, "--gpus", 2, "--cluster", "cpu-local", "--strategy", strategy, "--batch-size", size,
            "--micro-batches", MICRO_BATCHES, "--set", f"optimizer={{name: sgd, lr: {RATE}}}", "-o", folder / "plan",
            "-q"]  # fmt: skip
    assert main(list(map(str, plan))) == 0
    assert main(["codegen", str(folder / "plan"), "-q"]) == 0
    manifest: Manifest = read_manifest(folder / "plan" / "program")
    once = {name: np.concatenate([_arrays(each)[name] for each in batches]) for name in batches[0]}
    np.savez(
        folder / "data.npz",
        **{name: np.concatenate([array] * STEPS) for name, array in once.items()},
    )
    flags = [
        "--device",
        "cpu",
        "--data",
        folder / "data.npz",
        "--steps",
        STEPS,
        "--checkpoint",
        folder / "saved",
    ]
    pools.of(manifest.world_size).run(manifest.folder, *flags, "--checkpoint-every", STEPS)
    exported = folder / "trained.onnx"
    assert main(["checkpoint", "export", str(folder / "saved"), "-o", str(exported), "-q"]) == 0
    return exported


def _arrays(batch: Tensors) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in batch.items()}


def _require_unmoved(path: Path, exported: Path, trained: dict[str, np.ndarray]) -> None:
    """Every tensor of the file whose numbers are not made of a trained parameter's holds the bits
    that it held.

    Those that a mask hides say nothing: it was added to a parameter's.
    """
    before, after = (
        {each.name: numpy_helper.to_array(each) for each in onnx.load(file).graph.initializer}
        for file in (path, exported)
    )
    for name, array in before.items():
        seen = array[array > MASKED]
        assert array.tobytes() == after[name].tobytes() or any(
            holds(numbers, seen) or same(np.exp(numbers), np.abs(array))
            for numbers in trained.values()
        ), name
