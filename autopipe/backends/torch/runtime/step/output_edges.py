"""References to the results of a forward in autograd's graph. They do not keep the values of the
results in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopipe.backends.torch.runtime.communication.transport import TensorForm
from autopipe.backends.torch.torch_interfaces import accumulate_gradients


@dataclass(frozen=True, slots=True)
class OutputEdge:
    """Reference to a result of a forward: its edge in autograd's graph, its element type and shape,
    and its device. `edge` is None if the result needs no gradient. The values of the result are not
    kept in memory.
    """

    edge: GradientEdge | None
    form: TensorForm
    device: torch.device

    @staticmethod
    def from_result(result: torch.Tensor) -> OutputEdge:
        """Return the reference to `result`."""
        edge = get_gradient_edge(result) if result.requires_grad else None
        return OutputEdge(edge, (result.dtype, result.shape), result.device)


def run_backward(edges: tuple[OutputEdge, ...], gradients: dict[int, torch.Tensor]) -> None:
    """Run autograd's backward. It starts from the results `edges[i]` for which `gradients` has the
    gradient, and adds to the gradients of parameters and arguments.
    """
    seeds = []
    values = []
    for index, gradient in gradients.items():
        edge = edges[index].edge
        assert edge is not None, "no gradient flows through the result"
        seeds.append(edge)
        values.append(gradient)
    accumulate_gradients(seeds, values)
