"""Modules whose tensors have as many rows as data choose, each with its loss."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from tests.exports.with_loss import Tensors

BATCH = 2
NODES = 6
EDGES = 9
WIDTH = 4
CLASSES = 3


class Tokens(nn.Module):
    """Tokens that a mask keeps: assigned, flattened, joined with learned ones, pooled, in order of
    size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.exit = nn.Linear(WIDTH, CLASSES)
        self.learned = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        keep = x[..., 0] > 0
        hidden = self.first(x).clone()
        hidden[keep] = (
            torch.tanh(self.second(hidden[keep]).reshape(-1, 2) * 0.5).reshape(-1, WIDTH) * 2
        )
        hidden[x > 1.0] = 0.25
        kept = torch.cat([hidden[keep], self.learned])
        pooled = (torch.softmax(kept, dim=0) * kept).sum(dim=0) + kept.sort(dim=0).values.cumsum(
            dim=0
        ).mean(dim=0)
        return F.cross_entropy(self.exit(hidden + pooled).mean(dim=1), labels)


class Edges(nn.Module):
    """A graph convolution (arXiv:1609.02907) and graph attention (arXiv:1710.10903) over edges of
    which loops are taken out, before each node has one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.exit = nn.Linear(WIDTH, CLASSES)
        self.score = nn.Linear(2 * WIDTH, 1, bias=False)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        count = BATCH * NODES
        first = torch.arange(BATCH)[:, None, None] * NODES
        listed = (edges + first).transpose(0, 1).reshape(2, BATCH * EDGES)
        listed = listed[:, listed[0] != listed[1]]
        loops = torch.arange(count)
        source, target = torch.cat([listed, torch.stack([loops, loops])], dim=1)

        degree = torch.zeros(count).scatter_add(0, target, torch.ones(target.shape[0]))
        scale = degree.rsqrt()
        hidden = self.entry(x.reshape(count, WIDTH))
        sent = hidden[source] * (scale[source] * scale[target])[:, None]
        hidden = F.relu(
            torch.zeros(count, WIDTH).scatter_add(0, target[:, None].expand(-1, WIDTH), sent)
        )

        hidden = torch.tanh(self.middle(hidden)) + 3 * x.reshape(count, WIDTH)
        scores = F.leaky_relu(
            self.score(torch.cat([hidden[source], hidden[target]], dim=1))[:, 0], 0.2
        )
        largest = torch.full((count,), -100.0).scatter_reduce(0, target, scores.detach(), "amax")
        shares = (scores - largest[target]).exp()
        shares = shares / (torch.zeros(count).scatter_add(0, target, shares)[target] + 1e-16)
        hidden = torch.zeros(count, WIDTH).scatter_add(
            0, target[:, None].expand(-1, WIDTH), hidden[source] * shares[:, None]
        )
        return F.cross_entropy(self.exit(hidden.reshape(BATCH, NODES, WIDTH).mean(dim=1)), labels)


def chosen(name: str) -> tuple[nn.Module, Tensors]:
    """A module and its inputs."""
    torch.manual_seed(3)
    inputs = {"x": torch.randn(BATCH, NODES, WIDTH)}
    if name == "edges":
        inputs["edges"] = torch.randint(NODES, (BATCH, 2, EDGES))
    inputs["labels"] = torch.randint(CLASSES, (BATCH,))
    return {"tokens": Tokens, "edges": Edges}[name](), inputs


def written(name: str, dynamo: bool, folder: Path) -> Path:
    """The file of a module, by either of torch's exporters."""
    module, inputs = chosen(name)
    path = folder / f"{name}.onnx"
    module.eval()
    torch.onnx.export(
        module, tuple(inputs.values()), str(path), dynamo=dynamo, input_names=list(inputs), output_names=["loss"],
        opset_version=18, external_data=False, verbose=False,
    )  # fmt: skip
    return path
