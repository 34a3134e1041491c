"""Activation checkpointing. A segment is a generated function of consecutive operators of a stage.
It saves only its arguments for the backward, which runs the segment's forward again.

For autograd, a segment is one operator with the segment's arguments as operands. Parameters are not
operands: the backward of the segment itself adds to the gradients of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from autopipe.backends.torch.runtime.state.arguments import Arguments, LayerArguments
from autopipe.backends.torch.torch_interfaces import accumulate_gradients

Tensors = tuple[torch.Tensor, ...]
Segment = Callable[..., tuple[Tensors, Tensors]]
"""A generated function whose first argument `p` has the parameters of the stage or of a layer; the
other arguments are tensors. It returns (results with gradients, results without gradients).
"""


class recompute:
    """Decorator of a segment, a generated function of consecutive operators of a stage. In
    training, the decorated segment saves only its arguments for the backward, which computes the
    intermediate results again.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment

    def __call__(self, p: Arguments | LayerArguments, *arguments: torch.Tensor) -> Tensors:
        """Return the results of the segment. `p` has the parameters of the stage or, if several
        equal segments share the function, of the layer.
        """
        segment = self.segment
        if not torch.is_grad_enabled():
            flowing, others = segment(p, *arguments)
            return flowing + others
        # Autograd runs the backward of an operator only if an operand requires a gradient. The
        # parameters are not operands of the segment, so the operand `trigger`, which requires a
        # gradient, is added.
        trigger = torch.empty(0, device=p.device, requires_grad=True)
        results: Tensors = _RecomputeSegment.apply(  # type: ignore[no-untyped-call]
            segment, p, trigger, *arguments
        )
        return results


class _RecomputeSegment(torch.autograd.Function):
    """A segment as one operator of autograd. The forward runs without recording operators; the
    backward runs the segment again with recording, then backpropagates through it.
    """

    @staticmethod
    def forward(
        context: Any,
        segment: Segment,
        p: Arguments | LayerArguments,
        _: torch.Tensor,
        *arguments: torch.Tensor,
    ) -> Tensors:
        is_narrow = torch.is_autocast_enabled(p.device.type)
        context.narrow = torch.get_autocast_dtype(p.device.type) if is_narrow else None
        context.segment = segment
        context.p = p
        context.drawn = p.random.state
        context.save_for_backward(*arguments)
        flowing, others = segment(p, *arguments)
        # The segment ran without autograd, so the autocast cache contains 16-bit copies of
        # parameters without autograd history. If later operators used these copies, the parameters'
        # gradients would be lost.
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
        # The segment must draw the random numbers of its first run. The present state, which other
        # micro-batches may have changed, is stored and restored afterwards.
        meanwhile = p.random.state
        p.random.state = context.drawn
        with (
            torch.enable_grad(),
            torch.autocast(p.device.type, dtype=narrow, enabled=narrow is not None),
        ):
            # The queue of deferred weight gradients stores formulas with parameters. Segments of
            # different layers can share a function, but not formulas.
            p.weight_grads.begin(f"{segment.__name__} {getattr(p, 'path', '')}")
            seeds = [
                (get_gradient_edge(result), gradient)
                for result, gradient in zip(segment(p, *arguments)[0], gradients, strict=False)
                if result.requires_grad
            ]
        p.random.state = meanwhile
        accumulate_gradients([edge for edge, _ in seeds], [gradient for _, gradient in seeds])
        return (None, None, None, *(each.grad for each in arguments))
