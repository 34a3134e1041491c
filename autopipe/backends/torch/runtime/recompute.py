"""Activation checkpointing: segments of a stage that save only their arguments and run their
forward again in the backward.

To autograd a segment is one operator of its arguments. Its backward adds to the gradients of
parameters itself.
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
"""A generated function of `p` and tensors. Returns (results with gradients, results without)."""


class recompute:
    """Decorator of a generated segment. In training, the segment saves only its arguments for the
    backward.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment

    def __call__(self, p: Arguments, *arguments: torch.Tensor) -> Tensors:
        if not torch.is_grad_enabled():
            flowing, others = self.segment(p, *arguments)
            return flowing + others
        # Autograd runs the backward of an operator only if an operand requires a gradient. The
        # parameters are not operands, so this one stands in for them.
        trigger = torch.empty(0, device=p.device, requires_grad=True)
        results: Tensors = _RecomputeSegment.apply(  # type: ignore[no-untyped-call]
            self.segment, p, trigger, *arguments
        )
        return results


class _RecomputeSegment(torch.autograd.Function):
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
        # The cache holds 16-bit copies of parameters that were made without gradients.
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
        # The segment draws the same random numbers again. Afterwards the state of later forwards is
        # restored.
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
