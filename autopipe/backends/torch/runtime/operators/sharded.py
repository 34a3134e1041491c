"""Operators on tensors that are sharded along a dimension over which the operator works: lookups,
softmaxes, losses, normalizations and reductions.

A function `sharded_...` takes this rank's shard and returns a shard, a partial sum or, for
reductions, the full result. Shards have equal sizes and are in the order of ranks. They are never
gathered: the ranks exchange only a few statistics per row (see `autopipe.ir.ops.operator`). If all
ranks get a full result, backward adds the gradients of all copies.

The partial loss of a rank is the loss of the labels in its range of classes (Shoeybi et al.,
"Megatron-LM", 2019, section 3).

Normalizations combine the means and variances of the shards in double precision (Chan, Golub and
LeVeque, "Algorithms for computing the sample variance", The American Statistician 37(3), 1983), so
that a mean far from zero does not cost precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.backends.torch.runtime.communication.collectives import Group
from autopipe.backends.torch.torch_interfaces import assert_async

if TYPE_CHECKING:
    from autopipe.backends.torch.runtime.state.running_statistics import RunningStatistics


def once(tensor: Tensor, group: Group) -> Tensor:
    """Return `tensor` on the rank at position 0 of the group, and zeros on the other ranks. So a
    sum over the ranks includes the tensor once.
    """
    everywhere = torch.ones((), dtype=torch.bool, device=tensor.device)
    return tensor if group.position == 0 else tensor.masked_fill(everywhere, 0)


def local_indices(places: Tensor, extent: int, group: Group) -> tuple[Tensor, Tensor]:
    """Return (local, mine) for `places`, indices along a sharded dimension.

    local: the index in this rank's shard, of size `extent`; 0 if the index is in another shard.
    mine: true if the index is in this rank's shard.
    """
    local = places - group.position * extent
    mine = (local >= 0) & (local < extent)
    return local.masked_fill(~mine, 0), mine


def as_float32_under_autocast(scores: Tensor) -> Tensor:
    """Return `scores` in float32 if they have 16 bits and autocast is on, otherwise unchanged. So
    sharded softmaxes have the precision of torch's softmaxes under autocast.
    """
    narrow = scores.dtype in (torch.bfloat16, torch.float16)
    return scores.float() if narrow and torch.is_autocast_enabled(scores.device.type) else scores


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32 if its type is float16 or bfloat16, otherwise unchanged. Statistics of x
    are then computed in at least float32.
    """
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def sharded_gather(table: Tensor, dim: int, indices: Tensor, group: Group) -> Tensor:
    """Return the rows of `table` at `indices` along `dim`, along which the table is sharded. Rows
    in the shards of other ranks are zeros, so the sum over the ranks is the full result.
    """
    places, mine = _own_indices(indices, table.shape[dim], group)
    if dim == 0 and table.dim() == 2:
        found = F.embedding(places, table)
    else:
        shape = (*table.shape[:dim], *places.shape, *table.shape[dim + 1 :])
        found = table.index_select(dim, places.reshape(-1)).reshape(shape)
    return found.masked_fill(~mine.reshape(*mine.shape, *[1] * (table.dim() - dim - 1)), 0)


def sharded_gather_elements(table: Tensor, dim: int, indices: Tensor, group: Group) -> Tensor:
    """Return `torch.gather` from a table that is sharded along `dim`. Elements in the shards of
    other ranks are zeros, so the sum over the ranks is the full result.
    """
    places, mine = _own_indices(indices, table.shape[dim], group)
    return table.gather(dim, places).masked_fill(~mine, 0)


def _own_indices(indices: Tensor, rows: int, group: Group) -> tuple[Tensor, Tensor]:
    """Return (local, mine) as `local_indices` does, for indices that may be negative. `rows` is the
    size of a shard. An index out of range raises RuntimeError; on a GPU, the host does not wait for
    this check.
    """
    places = nonnegative_indices(indices, rows * group.size)
    assert_async(((places >= 0) & (places < rows * group.size)).all(), "an index is out of range")
    return local_indices(places, rows, group)


