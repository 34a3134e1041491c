"""Places, paddings, normalisations, losses, quantised and drawn numbers, as ONNX defines them and
torch does not. Indices may count from the end. What is written takes the type of what it is written
into: under autocast the two may differ, which torch refuses. Products of integers are exact,
computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.backends.torch.runtime.communication.collectives import Group
from autopipe.backends.torch.runtime.operators.sharded import from_front
from autopipe.backends.torch.runtime.random_numbers.normal_numbers import standard_normal
from autopipe.backends.torch.runtime.random_numbers.philox import as_unsigned
from autopipe.backends.torch.runtime.random_numbers.random_streams import Stream
from autopipe.backends.torch.torch_interfaces import assert_async
from autopipe.ir.words import plural


def converted(
    results: Sequence[Tensor], dtypes: Sequence[torch.dtype | None]
) -> tuple[Tensor, ...]:
    """Results of an operator in the types that the model has for them."""
    return tuple(
        each if dtype is None else each.to(dtype)
        for each, dtype in zip(results, dtypes, strict=True)
    )


def bounded(count: Tensor, most: int, title: str) -> Tensor:
    """A number of rows that data tell. Raises RuntimeError, on a GPU without waiting, for more than
    `most`.
    """
    hint = f"plan with a larger --dim {title!r}=SIZE"
    assert_async(
        count <= most, f"data tell more than {most} {plural(most, 'row')} of {title!r}: {hint}"
    )
    return count


def shrink(data: Tensor, threshold: float, bias: float) -> Tensor:
    """Numbers moved towards zero by `bias`, those within `threshold` to zero."""
    below = data < -threshold
    above = data > threshold
    return torch.where(below, data + bias, torch.where(above, data - bias, torch.zeros_like(data)))


def gather_elements(data: Tensor, dim: int, indices: Tensor) -> Tensor:
    """`torch.gather` with indices that may be negative."""
    return torch.gather(data, dim, from_front(indices, data.shape[dim]))


def gather_nd(data: Tensor, indices: Tensor, batch: int) -> Tensor:
    """Slices of `data` at the tuples in the last dimension of `indices`; the first `batch`
    dimensions are shared.
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
    """`data` with `updates` written, or combined by `sum`, `prod`, `amax` or `amin`, at `indices`
    along `dim`.
    """
    places = from_front(indices, data.shape[dim])
    updates = updates.to(data.dtype)
    if reduction is None:
        return data.scatter(dim, places, updates)
    return data.scatter_reduce(dim, places, updates, reduction)


def scatter_nd(
    data: Tensor, indices: Tensor, updates: Tensor, reduction: str | None = None
) -> Tensor:
    """`data` with slices `updates` written, or combined, at the tuples in the last dimension of
    `indices`.
    """
    places = indices.unbind(-1)
    updates = updates.to(data.dtype)
    if reduction in (None, "sum"):
        return data.index_put(places, updates, accumulate=reduction == "sum")
    depth = indices.shape[-1]
    flat = torch.zeros(indices.shape[:-1], dtype=torch.int64, device=data.device)
    for extent, place in zip(data.shape[:depth], places, strict=True):
        flat = flat * extent + from_front(place, extent)
    rest = int(data[(0,) * depth].numel())
    rows = flat.reshape(-1, 1).expand(-1, rest)
    result = data.reshape(-1, rest).scatter_reduce(0, rows, updates.reshape(-1, rest), reduction)
    return result.reshape(data.shape)


def tensor_scatter(
    past: Tensor, update: Tensor, start: Tensor | None, dim: int, *, circular: bool
) -> Tensor:
    """A cache with `update` written along `dim`, for each sample (dimension 0) from its own `start`
    on.
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
    """`values[1]` at each index along a new dimension `dim`, `values[0]` elsewhere and for indices
    out of range. With `group` this rank's `depth` places of that dimension.
    """
    first, whole = (0, depth) if group is None else (group.position * depth, group.size * depth)
    places = indices.unsqueeze(dim)
    classes = along(torch.arange(depth, device=indices.device), dim, indices.dim() + 1)
    hit = from_front(places, whole) == classes + first
    return torch.where(hit, values[1], values[0])


def pad(data: Tensor, pads: Sequence[tuple[int, int]], mode: str) -> Tensor:
    """Elements added before and after each dimension (negative counts: taken away) by `reflect`,
    `edge` or `wrap`.
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
    """The first `lengths[i]` steps of sample i turned round, the rest as they are."""
    steps = torch.arange(data.shape[time], device=data.device)
    count = lengths.to(torch.int64).unsqueeze(1)
    places = torch.where(steps < count, count - 1 - steps, steps)
    if batch > time:
        places = places.T
    shape = [1] * data.dim()
    shape[time], shape[batch] = data.shape[time], data.shape[batch]
    return data.gather(time, places.reshape(shape).expand(data.shape))


