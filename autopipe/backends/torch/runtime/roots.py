"""Where a backward starts: results without their numbers, which autograd keeps itself where it needs them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass(frozen=True, slots=True)
class OutputEdge:
    """A result's place in autograd's graph, and its shape."""

    edge: GradientEdge | None
    """None where no gradient flows through it."""
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def output_edge(result: torch.Tensor) -> OutputEdge:
    """The root that a result is."""
    edge = get_gradient_edge(result) if result.requires_grad else None
    return OutputEdge(edge, result.shape, result.dtype, result.device)
