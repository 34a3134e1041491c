"""Softmaxes over an axis of which each rank has a part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopipe.backends.torch.runtime.operators.joint import ShardedAxis, precise


def softmax_part(scores: Tensor, dim: int, group: ShardedAxis) -> Tensor:
    """This rank's part of a softmax along `dim`."""
    found: Tensor = _Softmax.apply(precise(scores), dim, group)  # type: ignore[no-untyped-call]
    return found


def log_softmax_part(scores: Tensor, dim: int, group: ShardedAxis) -> Tensor:
    """This rank's part of the logarithms of a softmax along `dim`."""
    found: Tensor = _LogSoftmax.apply(precise(scores), dim, group)  # type: ignore[no-untyped-call]
    return found


def _shifted(scores: Tensor, dim: int, group: ShardedAxis) -> tuple[Tensor, Tensor]:
    """Scores less the largest of all, and the sum of their exponentials over all ranks."""
    shifted = scores - group.largest(scores.amax(dim, keepdim=True))
    return shifted, group.total(shifted.exp().sum(dim, keepdim=True))


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, scores: Tensor, dim: int, group: ShardedAxis) -> Tensor:
        context.dim, context.group = dim, group
        shifted, total = _shifted(scores, dim, group)
        result = shifted.exp_().div_(total)
        context.save_for_backward(result)
        return result

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (result,) = context.saved_tensors
        product = gradients[0] * result
        return product - result * context.group.total(product.sum(context.dim, keepdim=True)), None, None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, scores: Tensor, dim: int, group: ShardedAxis) -> Tensor:
        context.dim, context.group = dim, group
        shifted, total = _shifted(scores, dim, group)
        result = shifted.sub_(total.log())
        context.save_for_backward(result)
        return result

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (result,) = context.saved_tensors
        total = context.group.total(gradients[0].sum(context.dim, keepdim=True))
        return gradients[0] - result.exp() * total, None, None