def listed(values: Sequence[float], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers as a tensor [n], each written on the device: a copy from the host would wait for
    it.
    """
    made = torch.empty(len(values), dtype=dtype, device=device)
    for place, value in enumerate(values):
        made[place : place + 1].fill_(value)
    return made


def compress(data: Tensor, condition: Tensor, dim: int | None, count: int) -> Tensor:
    """The `count` slices along `dim` (elements, where it is None) for which the condition holds."""
    source, dim = (data.flatten(), 0) if dim is None else (data, dim)
    return source.index_select(dim, _first_true(condition, count))


def nonzero(data: Tensor, count: int) -> Tensor:
    """The places of the `count` elements that are not zero, [dimensions, count]."""
    rest = _first_true(data != 0, count)
    found = []
    for extent in reversed(data.shape):
        found.append(rest % extent)
        rest = rest // extent
    return torch.stack(found[::-1]) if found else rest.new_empty((0, count))


def _first_true(condition: Tensor, count: int) -> Tensor:
    """The places of the first `count` true elements in order. `torch.nonzero` would have the host
    wait for how many there are.
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
    """Patches of shape `block`, `[batch, channels · points, positions]`, added up into images of
    shape `image`.
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
        shape[i], shape[rank + i] = block[i], counts[i]
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
    """Layer normalisation whose scale and bias only broadcast to the normalised shape; also mean
    and 1 / deviation.
    """
    y, mean, inverse = torch.native_layer_norm(x, shape, None, None, epsilon)
    y = y * scale
    return y if bias is None else y + bias, mean, inverse


def local_response_norm(x: Tensor, size: int, alpha: float, beta: float, bias: float) -> Tensor:
    """Over windows of an even number of channels, which reach one channel further behind than
    before.
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
    """`saturate(round(x / scale) + zero_point)`, halves to even; one scale a tensor, a slice of
    `axis`, or a block. `limits` are those of the type, where it has less than 8 bits.
    """
    rounded = torch.round(scaled_down(x, scale, axis, block_size, precision))
    if zero_point is not None:
        rounded = rounded + _spread(zero_point, x, axis, block_size).float()
    return _saturate(rounded, dtype) if limits is None else rounded.clamp(*limits).to(dtype)


def scaled_down(
    x: Tensor,
    scale: Tensor,
    axis: int = 1,
    block_size: int = 0,
    precision: torch.dtype | None = None,
) -> Tensor:
    """`x / scale`, with scales as in `quantize_linear`."""
    spread = _spread(scale, x, axis, block_size)
    return (x / spread if precision is None else x.to(precision) / spread.to(precision)).float()


def dequantize_linear(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    dtype: torch.dtype,
    axis: int = 1,
    block_size: int = 0,
) -> Tensor:
    """`(x - zero_point) * scale`, with scale and zero point as in `quantize_linear`."""
    difference = x.float()
    if zero_point is not None:
        difference = difference - _spread(zero_point, x, axis, block_size).float()
    return (difference * _spread(scale, x, axis, block_size)).to(dtype)


def dynamic_quantize_linear(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x as uint8, its scale, and its zero point, from the range of x widened to hold 0."""
    low = torch.clamp(torch.amin(x), max=0)
    high = torch.clamp(torch.amax(x), min=0)
    span = high - low
    # By a tensor: torch multiplies by the reciprocal of a number, which is a rounding away from the
    # quotient.
    scale = torch.where(span == 0, torch.ones_like(span), span / torch.full_like(span, 255))
    zero_point = torch.round(torch.clamp(-low / scale, 0, 255))
    return (
        _saturate(torch.round(x / scale) + zero_point, torch.uint8),
        scale,
        zero_point.to(torch.uint8),
    )


_PRODUCTS = 2**24
"""Products of integers that are held at once."""


def matmul_whole(a: Tensor, b: Tensor) -> Tensor:
    """The product of stacks of integer matrices, in their own type, for which CUDA has no
    kernel.
    """
    return matmul_by_element(a, b) if a.is_cuda else torch.matmul(a, b)


def matmul_by_element(a: Tensor, b: Tensor) -> Tensor:
    """`torch.matmul` of integers, spelled out."""
    left = torch.atleast_2d(a)
    right = b if b.dim() > 1 else b.unsqueeze(1)
    shape = (
        *torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]),
        left.shape[-2],
        right.shape[-1],
    )
    result = torch.zeros(shape, dtype=a.dtype, device=a.device)
    together = max(1, _PRODUCTS // max(1, result.numel()))
    for columns, rows in zip(left.split(together, -1), right.split(together, -2), strict=True):
        result += (columns.unsqueeze(-1) * rows.unsqueeze(-3)).sum(-2, dtype=a.dtype)
    result = result if a.dim() > 1 else result.squeeze(-2)
    return result if b.dim() > 1 else result.squeeze(-1)


def matmul_integer(
    a: Tensor, b: Tensor, a_zero_point: Tensor | None, b_zero_point: Tensor | None
) -> Tensor:
    """`(a - a_zero_point) @ (b - b_zero_point)` as int32; zero points by row of a and by column of
    b.
    """
    return torch.matmul(centre(a, a_zero_point, -2), centre(b, b_zero_point, -1)).to(torch.int32)


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
    product = torch.matmul(centre(a, a_zero_point, -2), centre(b, b_zero_point, -1))
    ratio = a_scale.double() * b_scale.double() / scale.double()
    return _saturate(torch.round(product * ratio) + zero_point, dtype)


def along(values: Tensor, axis: int, rank: int) -> Tensor:
    """A vector in a shape that broadcasts along one axis of a tensor of `rank`."""
    return values.reshape([-1 if place == axis % rank else 1 for place in range(rank)])


def centre(x: Tensor, zero_point: Tensor | None, axis: int = 0) -> Tensor:
    """`x - zero_point` in float64, where it is exact; a vector of zero points goes along `axis`."""
    if zero_point is None:
        return x.double()
    point = zero_point.double()
    return x.double() - (
        along(point, axis, x.dim()) if point.dim() == 1 and point.numel() > 1 else point
    )


def requantize(
    exact: Tensor, ratio: Tensor, zero_point: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """A sum of products [n, c, ...] times `ratio` (one number or one a channel), quantised."""
    factors = along(ratio, 1, exact.dim()) if ratio.numel() > 1 else ratio.reshape(())
    rounded = torch.round(exact * factors.double())
    return _saturate(rounded if zero_point is None else rounded + zero_point, dtype)


def _spread(values: Tensor, x: Tensor, axis: int, block_size: int) -> Tensor:
    """Scales or zero points in a shape that broadcasts with x."""
    if values.numel() == 1:
        return values.reshape(())
    if block_size:
        return values.repeat_interleave(block_size, axis).narrow(axis, 0, x.shape[axis])
    return along(values, axis, x.dim()) if values.dim() == 1 else values


def _saturate(rounded: Tensor, dtype: torch.dtype) -> Tensor:
    limits = torch.iinfo(dtype)
    return torch.clamp(rounded, limits.min, limits.max).to(torch.int32).to(dtype)


def _running(
    run: Callable[..., Tensor],
    neutral: int,
    data: Tensor,
    dim: int,
    *,
    exclusive: bool,
    reverse: bool,
) -> Tensor:
    """Running results along `dim`; `exclusive` leaves out the element itself, `reverse` runs from
    the end.
    """
    source = data.flip(dim) if reverse else data
    if exclusive:
        first = torch.full_like(source.narrow(dim, 0, 1), neutral)
        source = torch.cat([first, source.narrow(dim, 0, source.shape[dim] - 1)], dim=dim)
    result = run(source, dim=dim, dtype=data.dtype)
    return result.flip(dim) if reverse else result


cumsum = partial(_running, torch.cumsum, 0)
cumprod = partial(_running, torch.cumprod, 1)


def top_k(data: Tensor, count: int, dim: int, *, largest: bool) -> tuple[Tensor, Tensor]:
    """The `count` largest or smallest along `dim`, in order, and where they lie. Among equals the
    one with the lower index comes first, which `torch.topk` does not promise.
    """
    source = (
        data.to(torch.int64) if data.dtype in (torch.uint16, torch.uint32, torch.uint64) else data
    )
    values, places = torch.sort(source, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, count).to(data.dtype), places.narrow(dim, 0, count)


def hardmax(data: Tensor, dims: tuple[int, ...]) -> Tensor:
    """One at the first largest element over `dims` (one axis, or all from one on), zero
    elsewhere.
    """
    flat = data if len(dims) == 1 else data.flatten(dims[0])
    place = flat.argmax(dim=dims[0], keepdim=True)
    return torch.zeros_like(flat).scatter(dims[0], place, 1).reshape(data.shape)


_WORDS = 1 << 32
"""Number of values of a random word."""
_LEAST = -(1 << 31)
"""Least int32."""
_MOST = (1 << 31) - 1
"""Largest int32."""


def dropout(
    data: Tensor, ratio: float | Tensor, stream: Stream, training: Tensor | bool = True
) -> Tensor:
    """Elements dropped with probability `ratio`, the others scaled up; none where `training` is
    false.
    """
    return dropout_and_mask(data, ratio, stream, training)[0]


def dropout_and_mask(
    data: Tensor,
    ratio: float | Tensor,
    stream: Stream,
    training: Tensor | bool = True,
    mask: torch.dtype = torch.bool,
) -> tuple[Tensor, Tensor]:
    if training is False:
        return data, torch.ones_like(data, dtype=mask)
    if isinstance(training, Tensor):
        ratio = training.reshape(()) * ratio
    scale: float | Tensor
    if isinstance(ratio, Tensor):
        ratio = ratio.reshape(())
        threshold = (ratio.double() * _WORDS).round().long()
        scale = torch.where(ratio < 1, 1 / (1 - ratio), 0).to(data.dtype)
        kept = stream.draw(data.shape, lambda words: as_unsigned(words) >= threshold, torch.bool)
    else:
        # Compared as signed integers: both sides are smaller by 2³¹.
        signed = round(ratio * _WORDS) + _LEAST
        scale = 1 / (1 - ratio) if ratio < 1 else 0.0
        if signed > _MOST:
            kept = torch.zeros_like(data, dtype=torch.bool)
        else:
            kept = stream.draw(data.shape, lambda words: (words ^ _LEAST) >= signed, torch.bool)
    return torch.where(kept, data * scale, 0.0), kept.to(mask)


def bernoulli(probability: Tensor, stream: Stream, dtype: torch.dtype) -> Tensor:
    """One with the probability that stands at an element's place, else zero."""
    return (_unsigned(stream, probability.shape) < probability.double() * _WORDS).to(dtype)


def uniform(
    shape: tuple[int, ...], low: float, high: float, stream: Stream, dtype: torch.dtype
) -> Tensor:
    """Return numbers from low to high, equal on every device.

    The product of 29 bits of a word and of a float32 is exact in float64, so it does not matter
    whether a compiler contracts product and sum.
    """
    step = _single(high - low) * 2.0**-29

    def make(words: Tensor) -> Tensor:
        return as_unsigned(words).bitwise_right_shift_(3).double().mul_(step).add_(low).to(dtype)

    return stream.draw(shape, make, dtype)


def normal(
    shape: tuple[int, ...], mean: float, scale: float, stream: Stream, dtype: torch.dtype
) -> Tensor:
    """Return normal numbers, equal on every device: products of two float32 are exact in float64,
    as in `uniform`.
    """
    factor = _single(scale)
    return stream.draw(
        shape,
        lambda words: standard_normal(words).double().mul_(factor).add_(mean).to(dtype),
        dtype,
    )


def _single(number: float) -> float:
    """Return the number rounded to the 24 bits of a float32."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(mantissa * 2**24), exponent - 24)


def multinomial(logarithms: Tensor, count: int, stream: Stream, dtype: torch.dtype) -> Tensor:
    """Of each row `count` classes, drawn with probabilities of which it has the logarithms, up to a
    constant.
    """
    below = logarithms.double().softmax(1).cumsum(1)
    drawn = _unsigned(stream, (len(logarithms), count)).double() / _WORDS * below[:, -1:]
    return (
        torch.searchsorted(below, drawn, right=True).clamp_(max=logarithms.shape[1] - 1).to(dtype)
    )


def _unsigned(stream: Stream, shape: tuple[int, ...]) -> Tensor:
    return stream.draw(shape, as_unsigned, torch.int64)
