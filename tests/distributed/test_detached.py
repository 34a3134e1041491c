"""Gradients that torch stops are stopped here, as far as the exported file says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
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
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.randn(5))
        self.way = WAYS[way]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.way(self, torch.tanh(self.first(x)))
        return ((self.second(hidden) - y) ** 2).mean()


def operators(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


@pytest.mark.distributed
@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_no_gradient_passes_a_detached_value(way: str, optimize: bool, pools: Pools, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Net(way)
    data = {"x": torch.randn(STEPS * BATCH, 6), "y": torch.randn(STEPS * BATCH, 5)}
    path = tmp_path / "model.onnx"
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, tuple(tensor[:BATCH] for tensor in data.values()), path, dynamo=True, optimize=optimize,
            input_names=list(data), output_names=["loss"], dynamic_shapes=({0: batch}, {0: batch}),
            external_data=False, verbose=False,
        )  # fmt: skip
    assert "StopGradient" in operators(read_model(path, loss="loss").graph)
    assert "StopGradient" not in operators(read_model(path, loss="loss", mode=Mode.INFER).graph)
    found = by_ranks(path, data, STEPS, pools, tmp_path, gpus=2)
    wanted = by_torch(module, data, STEPS)
    read = {name for name, tensor in module.named_parameters() if tensor.grad is not None}
    assert read <= found.keys()
    for name, array in found.items():
        np.testing.assert_allclose(array, wanted[name], rtol=1e-5, atol=1e-6)
