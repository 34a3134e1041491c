"""Segments of a stage that run their forward again for their backward, since they kept nothing but
their arguments. To autograd a segment is one operator of its arguments. Its backward adds to the
gradients of parameters itself, one after the other, as backwards do that keep all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from autopipe.backends.torch.runtime.state.parameters import Arguments
from autopipe.backends.torch.torch_interfaces import accumulate_gradients

Tensors = tuple[torch.Tensor, ...]
Segment = Callable[..., tuple[Tensors, Tensors]]
"""Generated: takes `p` and tensors, gives what gradients flow through and what they do not."""


class recompute:
    """Makes of a generated segment one that keeps its arguments alone where it trains."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment

    def __call__(self, p: Arguments, *arguments: torch.Tensor) -> Tensors:
        if not torch.is_grad_enabled():
            flowing, others = self.segment(p, *arguments)
            return flowing + others
        # An operator none of whose operands asks for a gradient has no backward, and parameters are
        # no operands.
        asking = torch.empty(0, device=p.device, requires_grad=True)
        results: Tensors = _Recompute.apply(self.segment, p, asking, *arguments)  # type: ignore[no-untyped-call]
        return results


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, segment: Segment, p: Arguments, _: torch.Tensor, *arguments: torch.Tensor
    ) -> Tensors:
        is_narrow = torch.is_autocast_enabled(p.device.type)
        context.narrow = torch.get_autocast_dtype(p.device.type) if is_narrow else None
        context.segment = segment
        context.p = p
        context.drawn = p.random.state
        context.save_for_backward(*arguments)
        flowing, others = segment(p, *arguments)
        # Its narrow copies of parameters: they know of no gradient, and are many.
        torch.clear_autocast_cache()
        context.mark_non_differentiable(*others)
        return flowing + others

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        p = context.p
        segment = context.segment
        narrow = context.narrow
        arguments = [
            each.detach().requires_grad_(each.requires_grad) for each in context.saved_tensors
        ]
        # The same numbers are drawn once more; then those go on that forwards meanwhile draw.
        meanwhile = p.random.state
        p.random.state = context.drawn
        with (
            torch.enable_grad(),
            torch.autocast(p.device.type, dtype=narrow, enabled=narrow is not None),
        ):
            p.weight_grads.begin(segment.__name__)
            seeds = [
                (get_gradient_edge(result), gradient)
                for result, gradient in zip(segment(p, *arguments)[0], gradients, strict=False)
                if result.requires_grad
            ]
        p.random.state = meanwhile
        accumulate_gradients([edge for edge, _ in seeds], [gradient for _, gradient in seeds])
        return (None, None, None, *(each.grad for each in arguments))
