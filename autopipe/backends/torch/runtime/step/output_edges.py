"""References to the results of a forward pass in autograd's graph, without the results' values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopipe.backends.torch.runtime.communication.transport import TensorForm
from autopipe.backends.torch.torch_interfaces import accumulate_gradients


@dataclass(frozen=True, slots=True)
class OutputEdge:
    """A result's position in autograd's graph; `edge` is None if the result needs no gradient. Does
    not keep the values of the result in memory.
    """

    edge: GradientEdge | None
    form: TensorForm
    device: torch.device

    @staticmethod
    def of(result: torch.Tensor) -> OutputEdge:
        """Return the edge of `result`."""
        edge = get_gradient_edge(result) if result.requires_grad else None
        return OutputEdge(edge, (result.dtype, result.shape), result.device)


def run_backward(edges: tuple[OutputEdge, ...], gradients: dict[int, torch.Tensor]) -> None:
    """Run autograd from the results whose gradients are given, by the index of the result."""
    seeds = []
    values = []
    for index, gradient in gradients.items():
        edge = edges[index].edge
        assert edge is not None, "no gradient flows through the result"
        seeds.append(edge)
        values.append(gradient)
    accumulate_gradients(seeds, values)
