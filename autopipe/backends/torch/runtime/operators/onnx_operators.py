"""Indexing, padding, normalization, quantization and random values with ONNX semantics that torch
lacks.

Negative indices count from the end. Updates are cast to the element type of the tensor into which
they are written: under autocast the types may differ, for which torch raises an error. Quantized
matmuls are computed in float64, in which they are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.backends.torch.runtime.communication.collectives import Group
from autopipe.backends.torch.runtime.operators.sharded import nonnegative_indices
from autopipe.backends.torch.runtime.random_numbers.normal_numbers import standard_normal
from autopipe.backends.torch.runtime.random_numbers.philox import as_unsigned
from autopipe.backends.torch.runtime.random_numbers.random_streams import RandomStream
from autopipe.backends.torch.torch_interfaces import assert_async
from autopipe.ir.words import plural


def converted(
    results: Sequence[Tensor], dtypes: Sequence[torch.dtype | None]
) -> tuple[Tensor, ...]:
    """Return the results of an operator in the element types `dtypes`. A result whose entry is None
    is unchanged.
    """
    return tuple(
        each if dtype is None else each.to(dtype)
        for each, dtype in zip(results, dtypes, strict=True)
    )


def bounded(count: Tensor, most: int, title: str) -> Tensor:
    """Return `count`, a number of rows that depends on data. Raise RuntimeError if it exceeds
    `most`, the planned size of the dimension named `title`. On a GPU, the host does not wait for
    this check.
    """
    hint = f"plan with a larger --dim {title!r}=SIZE"
    assert_async(
        count <= most, f"data tell more than {most} {plural(most, 'row')} of {title!r}: {hint}"
    )
    return count


def shrink(data: Tensor, threshold: float, bias: float) -> Tensor:
    """Return each element of data, moved towards zero by `bias`. Elements in [-threshold,
    threshold] become zero.
    """
    below = data < -threshold
    above = data > threshold
    return torch.where(below, data + bias, torch.where(above, data - bias, torch.zeros_like(data)))


def gather_elements(data: Tensor, dim: int, indices: Tensor) -> Tensor:
    """Return `torch.gather`, for indices that may be negative."""
    return torch.gather(data, dim, nonnegative_indices(indices, data.shape[dim]))


def gather_nd(data: Tensor, indices: Tensor, batch: int) -> Tensor:
    """Return slices of `data`. Each vector in the last dimension of `indices` is the multi-index of
    a slice. The first `batch` dimensions of both tensors are batch dimensions.
    """
    shared = data.shape[:batch]
    source = data.reshape(-1, *data.shape[batch:])
    places = indices.reshape(source.shape[0], -1, indices.shape[-1])
    sample = torch.arange(source.shape[0], device=data.device).unsqueeze(1)
    result = source[(sample, *places.unbind(-1))]
    return result.reshape(*shared, *indices.shape[batch:-1], *result.shape[2:])


def scatter_elements(
    data: Tensor, dim: int, indices: Tensor, updates: Tensor, reduction: str | None = None
) -> Tensor:
    """Return a copy of `data` with `updates` written at `indices` along `dim`. If `reduction` is
    `sum`, `prod`, `amax` or `amin`, updates are combined with the present elements instead.
    """
    places = nonnegative_indices(indices, data.shape[dim])
    updates = updates.to(data.dtype)
    if reduction is None:
        return data.scatter(dim, places, updates)
    return data.scatter_reduce(dim, places, updates, reduction)


def scatter_nd(
    data: Tensor, indices: Tensor, updates: Tensor, reduction: str | None = None
) -> Tensor:
    """Return a copy of `data` with the slices `updates` written. Each vector in the last dimension
    of `indices` is the multi-index of a slice. If `reduction` is `sum`, `prod`, `amax` or `amin`,
    updates are combined with the present elements instead.
    """
    places = indices.unbind(-1)
    updates = updates.to(data.dtype)
    if reduction in (None, "sum"):
        return data.index_put(places, updates, accumulate=reduction == "sum")
    depth = indices.shape[-1]
    flat = torch.zeros(indices.shape[:-1], dtype=torch.int64, device=data.device)
    for extent, place in zip(data.shape[:depth], places, strict=True):
        flat = flat * extent + nonnegative_indices(place, extent)
    rest = int(data[(0,) * depth].numel())
    rows = flat.reshape(-1, 1).expand(-1, rest)
    result = data.reshape(-1, rest).scatter_reduce(0, rows, updates.reshape(-1, rest), reduction)
    return result.reshape(data.shape)


def tensor_scatter(
    past: Tensor, update: Tensor, start: Tensor | None, dim: int, *, circular: bool
) -> Tensor:
    """Return a copy of the cache `past` with `update` written along `dim`, from position `start[i]`
    on for sample i (dimension 0); from 0 on if `start` is None. If `circular`, positions behind the
    end continue at 0.
    """
    places = torch.arange(update.shape[dim], device=past.device).expand(past.shape[0], -1)
    if start is not None:
        places = places + start.unsqueeze(1)
    if circular:
        places = places.remainder(past.shape[dim])
    shape = [1] * past.dim()
    shape[0], shape[dim] = places.shape
    return past.scatter(dim, places.reshape(shape).expand(update.shape), update.to(past.dtype))


def one_hot(
    indices: Tensor, depth: int, values: Tensor, dim: int, group: Group | None = None
) -> Tensor:
    """Return a tensor with a new dimension `dim` of size `depth`. It contains `values[1]` at each
    index, and `values[0]` elsewhere. For an index out of range, all elements are `values[0]`.

    With `group`, the new dimension is sharded, and `depth` is the size of a shard.
    """
    first, whole = (0, depth) if group is None else (group.position * depth, group.size * depth)
    places = indices.unsqueeze(dim)
    classes = broadcast_along(torch.arange(depth, device=indices.device), dim, indices.dim() + 1)
    hit = nonnegative_indices(places, whole) == classes + first
    return torch.where(hit, values[1], values[0])


def pad(data: Tensor, pads: Sequence[tuple[int, int]], mode: str) -> Tensor:
    """Return `data` with elements added to each dimension, (before, after) of them. `mode` is
    `reflect`, `edge` or `wrap`. Negative numbers remove elements.
    """
    for dim, (before, after) in enumerate(pads):
        if (before, after) != (0, 0):
            extent = data.shape[dim]
            places = torch.arange(-before, extent + after, device=data.device)
            if mode == "edge":
                places = places.clamp(0, extent - 1)
            elif mode == "wrap":
                places = places.remainder(extent)
            else:
                period = max(2 * (extent - 1), 1)
                places = places.remainder(period)
                places = torch.where(places < extent, places, period - places)
            data = data.index_select(dim, places)
    return data


def reverse_sequence(data: Tensor, lengths: Tensor, time: int, batch: int) -> Tensor:
    """Return `data` in which, along the dimension `time`, the first `lengths[i]` steps of sample i
    are in reversed order. `batch` is the dimension of samples.
    """
    steps = torch.arange(data.shape[time], device=data.device)
    count = lengths.to(torch.int64).unsqueeze(1)
    places = torch.where(steps < count, count - 1 - steps, steps)
    if batch > time:
        places = places.T
    shape = [1] * data.dim()
    shape[time] = data.shape[time]
    shape[batch] = data.shape[batch]
    return data.gather(time, places.reshape(shape).expand(data.shape))


def listed(values: Sequence[float], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `values` as a tensor [n]. Each value is written by a kernel on the device, because the
    host would wait for a copy to the device.
    """
    made = torch.empty(len(values), dtype=dtype, device=device)
    for place, value in enumerate(values):
        made[place : place + 1].fill_(value)
    return made