def nonnegative_indices(indices: Tensor, extent: int) -> Tensor:
    """Return indices as int64, in which negative indices, which count from the end, are replaced by
    the equal index from the start. `extent` is the size of the dimension.
    """
    indices = indices.to(torch.int64)
    return torch.where(indices < 0, indices + extent, indices)


def _softmax(logarithm: bool, scores: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's shard of the softmax of `scores` along the sharded dimension `dim` or,
    with `logarithm`, of its logarithm.
    """
    found: Tensor = _Softmax.apply(  # type: ignore[no-untyped-call]
        as_float32_under_autocast(scores), dim, group, logarithm
    )
    return found


sharded_softmax = partial(_softmax, False)
sharded_log_softmax = partial(_softmax, True)


class _Softmax(torch.autograd.Function):
    """Softmax p of scores along a sharded dimension, or its logarithm.

    For a gradient g of the result, the gradient of the scores is p (g - Σ p g) for the softmax, and
    g - p Σ g for its logarithm. Maxima and sums are over all ranks.
    """

    @staticmethod
    def forward(context: Any, scores: Tensor, dim: int, group: Group, logarithm: bool) -> Tensor:
        context.dim = dim
        context.group = group
        context.logarithm = logarithm
        shifted = scores - group.max_over_ranks(scores.amax(dim, keepdim=True))
        total = group.sum_over_ranks(shifted.exp().sum(dim, keepdim=True))
        result = shifted.sub_(total.log()) if logarithm else shifted.exp_().div_(total)
        context.save_for_backward(result)
        return result

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (result,) = context.saved_tensors
        product = gradients[0] if context.logarithm else gradients[0] * result
        total = context.group.sum_over_ranks(product.sum(context.dim, keepdim=True))
        return product - (result.exp() if context.logarithm else result) * total, None, None, None


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy of each label. Forward saves the exponentials of the scores instead of the
    scores, so backward needs only one pass over memory.
    """

    @staticmethod
    def forward(context: Any, scores: Tensor, places: Tensor, own: Tensor, group: Group) -> Tensor:
        largest = group.max_over_ranks(scores.amax(1, keepdim=True))
        picked = scores.gather(1, places.unsqueeze(1)) - largest
        exponentials = (scores - largest).exp_()
        total = group.sum_over_ranks(exponentials.sum(1, keepdim=True))
        context.group = group
        context.save_for_backward(exponentials, total, places, own)
        return ((total.log() - picked).squeeze(1) * own).masked_fill(own == 0, 0)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        exponentials, total, places, own = context.saved_tensors
        share = (gradients[0] * own).unsqueeze(1)
        found = exponentials * (context.group.sum_over_ranks(share) / total)
        return found.scatter_add_(1, places.unsqueeze(1), -share), None, None, None


def _negative_log_likelihoods(
    logarithms: Tensor, places: Tensor, own: Tensor, group: Group
) -> Tensor:
    """Return the loss of each label: minus its log-probability, multiplied by its weight in `own`.
    `logarithms` has this rank's log-probabilities, with its classes in dimension 1, and `places`
    the index of each label among these classes. `own` is 0 for labels of other ranks.
    """
    picked = logarithms.gather(1, places.unsqueeze(1)).squeeze(1)
    return -(picked * own).masked_fill(own == 0, 0)


def _sharded_loss(
    losses_of: Callable[..., Any],
    scores: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    *,
    group: Group,
    batch: Group | None = None,
) -> Tensor:
    """Return this rank's partial loss over classes (dimension 1), which are sharded: the loss of
    the labels in this rank's range of classes.

    `weight` [all classes] has the weights of classes. If `batch` is None, each rank has all labels.
    Otherwise the labels are sharded over the group `batch`, and a mean divides by the total weight
    of the labels of all its ranks.

    `losses_of` returns the loss of each label. Its arguments are the scores, the index of each
    label in this rank's shard, the weight of each label (0 if the label belongs to another rank),
    and the group.
    """
    classes = scores.shape[1]
    known = labels.masked_fill(labels == ignore_index, 0)
    assert_async(((known >= 0) & (known < classes * group.size)).all(), "a label is out of range")
    places, mine = local_indices(known, classes, group)
    weights = label_weights(labels, weight, ignore_index, scores.dtype)
    losses: Tensor = losses_of(scores, places, weights * mine, group)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    total = weights.sum()
    return losses.sum() / (total if batch is None else batch.sum_over_ranks(total))


def sharded_cross_entropy(scores: Tensor, *labels: Any, **settings: Any) -> Tensor:
    """Return this rank's partial cross-entropy of `scores`, which are sharded along the classes
    (dimension 1): the loss of the labels in this rank's range of classes. `labels` and `settings`
    are the other arguments of `_sharded_loss`: labels, weights of classes, ignored label, reduction
    and groups.
    """
    return _sharded_loss(
        _CrossEntropy.apply, as_float32_under_autocast(scores), *labels, **settings
    )


sharded_nll = partial(_sharded_loss, _negative_log_likelihoods)


def _partial_mean_loss(
    loss: Callable[..., Tensor],
    scores: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    *,
    batch: Group,
) -> Tensor:
    """Return this rank's part of a mean loss over labels that are sharded over `batch`; the mean is
    the sum of the parts. `loss` is `F.cross_entropy` or `F.nll_loss`.
    """
    losses = loss(scores, labels, weight, ignore_index=ignore_index, reduction="sum")
    return losses / batch.sum_over_ranks(
        label_weights(labels, weight, ignore_index, losses.dtype).sum()
    )


cross_entropy_partial = partial(_partial_mean_loss, F.cross_entropy)
nll_partial = partial(_partial_mean_loss, F.nll_loss)


def _loss_and_logarithms(
    loss: Callable[..., Tensor], scores: Tensor, *labels: Any, **settings: Any
) -> tuple[Tensor, Tensor]:
    """Return (loss, logarithms): the cross-entropy of `scores` with classes in dimension 1, and the
    log-probabilities. With `group`, the classes are sharded. `loss` computes the loss from the
    log-probabilities and the other arguments.
    """
    group = settings.get("group")
    logarithms = (
        F.log_softmax(scores, 1) if group is None else sharded_log_softmax(scores, 1, group)
    )
    return loss(logarithms, *labels, **settings), logarithms


cross_entropy = partial(_loss_and_logarithms, F.nll_loss)
sharded_cross_entropy_and_logarithms = partial(_loss_and_logarithms, sharded_nll)
cross_entropy_and_logarithms_partial = partial(_loss_and_logarithms, nll_partial)


def label_weights(
    labels: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """Return the weight of each label: 0 if the label is ignored, otherwise the weight of its
    class, or 1 if `weight` is None.
    """
    counts = labels != ignore_index
    return (
        counts.to(dtype)
        if weight is None
        else weight.to(dtype)[labels.masked_fill(~counts, 0)] * counts
    )


Dims = tuple[int, ...]


class _Standardize(torch.autograd.Function):
    """(x - mean) / deviation over dimensions that are sharded. The deviation is sqrt(variance +
    epsilon). If `epsilon` is None, it is sqrt(variance) + 1e-9, as ONNX defines for
    MeanVarianceNormalization.
    """

    @staticmethod
    def forward(
        context: Any, x: Tensor, dims: Dims, epsilon: float | None, group: Group
    ) -> tuple[Tensor, Tensor, Tensor]:
        variance, mean = (
            each.double() for each in torch.var_mean(x, dims, correction=0, keepdim=True)
        )
        mean, square = (
            group.sum_over_ranks(torch.stack((mean, variance + mean.square()))) / group.size
        ).unbind()
        variance = (square - mean.square()).clamp_min_(0)
        factor = (
            1 / (torch.sqrt(variance) + 1e-9)
            if epsilon is None
            else torch.rsqrt(variance + epsilon)
        )
        mean = mean.to(x.dtype)
        variance = variance.to(x.dtype)
        factor = factor.to(x.dtype)
        y = (x - mean) * factor
        context.dims = dims
        context.group = group
        context.count = math.prod(x.shape[dim] for dim in dims) * group.size
        context.save_for_backward(y, factor)
        context.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        y, factor = context.saved_tensors
        gradient = gradients[0]
        sums = torch.stack(
            (
                gradient.sum(context.dims, keepdim=True),
                (gradient * y).sum(context.dims, keepdim=True),
            )
        )
        mean, slope = (context.group.sum_over_ranks(sums) / context.count).unbind()
        return (gradient - mean - y * slope) * factor, None, None, None


def _standardize(
    x: Tensor, dims: Dims, epsilon: float | None, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, mean, variance). y is this rank's shard of x, standardized over the dimensions
    `dims`, which are sharded over the ranks of the group. Mean and variance are those over all
    ranks.
    """
    y, mean, variance = _Standardize.apply(  # type: ignore[no-untyped-call]
        at_least_float32(x), dims, epsilon, group
    )
    return y.to(x.dtype), mean, variance


def _scale_channels(y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Return y · scale + bias in the type of y, with one scale and one bias per channel (dimension
    1).
    """
    shape = (-1, *[1] * (y.dim() - 2))
    return (y * scale.reshape(shape) + bias.reshape(shape)).to(y.dtype)


def batch_norm_by(
    x: Tensor, mean: Tensor, variance: Tensor, scale: Tensor, bias: Tensor, epsilon: float
) -> Tensor:
    """Return x normalized by a mean and a variance per channel, which other operators of the graph
    have computed. Unlike `F.batch_norm`, this function computes gradients of the mean and the
    variance.
    """
    shape = (-1, *[1] * (x.dim() - 2))
    return _scale_channels(
        (x - mean.reshape(shape)) * torch.rsqrt(variance.reshape(shape) + epsilon), scale, bias
    )


def sharded_layer_norm(
    x: Tensor, dims: Dims, scale: Tensor, bias: Tensor | None, epsilon: float, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, mean, 1 / deviation) of a layer normalization over `dims`, the last dimensions of
    x, which are sharded. y, scale and bias are this rank's shards.
    """
    y, mean, variance = _standardize(as_float32_under_autocast(x), dims, epsilon, group)
    y = y * scale
    return y if bias is None else y + bias, mean, torch.rsqrt(variance + epsilon)


def sharded_rms_norm(x: Tensor, dims: Dims, scale: Tensor, epsilon: float, group: Group) -> Tensor:
    """Return this rank's shard of an RMS normalization over `dims`, the last dimensions of x, which
    are sharded.
    """
    x = as_float32_under_autocast(x)
    data = at_least_float32(x)
    squares = group.all_reduce(data.square().sum(dims, keepdim=True))
    count = math.prod(x.shape[dim] for dim in dims) * group.size
    return (data * torch.rsqrt(squares / count + epsilon)).to(x.dtype) * scale


def skip_layer_norm(
    x: Tensor,
    skip: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    group: Group | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (y, mean, 1 / deviation, sum). sum is x + skip + bias; y is its layer normalization
    over the last dimension, with `scale` and `shift`. With `group`, the last dimension is sharded.
    """
    total = x + skip if bias is None else x + skip + bias
    if group is not None:
        return *sharded_layer_norm(total, (-1,), scale, shift, epsilon, group), total
    return *torch.native_layer_norm(total, scale.shape, scale, shift, epsilon), total


def skip_rms_norm(
    x: Tensor,
    skip: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    epsilon: float,
    group: Group | None = None,
) -> tuple[Tensor, None, None, Tensor]:
    """Return (y, None, None, sum). sum is x + skip + bias; y is its RMS normalization over the last
    dimension. With `group`, the last dimension is sharded.
    """
    total = x + skip if bias is None else x + skip + bias
    if group is not None:
        return sharded_rms_norm(total, (-1,), scale, epsilon, group), None, None, total
    return F.rms_norm(total, scale.shape, scale, epsilon), None, None, total


def batch_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    momentum: float,
    epsilon: float,
    group: Group | None = None,
    running: RunningStatistics | None = None,
    unbiased: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Normalize x by the statistics of the batch; with `group`, of the batches of all its ranks.

    Return (y, updated running mean, updated running variance, batch mean, batch variance). `mean`
    and `variance` are the running values; `momentum` is their weight in the updated values. The
    batch variance is the biased variance, as in ONNX; if `unbiased`, the unbiased estimate, as in
    torch.

    If `running` is given, the batch statistics are recorded in it. In a validation
    (`running.training` is false), x is normalized by the running values instead, which are returned
    as all statistics.
    """
    if running is not None and not running.training:
        return (
            F.batch_norm(x, mean, variance, scale, bias, eps=epsilon),
            mean,
            variance,
            mean,
            variance,
        )
    axes = tuple(axis for axis in range(x.dim()) if axis != 1)
    if group is None:
        y = F.batch_norm(x, None, None, scale, bias, training=True, eps=epsilon)
        own_variance, own_mean = torch.var_mean(x.detach().to(mean.dtype), axes, correction=0)
    else:
        y, own_mean, own_variance = _standardize(x, axes, epsilon, group)
        y = _scale_channels(y, scale, bias)
        own_mean, own_variance = (
            each.reshape(-1).to(mean.dtype) for each in (own_mean, own_variance)
        )
    if unbiased:
        count = x.numel() // x.shape[1] * (1 if group is None else group.size)
        own_variance = own_variance * (count / max(count - 1, 1))
    if running is not None:
        running.record(mean, own_mean, momentum)
        running.record(variance, own_variance, momentum)
    moved_mean = mean * momentum + own_mean * (1 - momentum)
    moved_variance = variance * momentum + own_variance * (1 - momentum)
    return y, moved_mean, moved_variance, own_mean, own_variance


sharded_skip_layer_norm = skip_layer_norm
sharded_skip_rms_norm = skip_rms_norm
sharded_batch_norm = batch_norm


def sharded_instance_norm(
    x: Tensor, scale: Tensor, bias: Tensor, epsilon: float, group: Group
) -> Tensor:
    """Return this rank's shard of an instance normalization of x, whose spatial dimensions are
    sharded.
    """
    return _scale_channels(
        _standardize(x, tuple(range(2, x.dim())), epsilon, group)[0], scale, bias
    )


def sharded_group_norm(
    x: Tensor, groups: int, scale: Tensor, bias: Tensor, epsilon: float, group: Group
) -> Tensor:
    """Return this rank's shard of a group normalization of x into `groups` groups of channels. The
    elements of each group are sharded.
    """
    x = as_float32_under_autocast(x)
    y = _standardize(x.reshape(x.shape[0], groups, -1), (2,), epsilon, group)[0]
    return _scale_channels(y.reshape(x.shape), scale, bias)


def mean_variance_norm(x: Tensor, axes: Dims, group: Group | None = None) -> Tensor:
    """Return (x - mean) / (standard deviation + 1e-9), computed over the dimensions `axes`. With
    `group`, these dimensions are sharded.
    """
    if group is not None:
        return _standardize(x, axes, None, group)[0]
    variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    return (x - mean) / (torch.sqrt(variance) + 1e-9)


sharded_mean_variance_norm = mean_variance_norm


def sharded_normalize(x: Tensor, p: int, dim: int, group: Group) -> Tensor:
    """Return this rank's shard of x, divided by the p-norm of x along `dim`, which is sharded. p is
    1 or 2.
    """
    data = at_least_float32(x)
    if p == 1:
        norm = group.all_reduce(data.abs().sum(dim, keepdim=True)).clamp_min(1e-12)
    else:
        norm = group.all_reduce(data.square().sum(dim, keepdim=True)).clamp_min(1e-24).sqrt()
    return (data / norm).to(x.dtype)


def sharded_extreme(x: Tensor, dims: Dims, keepdim: bool, largest: bool, group: Group) -> Tensor:
    """Return the maximum (if `largest`) or minimum of x over the dimensions `dims`, which are
    sharded. If several elements are extreme, each gets an equal part of the gradient.
    """
    found: Tensor = _Extreme.apply(  # type: ignore[no-untyped-call]
        at_least_float32(x), dims, largest, group
    )
    return found.to(x.dtype) if keepdim else found.to(x.dtype).squeeze(dims)


def sharded_norm(x: Tensor, dims: Dims, keepdim: bool, group: Group) -> Tensor:
    """Return the 2-norm of x over the dimensions `dims`, which are sharded. If the norm is 0, its
    gradient is 0.
    """
    squares = group.all_reduce(at_least_float32(x).square().sum(dims, keepdim=True))
    tiny = torch.finfo(squares.dtype).tiny
    norm = torch.where(squares > 0, squares.clamp_min(tiny).sqrt(), torch.zeros_like(squares))
    return norm.to(x.dtype) if keepdim else norm.to(x.dtype).squeeze(dims)


def sharded_log_sum(x: Tensor, dims: Dims, keepdim: bool, group: Group) -> Tensor:
    """Return the logarithm of the sum of x over the dimensions `dims`, which are sharded."""
    return group.all_reduce(at_least_float32(x).sum(dims, keepdim)).log().to(x.dtype)


def sharded_log_sum_exp(x: Tensor, dims: Dims, keepdim: bool, group: Group) -> Tensor:
    """Return the logarithm of the sum of exp(x) over the dimensions `dims`, which are sharded."""
    data = at_least_float32(x)
    largest = group.max_over_ranks(data.amax(dims, keepdim=True))
    largest = torch.where(largest.isinf(), torch.zeros_like(largest), largest)
    total = group.all_reduce((data - largest).exp().sum(dims, keepdim=True)).log() + largest
    return total.to(x.dtype) if keepdim else total.to(x.dtype).squeeze(dims)


def sharded_index_of_extreme(
    x: Tensor, dim: int, keepdim: bool, largest: bool, last: bool, group: Group
) -> Tensor:
    """Return the index along `dim`, which is sharded, of the maximum (if `largest`) or minimum of
    x, in the full tensor. Of several equal elements, the first counts, or the last if `last`.
    """
    data = at_least_float32(x) if largest else -at_least_float32(x)
    extent = x.shape[dim]
    local = (
        extent - 1 - data.flip(dim).argmax(dim, keepdim=True)
        if last
        else data.argmax(dim, keepdim=True)
    )
    value = data.gather(dim, local)
    place = local + group.position * extent
    sign = 1 if last else -1
    lowest = torch.full_like(place, torch.iinfo(place.dtype).min)
    found = sign * group.max_over_ranks(
        torch.where(value == group.max_over_ranks(value), sign * place, lowest)
    )
    return found if keepdim else found.squeeze(dim)


class _Extreme(torch.autograd.Function):
    """Maximum or minimum over sharded dimensions."""

    @staticmethod
    def forward(context: Any, x: Tensor, dims: Dims, largest: bool, group: Group) -> Tensor:
        if largest:
            found = group.max_over_ranks(x.amax(dims, keepdim=True))
        else:
            found = -group.max_over_ranks(-x.amin(dims, keepdim=True))
        context.dims = dims
        context.group = group
        context.save_for_backward(x, found)
        return found

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        x, found = context.saved_tensors
        hit = (x == found).to(x.dtype)
        told = torch.stack((gradients[0], hit.sum(context.dims, keepdim=True)))
        gradient, count = context.group.sum_over_ranks(told).unbind()
        return hit * (gradient / count), None, None, None
