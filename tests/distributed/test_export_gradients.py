"""The gradients that ranks compute from an export are those that torch computes in the module it
was made from.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.backends.torch.runtime.state.parameters import read_block
from autopipe.backends.torch.verification import array_difference
from autopipe.cli.main import main
from autopipe.ir.layout import full_slice
from tests.distributed.support.pool import Pools
from tests.distributed.support.running import run_step
from tests.exports.chosen import chosen, written
from tests.exports.export import Export, onnx_file, traced
from tests.exports.journey import dimensions
from tests.exports.recent import module_of

SWEPT = pytest.mark.sweep
MICRO_BATCHES = 2
TOLERANCE = 1e-5


@pytest.mark.distributed
@pytest.mark.parametrize(
    "model",
    [
        "gpt2",
        "dlrm",
        "lstm",
        *(pytest.param(each, marks=SWEPT) for each in ("llama", "bert", "t5", "vit")),
    ],
)
def test_gradients_are_those_of_the_exported_module(
    model: str, pools: Pools, tmp_path: Path
) -> None:
    # With static shapes the exporter folds tables that are read at fixed positions.
    export = Export(model, "dynamo", dynamic=True, loss=True)
    module, inputs = traced(export)
    assert_gradients(onnx_file(export, tmp_path), module, inputs, pools, tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize("model", ["mixtral_eager", pytest.param("llava", marks=SWEPT)])
def test_rows_that_data_chooses_have_the_gradients_of_the_module(
    model: str, pools: Pools, tmp_path: Path
) -> None:
    export = Export(model, "torchscript", dynamic=False, loss=True)
    assert_gradients(onnx_file(export, tmp_path), *module_of(export), pools, tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize(("model", "dynamo"), [("tokens", True), ("edges", False)])
def test_rows_that_are_joined_and_ordered_have_the_gradients_of_the_module(
    model: str, dynamo: bool, pools: Pools, tmp_path: Path
) -> None:
    assert_gradients(written(model, dynamo, tmp_path), *chosen(model), pools, tmp_path)


def assert_gradients(
    path: Path,
    module: torch.nn.Module,
    inputs: dict[str, torch.Tensor],
    pools: Pools,
    tmp_path: Path,
) -> None:
    """Ranks that run the file have the module's loss and gradients, of each parameter that has
    one.
    """
    plan = [
        "plan",
        path,
        "--strategy",
        "pipedream",
        "--gpus",
        2,
        "--cluster",
        "cpu-local",
        *dimensions(path),
    ]
    plan += ["-o", tmp_path / "plan", "-q"]
    plan += [
        "--batch-size",
        MICRO_BATCHES * len(inputs["labels"]),
        "--micro-batches",
        MICRO_BATCHES,
    ]
    assert main(list(map(str, plan))) == 0
    assert main(["codegen", str(tmp_path / "plan"), "-q"]) == 0
    batch = {name: torch.cat([tensor, tensor.flip(0)]) for name, tensor in inputs.items()}
    batch["labels"] = batch["labels"].roll(1, 0)
    program = tmp_path / "plan" / "program"
    step = run_step(pools, program, {name: tensor.numpy() for name, tensor in batch.items()})

    results = [
        module(*parts)
        for parts in zip(*(each.chunk(MICRO_BATCHES) for each in batch.values()), strict=True)
    ]
    losses = [each if isinstance(each, torch.Tensor) else each[0] for each in results]
    expected = torch.stack(losses).mean()
    expected.backward()  # type: ignore[no-untyped-call]
    assert step.loss == pytest.approx(expected.item(), rel=TOLERANCE)
    known = {
        name: tensor.grad.numpy()
        for name, tensor in module.named_parameters()
        if tensor.grad is not None
    }
    scale = float(np.sqrt(sum(float((each**2).sum()) for each in known.values())))
    compared = set()
    manifest = read_manifest(program)
    for index, entry in enumerate(manifest.parameters):
        stored = read_block(manifest.model, entry, full_slice(entry.value.shape), 0).numpy()
        name, turned = known_as(entry.value.name, stored, module)
        if name in known and index in step.gradients and "lstm" not in name:
            gradient = known[name].T if turned else known[name]
            assert (
                array_difference(name, step.gradients[index], gradient, scale).relative <= TOLERANCE
            ), name
            compared.add(name)
    # Torch's LSTM keeps its gates in another order than ONNX's.
    assert {name for name in known if "lstm" not in name} == compared


def known_as(name: str, stored: np.ndarray, module: torch.nn.Module) -> tuple[str, bool]:
    """The module's parameter that ranks hold with these values under `name`, and whether they hold
    it transposed.

    The exporter folds the transposition of a linear layer's weight into the weight, and calls a
    tied parameter by the name of any of its places.
    """
    for known, tensor in module.named_parameters():
        array = tensor.detach().numpy()
        for turned in (False, True):
            if np.array_equal(stored, array.T if turned else array):
                return known, turned
    return name, False