def compress(data: Tensor, condition: Tensor, dim: int | None, count: int) -> Tensor:
    """Return the first `count` slices along `dim` at which `condition` is true. If `dim` is None,
    return elements of the flattened `data`. `count` is fixed by the plan, so that the host need not
    wait for the number of true elements.
    """
    source, dim = (data.flatten(), 0) if dim is None else (data, dim)
    return source.index_select(dim, _indices_of_first_true(condition, count))


def nonzero(data: Tensor, count: int) -> Tensor:
    """Return the indices of the first `count` elements that are not zero, int64 [dimensions,
    count].
    """
    rest = _indices_of_first_true(data != 0, count)
    found = []
    for extent in reversed(data.shape):
        found.append(rest % extent)
        rest = rest // extent
    return torch.stack(found[::-1]) if found else rest.new_empty((0, count))


def _indices_of_first_true(condition: Tensor, count: int) -> Tensor:
    """Return the flattened indices of the first `count` true elements of `condition`, in order.
    Unlike with `torch.nonzero`, the host does not wait for the number of true elements.
    """
    return torch.argsort((~condition).flatten().to(torch.uint8), stable=True)[:count]


def col2im(
    data: Tensor,
    image: tuple[int, ...],
    block: tuple[int, ...],
    *,
    dilations: tuple[int, ...],
    strides: tuple[int, ...],
    pads: tuple[int, ...],
) -> Tensor:
    """Return images of spatial shape `image`: the sum of patches of shape `block` at their
    positions. `data` contains the patches, [batch, channels · elements of a patch, positions].
    """
    rank = len(block)
    padded = [image[i] + pads[i] + pads[i + rank] for i in range(rank)]
    counts = [
        (padded[i] - dilations[i] * (block[i] - 1) - 1) // strides[i] + 1 for i in range(rank)
    ]
    flat = torch.zeros((), dtype=torch.int64, device=data.device)
    for i in range(rank):
        inside = torch.arange(block[i], device=data.device) * dilations[i]
        places = torch.arange(counts[i], device=data.device) * strides[i]
        shape = [1] * (2 * rank)
        shape[i] = block[i]
        shape[rank + i] = counts[i]
        flat = flat * padded[i] + (inside.unsqueeze(1) + places).reshape(shape)
    total = math.prod(padded)
    channels = data.shape[1] // math.prod(block)
    source = data.reshape(data.shape[0], channels, -1)
    result = data.new_zeros(data.shape[0], channels, total).index_add(2, flat.flatten(), source)
    result = result.reshape(data.shape[0], channels, *padded)
    for i in range(rank):
        result = result.narrow(2 + i, pads[i], image[i])
    return result


