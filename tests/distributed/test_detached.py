"""Gradients that torch stops are stopped here, as far as the exported file says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopipe.ir.graph import Graph
from autopipe.ir.problem import Mode
from autopipe.passes.frontend import read_model
from tests.distributed.support.pool import Pools
from tests.distributed.support.trained_weights import by_ranks, by_torch

STEPS = 2
BATCH = 4


def _straight_through(net: Net, hidden: Tensor) -> Tensor:
    return hidden + (torch.round(hidden * 4) / 4 - hidden).detach()


WAYS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "detached": lambda net, hidden: hidden + 0.5 * torch.sigmoid(hidden.detach()),
    "straight through": _straight_through,
    "detached parameter": lambda net, hidden: hidden * net.scale.detach() + net.scale,
    "detached target": lambda net, hidden: hidden * ((hidden - net.scale).detach() ** 2),
    "detached weight": lambda net, hidden: hidden @ net.second.weight.detach() + net.scale,
}


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.randn(5))
        self.way = WAYS[way]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.way(self, torch.tanh(self.first(x)))
        return ((self.second(hidden) - y) ** 2).mean()


class Padded(nn.Module):
    """A table that is looked up with padding and without."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 5, padding_idx=2)
        self.last = nn.Linear(5, 5)

    def forward(self, words: Tensor, y: Tensor) -> Tensor:
        padded = self.last(self.words(words)).sum(1)
        unpadded = nn.functional.embedding(words[:, 0], self.words.weight)
        return ((padded + unpadded - y) ** 2).mean()


def exported(module: nn.Module, data: Mapping[str, Tensor], folder: Path, optimize: bool) -> Path:
    """Return the file that torch's newer exporter writes of a module, with batches of any size."""
    path = folder / "model.onnx"
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, tuple(tensor[:BATCH] for tensor in data.values()), path, dynamo=True, optimize=optimize,
            input_names=list(data), output_names=["loss"], dynamic_shapes=({0: batch}, {0: batch}),
            external_data=False, verbose=False,
        )  # fmt: skip
    return path


def operators(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


@pytest.mark.distributed
@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_no_gradient_passes_a_detached_value(
    way: str, optimize: bool, pools: Pools, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = Net(way)
    data = {"x": torch.randn(STEPS * BATCH, 6), "y": torch.randn(STEPS * BATCH, 5)}
    path = exported(module, data, tmp_path, optimize)
    assert "StopGradient" in operators(read_model(path, loss="loss").graph)
    assert "StopGradient" not in operators(read_model(path, loss="loss", mode=Mode.INFER).graph)
    found = by_ranks(path, data, STEPS, pools, tmp_path, gpus=2)
    wanted = by_torch(module, data, STEPS)
    read = {name for name, tensor in module.named_parameters() if tensor.grad is not None}
    assert read <= found.keys()
    for name, array in found.items():
        np.testing.assert_allclose(array, wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
@pytest.mark.parametrize("optimize", [False, True])
def test_no_gradient_passes_the_padding_of_an_embedding(
    optimize: bool, kind: torch.dtype, pools: Pools, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = Padded()
    with torch.no_grad():
        module.words.weight.normal_()
    data = {
        "words": torch.randint(7, (STEPS * BATCH, 6)).to(kind),
        "y": torch.randn(STEPS * BATCH, 5),
    }
    path = exported(module, data, tmp_path, optimize)
    assert operators(read_model(path, loss="loss").graph).count("StopGradient") == 1
    assert not {"StopGradient", "Where", "Equal"} & {
        *operators(read_model(path, loss="loss", mode=Mode.INFER).graph)
    }
    found = by_ranks(path, data, STEPS, pools, tmp_path, gpus=2)
    for name, wanted in by_torch(module, data, STEPS).items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-6)
