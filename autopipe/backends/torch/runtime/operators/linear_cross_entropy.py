"""Cross-entropy of the logits `x @ weight.T + bias`, of which only a block of classes is in memory
at a time.

Forward saves x, the weight, the bias, the labels and, for each label, the log-sum-exp of its
logits. Backward computes the logits again, block by block, which costs one more matmul. The
alternative is to compute gradients in forward (Hsu et al., "Liger Kernel", 2024, section 3.2). It
would store the gradient of the weight, which is as large as the weight, for each micro-batch in
flight (its forward has run, its backward has not).

Blocks consist of classes, as FlashAttention's blocks consist of keys (Dao et al., 2022). So each
block of the weight's gradient is a single matmul. With blocks of labels it would be a sum of
matmuls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.backends.torch.runtime.communication.collectives import Group
from autopipe.backends.torch.runtime.operators.sharded import (
    at_least_float32,
    label_weights,
    local_indices,
)
from autopipe.backends.torch.torch_interfaces import assert_async


def linear_cross_entropy(
    x: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    step: int,
    class_weight: Tensor | None = None,
    softcap: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    group: Group | None = None,
    batch: Group | None = None,
) -> Tensor:
    """Return `F.cross_entropy` of the logits of x [*labels, features] and weight [classes,
    features], computed for `step` classes at a time. If `softcap` is not 0, each logit s is
    replaced by softcap · tanh(s / softcap). `class_weight` is the argument `weight` of
    `F.cross_entropy`.

    With `group`, weight and bias are sharded along the classes, and the result is the partial loss
    of the labels in this rank's range of classes. With `batch`, the labels are sharded over that
    group, and a mean divides by the total weight of the labels of all its ranks.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    classes = len(weight) * (1 if group is None else group.size)
    flat = labels.reshape(-1)
    known = flat.masked_fill(flat == ignore_index, 0)
    assert_async(((known >= 0) & (known < classes)).all(), "a label is out of range")
    fixed = None if class_weight is None else class_weight.detach()
    counted = label_weights(flat, fixed, ignore_index, at_least_float32(x).dtype)
    places = known
    own = counted
    if group is not None:
        places, mine = local_indices(known, len(weight), group)
        own = counted * mine
    rows = x.reshape(-1, x.shape[-1])
    losses: Tensor = _LinearCrossEntropy.apply(
        rows, weight, bias, places, own, step, softcap, group
    )  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses.reshape(labels.shape)
    if reduction == "sum":
        return losses.sum()
    total = counted.sum()
    return losses.sum() / (total if batch is None else batch.sum_over_ranks(total))


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss of each label, multiplied by the label's weight in `own`. The weight is 0 if the
    label is not one of this rank's classes. `places` contains the index of each label among this
    rank's classes.
    """

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        places: Tensor,
        own: Tensor,
        step: int,
        softcap: float,
        group: Group | None,
    ) -> Tensor:
        lowest = torch.finfo(own.dtype).min
        largest = torch.full_like(own, lowest)
        total = torch.zeros_like(own)
        picked = torch.zeros_like(own)
        for start, part, shift in _class_blocks(weight, bias, step):
            scores = _block_scores(x, part, shift, softcap)
            index, inside = _index_in_block(places, start, len(part))
            picked = torch.where(inside, scores.gather(1, index).squeeze(1), picked)
            highest = torch.maximum(largest, scores.amax(1))
            total = total * (largest - highest).exp() + scores.sub_(
                highest.unsqueeze(1)
            ).exp_().sum(1)
            largest = highest
        if group is not None:
            highest = group.max_over_ranks(largest)
            total = group.sum_over_ranks(total * (largest - highest).exp())
            largest = highest
        logarithm = largest + total.log()
        context.step = step
        context.softcap = softcap
        context.group = group
        context.save_for_backward(x, weight, bias, places, own, logarithm)
        return ((logarithm - picked) * own).masked_fill(own == 0, 0)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, places, own, logarithm = context.saved_tensors
        of_x, of_weight, of_bias, *_ = context.needs_input_grad
        share = (gradients[0] * own).unsqueeze(1)
        whole = share if context.group is None else context.group.sum_over_ranks(share)
        to_x = torch.zeros_like(x, dtype=own.dtype) if of_x else None
        to_weight = torch.empty_like(weight) if of_weight else None
        to_bias = torch.empty_like(bias) if of_bias and bias is not None else None
        for start, part, shift in _class_blocks(weight, bias, context.step):
            scores = _block_scores(x, part, shift, context.softcap)
            slope = 1 - (scores / context.softcap).square() if context.softcap else None
            index, inside = _index_in_block(places, start, len(part))
            found = scores.sub_(logarithm.unsqueeze(1)).exp_().mul_(whole)
            found.scatter_add_(1, index, -share.masked_fill(~inside.unsqueeze(1), 0))
            if slope is not None:
                found.mul_(slope)
            if to_bias is not None:
                to_bias[start : start + len(part)] = found.sum(0)
            found = found.to(x.dtype)
            if to_weight is not None:
                to_weight[start : start + len(part)] = found.t() @ x
            if to_x is not None and to_x.dtype is x.dtype:
                to_x.addmm_(found, part)
            elif to_x is not None:
                to_x += found @ part.to(x.dtype)
        return (
            None if to_x is None else to_x.to(x.dtype),
            to_weight,
            to_bias,
            None,
            None,
            None,
            None,
            None,
        )


def _class_blocks(
    weight: Tensor, bias: Tensor | None, step: int
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Yield (first class, rows of weight, elements of bias or None) for each block of at most
    `step` classes.
    """
    for start in range(0, len(weight), step):
        yield (
            start,
            weight[start : start + step],
            None if bias is None else bias[start : start + step],
        )


def _block_scores(x: Tensor, weight: Tensor, bias: Tensor | None, softcap: float) -> Tensor:
    """Return the logits of a block of classes, in float32 or float64. The matmul runs in the type
    of x.
    """
    found = at_least_float32(
        F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    )
    return found if not softcap else found.div_(softcap).tanh_().mul_(softcap)


def _index_in_block(places: Tensor, start: int, extent: int) -> tuple[Tensor, Tensor]:
    """Return (index, inside) for the labels `places` and the block of `extent` classes from `start`
    on. index [labels, 1]: index of each label in the block, 0 for labels of other blocks. inside
    [labels]: true for labels of this block.
    """
    local = places - start
    inside = (local >= 0) & (local < extent)
    return local.masked_fill(~inside, 0).unsqueeze(1), inside