def layer_norm(
    x: Tensor, shape: tuple[int, ...], scale: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, mean, 1 / deviation) of the layer normalization over the last dimensions `shape`.
    Unlike in torch, scale and bias need only broadcast to `shape`.
    """
    y, mean, inverse = torch.native_layer_norm(x, shape, None, None, epsilon)
    y = y * scale
    return y if bias is None else y + bias, mean, inverse


def local_response_norm(x: Tensor, size: int, alpha: float, beta: float, bias: float) -> Tensor:
    """Return x / (bias + alpha / size · s)^beta, with s the sum of squares over a window of `size`
    channels. If `size` is even, a window has one more channel after its own channel than before it.
    """
    before = (size - 1) // 2
    behind = size // 2
    squares = (x * x).movedim(1, -1)
    windows = F.pad(squares, (before, behind)).unfold(-1, size, 1).sum(-1).movedim(-1, 1)
    return x / (bias + alpha / size * windows) ** beta


def quantize_linear(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    dtype: torch.dtype,
    axis: int = 1,
    block_size: int = 0,
    precision: torch.dtype | None = None,
    limits: tuple[int, int] | None = None,
) -> Tensor:
    """Return saturate(round(x / scale) + zero_point), quantized to `dtype`. Ties are rounded to
    even. There is one scale for all of x, one per index of `axis`, or, with `block_size`, one per
    block along `axis`. `precision` is the type of the division, None for the type that torch
    chooses.

    `limits` are the smallest and the largest value of a type with fewer than 8 bits; None for other
    types.
    """
    rounded = torch.round(scaled_down(x, scale, axis, block_size, precision))
    if zero_point is not None:
        rounded = rounded + _broadcast_scales(zero_point, x, axis, block_size).float()
    return _saturate(rounded, dtype) if limits is None else rounded.clamp(*limits).to(dtype)


def scaled_down(
    x: Tensor,
    scale: Tensor,
    axis: int = 1,
    block_size: int = 0,
    precision: torch.dtype | None = None,
) -> Tensor:
    """Return x / scale as float32. There is one scale for all of x, one per index of `axis`, or,
    with `block_size`, one per block along `axis`. `precision` is the type of the division, None for
    the type that torch chooses.
    """
    spread = _broadcast_scales(scale, x, axis, block_size)
    return (x / spread if precision is None else x.to(precision) / spread.to(precision)).float()


def dequantize_linear(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    dtype: torch.dtype,
    axis: int = 1,
    block_size: int = 0,
) -> Tensor:
    """Return (x - zero_point) · scale in the type `dtype`. There is one scale and one zero point
    for all of x, one per index of `axis`, or, with `block_size`, one per block along `axis`.
    """
    difference = x.float()
    if zero_point is not None:
        difference = difference - _broadcast_scales(zero_point, x, axis, block_size).float()
    return (difference * _broadcast_scales(scale, x, axis, block_size)).to(dtype)


def dynamic_quantize_linear(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x as uint8, scale, zero point). The scale maps the range of x, extended to include 0,
    to [0, 255].
    """
    low = torch.clamp(torch.amin(x), max=0)
    high = torch.clamp(torch.amax(x), min=0)
    span = high - low
    # The divisor is a tensor, because torch would multiply by the reciprocal of a Python number,
    # which may be rounded differently.
    scale = torch.where(span == 0, torch.ones_like(span), span / torch.full_like(span, 255))
    zero_point = torch.round(torch.clamp(-low / scale, 0, 255))
    return (
        _saturate(torch.round(x / scale) + zero_point, torch.uint8),
        scale,
        zero_point.to(torch.uint8),
    )


