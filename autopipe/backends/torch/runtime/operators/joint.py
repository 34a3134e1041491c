"""Operators that a stage's group computes together, each rank with its part of one axis.

Rows of a table and classes lie in equal parts in the order of the group; the parts themselves are never gathered. What
the ranks tell one another is a number or two for each row (Shoeybi et al., "Megatron-LM: training multi-billion
parameter language models using model parallelism", 2019, section 3, for the loss and the table). Results without the
axis are this rank's share of a sum.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Joint(Protocol):
    """A group as these operators see it."""

    size: int
    position: int

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over the group, without a gradient."""
        ...

    def largest(self, tensor: Tensor) -> Tensor:
        """The largest over the group, without a gradient."""
        ...


def gather_part(table: Tensor, dim: int, indices: Tensor, group: Joint) -> Tensor:
    """`table` at `indices` along `dim`, of which this rank has a part; zeros for those that other ranks have."""
    rows = table.shape[dim]
    places = indices.to(torch.int64)
    places = torch.where(places < 0, places + rows * group.size, places)
    torch._assert_async(((places >= 0) & (places < rows * group.size)).all(), "an index is out of range")
    places, mine = _own(places, rows, group)
    if dim == 0 and table.dim() == 2:
        found = F.embedding(places, table)
    else:
        shape = (*table.shape[:dim], *places.shape, *table.shape[dim + 1 :])
        found = table.index_select(dim, places.reshape(-1)).reshape(shape)
    return found.masked_fill(~mine.reshape(*mine.shape, *[1] * (table.dim() - dim - 1)), 0)


def softmax_part(scores: Tensor, dim: int, group: Joint) -> Tensor:
    """This rank's part of a softmax along `dim`."""
    found: Tensor = _Softmax.apply(_precise(scores), dim, group)  # type: ignore[no-untyped-call]
    return found


def log_softmax_part(scores: Tensor, dim: int, group: Joint) -> Tensor:
    """This rank's part of the logarithms of a softmax along `dim`."""
    found: Tensor = _LogSoftmax.apply(_precise(scores), dim, group)  # type: ignore[no-untyped-call]
    return found


def cross_entropy_part(
    scores: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    *,
    group: Joint,
) -> Tensor:
    """This rank's share of the softmax cross-entropy over axis 1, of which it has a part: that of labels in its part.

    `weight` is that of all classes, whole; so are the labels, and with them what a mean divides by.
    """
    scores = _precise(scores)
    places, own, weights = _weighed(scores, labels, weight, ignore_index, group)
    losses: Tensor = _CrossEntropy.apply(scores, places, own, group)  # type: ignore[no-untyped-call]
    return _reduced(losses, weights, reduction)


def cross_entropy_and_logarithms_part(
    scores: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    *,
    group: Joint,
) -> tuple[Tensor, Tensor]:
    """The same, and this rank's part of the logarithms of probabilities."""
    logarithms = log_softmax_part(scores, 1, group)
    return nll_part(logarithms, labels, weight, ignore_index, reduction, group=group), logarithms


def nll_part(
    logarithms: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    *,
    group: Joint,
) -> Tensor:
    """This rank's share of the negative log-likelihood: that of the labels among its classes."""
    places, own, weights = _weighed(logarithms, labels, weight, ignore_index, group)
    picked = logarithms.gather(1, places.unsqueeze(1)).squeeze(1)
    return _reduced(-(picked * own).masked_fill(own == 0, 0), weights, reduction)


def _weighed(
    scores: Tensor, labels: Tensor, weight: Tensor | None, ignore_index: int, group: Joint
) -> tuple[Tensor, Tensor, Tensor]:
    """Where each label is in this rank's part, its weight there, 0 for those of other ranks, and its weight."""
    classes = scores.shape[1]
    counts = labels != ignore_index
    labels = labels.masked_fill(~counts, 0)
    torch._assert_async(((labels >= 0) & (labels < classes * group.size)).all(), "a label is out of range")
    places, mine = _own(labels, classes, group)
    weights = counts.to(scores.dtype) if weight is None else weight[labels] * counts
    return places, weights * mine, weights


def _reduced(losses: Tensor, weights: Tensor, reduction: str) -> Tensor:
    """Losses of this rank's labels as the reduction has them; a mean is over the weights of all labels."""
    if reduction == "none":
        return losses
    return losses.sum() / weights.sum() if reduction == "mean" else losses.sum()


def _own(places: Tensor, extent: int, group: Joint) -> tuple[Tensor, Tensor]:
    """Places counted from the start of this rank's part, 0 where they are in another, and whether they are in it."""
    local = places - group.position * extent
    mine = (local >= 0) & (local < extent)
    return local.masked_fill(~mine, 0), mine


def _precise(scores: Tensor) -> Tensor:
    """Under autocast softmaxes run in single precision, as torch's own do."""
    narrow = scores.dtype in (torch.bfloat16, torch.float16)
    return scores.float() if narrow and torch.is_autocast_enabled(scores.device.type) else scores


def _shifted(scores: Tensor, dim: int, group: Joint) -> tuple[Tensor, Tensor]:
    """Scores less the largest of all, and the sum of their exponentials over all ranks."""
    shifted = scores - group.largest(scores.amax(dim, keepdim=True))
    return shifted, group.total(shifted.exp().sum(dim, keepdim=True))


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, scores: Tensor, dim: int, group: Joint) -> Tensor:
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
    def forward(context: Any, scores: Tensor, dim: int, group: Joint) -> Tensor:
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


class _CrossEntropy(torch.autograd.Function):
    """Losses by label. Only exponentials of the scores are kept, and backward is one pass over them."""

    @staticmethod
    def forward(context: Any, scores: Tensor, places: Tensor, own: Tensor, group: Joint) -> Tensor:
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
