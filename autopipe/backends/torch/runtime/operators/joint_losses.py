"""Losses over classes or labels of which each rank has a part; a rank's result is its share of the sum over all ranks.

Of the classes, a rank's share is the loss of the labels among its own (Shoeybi et al., "Megatron-LM: training
multi-billion parameter language models using model parallelism", 2019, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.backends.torch.runtime.operators.joint import ShardedAxis, own_places, precise
from autopipe.backends.torch.runtime.operators.joint_softmax import log_softmax_part


def cross_entropy_part(
    scores: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    *,
    group: ShardedAxis,
    batch: ShardedAxis | None = None,
) -> Tensor:
    """This rank's share of the softmax cross-entropy over axis 1, of which it has a part: that of labels in its part.

    `weight` is that of all classes, whole; so are the labels, but where the ranks of `batch` each have a part of them.
    """
    scores = precise(scores)
    places, own, weights = _weighed(scores, labels, weight, ignore_index, group)
    losses: Tensor = _CrossEntropy.apply(scores, places, own, group)  # type: ignore[no-untyped-call]
    return _reduced(losses, weights, reduction, batch)


def cross_entropy_and_logarithms_part(
    scores: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    *,
    group: ShardedAxis,
    batch: ShardedAxis | None = None,
) -> tuple[Tensor, Tensor]:
    """The same, and this rank's part of the logarithms of probabilities."""
    logarithms = log_softmax_part(scores, 1, group)
    return nll_part(logarithms, labels, weight, ignore_index, reduction, group=group, batch=batch), logarithms


def nll_part(
    logarithms: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    *,
    group: ShardedAxis,
    batch: ShardedAxis | None = None,
) -> Tensor:
    """This rank's share of the negative log-likelihood: that of the labels among its classes."""
    places, own, weights = _weighed(logarithms, labels, weight, ignore_index, group)
    picked = logarithms.gather(1, places.unsqueeze(1)).squeeze(1)
    return _reduced(-(picked * own).masked_fill(own == 0, 0), weights, reduction, batch)


def cross_entropy_share(
    scores: Tensor, labels: Tensor, weight: Tensor | None = None, ignore_index: int = -100, *, batch: ShardedAxis
) -> Tensor:
    """This rank's share of the mean softmax cross-entropy over the labels of all ranks, of which it has a part."""
    losses = F.cross_entropy(scores, labels, weight, ignore_index=ignore_index, reduction="sum")
    return losses / batch.total(_weights(labels, weight, ignore_index, losses.dtype).sum())


def cross_entropy_and_logarithms_share(
    scores: Tensor, labels: Tensor, weight: Tensor | None = None, ignore_index: int = -100, *, batch: ShardedAxis
) -> tuple[Tensor, Tensor]:
    """The same, and the logarithms of the probabilities."""
    logarithms = F.log_softmax(scores, 1)
    return nll_share(logarithms, labels, weight, ignore_index, batch=batch), logarithms


def nll_share(
    logarithms: Tensor, labels: Tensor, weight: Tensor | None = None, ignore_index: int = -100, *, batch: ShardedAxis
) -> Tensor:
    """This rank's share of the mean negative log-likelihood over the labels of all ranks."""
    losses = F.nll_loss(logarithms, labels, weight, ignore_index=ignore_index, reduction="sum")
    return losses / batch.total(_weights(labels, weight, ignore_index, losses.dtype).sum())


def _weighed(
    scores: Tensor, labels: Tensor, weight: Tensor | None, ignore_index: int, group: ShardedAxis
) -> tuple[Tensor, Tensor, Tensor]:
    """Where each label is in this rank's part, its weight there, 0 for those of other ranks, and its weight."""
    classes = scores.shape[1]
    known = labels.masked_fill(labels == ignore_index, 0)
    torch._assert_async(((known >= 0) & (known < classes * group.size)).all(), "a label is out of range")
    places, mine = own_places(known, classes, group)
    weights = _weights(labels, weight, ignore_index, scores.dtype)
    return places, weights * mine, weights


def _weights(labels: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """Weight of each label: its class weight, or one; zero where it is ignored."""
    counts = labels != ignore_index
    return counts.to(dtype) if weight is None else weight.to(dtype)[labels.masked_fill(~counts, 0)] * counts


def _reduced(losses: Tensor, weights: Tensor, reduction: str, batch: ShardedAxis | None) -> Tensor:
    """Losses of this rank's labels as the reduction has them; a mean is over the weights of all labels."""
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    total = weights.sum()
    return losses.sum() / (total if batch is None else batch.total(total))


class _CrossEntropy(torch.autograd.Function):
    """Losses by label. Only exponentials of the scores are kept, and backward is one pass over them."""

    @staticmethod
    def forward(context: Any, scores: Tensor, places: Tensor, own: Tensor, group: ShardedAxis) -> Tensor:
        largest = group.largest(scores.amax(1, keepdim=True))
        picked = scores.gather(1, places.unsqueeze(1)) - largest
        exponentials = (scores - largest).exp_()
        total = group.total(exponentials.sum(1, keepdim=True))
        context.group = group
        context.save_for_backward(exponentials, total, places, own)
        return ((total.log() - picked).squeeze(1) * own).masked_fill(own == 0, 0)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        exponentials, total, places, own = context.saved_tensors
        share = (gradients[0] * own).unsqueeze(1)
        found = exponentials * (context.group.total(share) / total)
        return found.scatter_add_(1, places.unsqueeze(1), -share), None, None, None