_MAX_PRODUCTS_IN_MEMORY = 2**24
"""Maximum number of products of elements that `matmul_by_element` has in memory at one time."""


def matmul_whole(a: Tensor, b: Tensor) -> Tensor:
    """Return the matmul of integers in their own element type. CUDA has no kernel for this, so
    `matmul_by_element` is used there.
    """
    return matmul_by_element(a, b) if a.is_cuda else torch.matmul(a, b)


def matmul_by_element(a: Tensor, b: Tensor) -> Tensor:
    """Return `torch.matmul` of integers, computed by elementwise products and sums."""
    left = torch.atleast_2d(a)
    right = b if b.dim() > 1 else b.unsqueeze(1)
    shape = (
        *torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]),
        left.shape[-2],
        right.shape[-1],
    )
    result = torch.zeros(shape, dtype=a.dtype, device=a.device)
    together = max(1, _MAX_PRODUCTS_IN_MEMORY // max(1, result.numel()))
    for columns, rows in zip(left.split(together, -1), right.split(together, -2), strict=True):
        result += (columns.unsqueeze(-1) * rows.unsqueeze(-3)).sum(-2, dtype=a.dtype)
    result = result if a.dim() > 1 else result.squeeze(-2)
    return result if b.dim() > 1 else result.squeeze(-1)


def matmul_integer(
    a: Tensor, b: Tensor, a_zero_point: Tensor | None, b_zero_point: Tensor | None
) -> Tensor:
    """Return (a - a_zero_point) @ (b - b_zero_point) as int32. There may be one zero point per row
    of a and one per column of b.
    """
    return torch.matmul(
        subtract_zero_point(a, a_zero_point, -2), subtract_zero_point(b, b_zero_point, -1)
    ).to(torch.int32)


def matmul_quantized(
    a: Tensor,
    a_scale: Tensor,
    a_zero_point: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero_point: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return the matmul of quantized operands, quantized to `dtype` with `scale` and
    `zero_point`.
    """
    product = torch.matmul(
        subtract_zero_point(a, a_zero_point, -2), subtract_zero_point(b, b_zero_point, -1)
    )
    ratio = a_scale.double() * b_scale.double() / scale.double()
    return _saturate(torch.round(product * ratio) + zero_point, dtype)


def broadcast_along(values: Tensor, axis: int, rank: int) -> Tensor:
    """Return the vector `values` in a shape that broadcasts along `axis` of a tensor with `rank`
    dimensions.
    """
    return values.reshape([-1 if place == axis % rank else 1 for place in range(rank)])


def subtract_zero_point(x: Tensor, zero_point: Tensor | None, axis: int = 0) -> Tensor:
    """Return x - zero_point in float64, in which the difference of integers is exact. A vector of
    zero points has one entry per index of `axis`.
    """
    if zero_point is None:
        return x.double()
    point = zero_point.double()
    return x.double() - (
        broadcast_along(point, axis, x.dim()) if point.dim() == 1 and point.numel() > 1 else point
    )


def requantize(
    exact: Tensor, ratio: Tensor, zero_point: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return `exact` [n, c, ...] times `ratio`, quantized to `dtype` with `zero_point`. `ratio` is
    one number, or one per channel c.
    """
    factors = broadcast_along(ratio, 1, exact.dim()) if ratio.numel() > 1 else ratio.reshape(())
    rounded = torch.round(exact * factors.double())
    return _saturate(rounded if zero_point is None else rounded + zero_point, dtype)


def _broadcast_scales(values: Tensor, x: Tensor, axis: int, block_size: int) -> Tensor:
    """Return `values` in a shape that broadcasts with x. They are scales or zero points: one for
    all of x, one per index of `axis`, or, with `block_size`, one per block along `axis`.
    """
    if values.numel() == 1:
        return values.reshape(())
    if block_size:
        return values.repeat_interleave(block_size, axis).narrow(axis, 0, x.shape[axis])
    return broadcast_along(values, axis, x.dim()) if values.dim() == 1 else values


def _saturate(rounded: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rounded numbers as integers of type `dtype`, clamped to its range."""
    limits = torch.iinfo(dtype)
    return torch.clamp(rounded, limits.min, limits.max).to(torch.int32).to(dtype)


def _cumulative(
    run: Callable[..., Tensor],
    neutral: int,
    data: Tensor,
    dim: int,
    *,
    exclusive: bool,
    reverse: bool,
) -> Tensor:
    """Return the cumulative results of `run` (`torch.cumsum` or `torch.cumprod`) along `dim`, whose
    neutral element is `neutral`. If `exclusive`, an element does not include itself. If `reverse`,
    accumulation starts at the end.
    """
    source = data.flip(dim) if reverse else data
    if exclusive:
        first = torch.full_like(source.narrow(dim, 0, 1), neutral)
        source = torch.cat([first, source.narrow(dim, 0, source.shape[dim] - 1)], dim=dim)
    result = run(source, dim=dim, dtype=data.dtype)
    return result.flip(dim) if reverse else result


cumsum = partial(_cumulative, torch.cumsum, 0)
cumprod = partial(_cumulative, torch.cumprod, 1)


def top_k(data: Tensor, count: int, dim: int, *, largest: bool) -> tuple[Tensor, Tensor]:
    """Return (values, indices) of the `count` largest or smallest elements along `dim`, in order.
    Of equal elements, the one with the lower index comes first, which `torch.topk` does not
    guarantee.
    """
    source = (
        data.to(torch.int64) if data.dtype in (torch.uint16, torch.uint32, torch.uint64) else data
    )
    values, places = torch.sort(source, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, count).to(data.dtype), places.narrow(dim, 0, count)


def hardmax(data: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return 1 at the first maximum over the dimensions `dims`, and 0 elsewhere. `dims` is one
    dimension, or a dimension and all following ones.
    """
    flat = data if len(dims) == 1 else data.flatten(dims[0])
    place = flat.argmax(dim=dims[0], keepdim=True)
    return torch.zeros_like(flat).scatter(dims[0], place, 1).reshape(data.shape)


_VALUES_PER_WORD = 1 << 32
"""Number of values that a random word of 32 bits can have."""
_MIN_INT32 = -(1 << 31)
"""Smallest value of int32."""
_MAX_INT32 = (1 << 31) - 1
"""Largest value of int32."""


def dropout(
    data: Tensor, ratio: float | Tensor, stream: RandomStream, training: Tensor | bool = True
) -> Tensor:
    """Return data with each element set to 0 with probability `ratio`, and the other elements
    multiplied by 1 / (1 - ratio). If `training` is false, return the data unchanged.
    """
    return dropout_and_mask(data, ratio, stream, training)[0]


def dropout_and_mask(
    data: Tensor,
    ratio: float | Tensor,
    stream: RandomStream,
    training: Tensor | bool = True,
    mask: torch.dtype = torch.bool,
) -> tuple[Tensor, Tensor]:
    """Return (result, mask): `dropout` of data, and a mask of type `mask` that is 1 for elements
    that are kept.
    """
    if training is False:
        return data, torch.ones_like(data, dtype=mask)
    if isinstance(training, Tensor):
        ratio = training.reshape(()) * ratio
    scale: float | Tensor
    if isinstance(ratio, Tensor):
        ratio = ratio.reshape(())
        threshold = (ratio.double() * _VALUES_PER_WORD).round().long()
        scale = torch.where(ratio < 1, 1 / (1 - ratio), 0).to(data.dtype)
        kept = stream.draw(data.shape, lambda words: as_unsigned(words) >= threshold, torch.bool)
    else:
        # The random words are unsigned 32-bit numbers, stored as signed integers. 2³¹ is subtracted
        # from the words and the threshold, so that a signed comparison orders them correctly.
        signed = round(ratio * _VALUES_PER_WORD) + _MIN_INT32
        scale = 1 / (1 - ratio) if ratio < 1 else 0.0
        if signed > _MAX_INT32:
            kept = torch.zeros_like(data, dtype=torch.bool)
        else:
            kept = stream.draw(data.shape, lambda words: (words ^ _MIN_INT32) >= signed, torch.bool)
    return torch.where(kept, data * scale, 0.0), kept.to(mask)


def bernoulli(probability: Tensor, stream: RandomStream, dtype: torch.dtype) -> Tensor:
    """Return, for each element of `probability`, 1 with this probability, otherwise 0."""
    return (
        _unsigned_words(stream, probability.shape) < probability.double() * _VALUES_PER_WORD
    ).to(dtype)


def uniform(
    shape: tuple[int, ...], low: float, high: float, stream: RandomStream, dtype: torch.dtype
) -> Tensor:
    """Return random numbers from `low` to `high`, bitwise equal on every device.

    The product of 29 bits of a random 32-bit word and a float32 is exact in float64. So the result
    does not depend on whether a compiler fuses the multiplication with the addition.
    """
    step = _round_to_float32(high - low) * 2.0**-29

    def make(words: Tensor) -> Tensor:
        return as_unsigned(words).bitwise_right_shift_(3).double().mul_(step).add_(low).to(dtype)

    return stream.draw(shape, make, dtype)


def normal(
    shape: tuple[int, ...], mean: float, scale: float, stream: RandomStream, dtype: torch.dtype
) -> Tensor:
    """Return normal random numbers with this mean and with standard deviation `scale`. They are
    bitwise equal on every device, because products of two float32 are exact in float64.
    """
    factor = _round_to_float32(scale)
    return stream.draw(
        shape,
        lambda words: standard_normal(words).double().mul_(factor).add_(mean).to(dtype),
        dtype,
    )


def _round_to_float32(number: float) -> float:
    """Return a number rounded to the 24 bits of a float32's mantissa."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(mantissa * 2**24), exponent - 24)


def multinomial(logarithms: Tensor, count: int, stream: RandomStream, dtype: torch.dtype) -> Tensor:
    """Return `count` random classes for each row. `logarithms` [rows, classes] contains
    log-probabilities, up to a constant per row.
    """
    below = logarithms.double().softmax(1).cumsum(1)
    drawn = (
        _unsigned_words(stream, (len(logarithms), count)).double()
        / _VALUES_PER_WORD
        * below[:, -1:]
    )
    return (
        torch.searchsorted(below, drawn, right=True).clamp_(max=logarithms.shape[1] - 1).to(dtype)
    )


def _unsigned_words(stream: RandomStream, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of shape `shape` with random 32-bit words of a stream, as integers in [0,
    2³²), int64.
    """
    return stream.draw(shape, as_unsigned, torch.int64)
