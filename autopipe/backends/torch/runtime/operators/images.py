"""Convolutions, pools, resizes and regions of images as ONNX defines them and torch does not;
Fourier transforms. Pads are in the order of `F.pad`. Complex numbers are pairs in a last dimension
of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.backends.torch.runtime.operators.misc import along, centre, nonzero, requantize

Extents = tuple[int, ...]
_CONV = (F.conv1d, F.conv2d, F.conv3d)
_CONV_TRANSPOSE = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_AVERAGE = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    strides: Extents,
    dilations: Extents,
    groups: int,
    crop: Extents,
) -> Tensor:
    """Transposed convolution whose whole result is cropped (negative) or filled up (positive), as
    `F.pad` counts.
    """
    full = _CONV_TRANSPOSE[x.dim() - 3](x, weight, None, strides, 0, 0, groups, dilations)
    cropped = F.pad(full, crop)
    return cropped if bias is None else cropped + along(bias, 1, x.dim())


def conv_integer(
    x: Tensor,
    weight: Tensor,
    x_zero_point: Tensor | None,
    weight_zero_point: Tensor | None,
    *window: Any,
) -> Tensor:
    """Convolution of integers less their zero points, as int32; `window` as in `conv_quantized`."""
    return _exact_conv(x, x_zero_point, weight, weight_zero_point, None, window).to(torch.int32)


def conv_quantized(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    *window: Any,
) -> Tensor:
    """Convolution of quantised numbers, quantised; the bias counts in units of `x_scale *
    weight_scale`. `window` is the strides, the pads, the dilations and the number of groups.
    """
    product = _exact_conv(x, x_zero_point, weight, weight_zero_point, bias, window)
    return requantize(
        product, x_scale.double() * weight_scale.double() / scale.double(), zero_point, dtype
    )


def _exact_conv(
    x: Tensor,
    x_zero_point: Tensor | None,
    weight: Tensor,
    weight_zero_point: Tensor | None,
    bias: Tensor | None,
    window: tuple[Any, ...],
) -> Tensor:
    """Convolution in float64 of integers less their zero points. Pads hold the zero point, hence
    0.
    """
    (strides, pads, dilations, groups) = window
    kernel = centre(weight, weight_zero_point)
    bias = None if bias is None else bias.double()
    return _CONV[x.dim() - 3](
        F.pad(centre(x, x_zero_point), pads), kernel, bias, strides, 0, dilations, groups
    )


def deform_conv(
    x: Tensor,
    weight: Tensor,
    offset: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    strides: Extents,
    begin: Extents,
    dilations: Extents,
    groups: int,
    offset_groups: int,
) -> Tensor:
    """Deformable convolution of images: each tap of each window reads at its own offset,
    bilinearly. x is [n, c, h, w], offset [n, offset_groups * kh * kw * 2, oh, ow], mask [n,
    offset_groups * kh * kw, oh, ow]. Dai et al., "Deformable Convolutional Networks", 2017; with a
    mask, Zhu et al., 2019.
    """
    batch, channels, height, width = x.shape
    kh, kw = weight.shape[2:]
    oh, ow = offset.shape[2:]
    taps = kh * kw
    shifts = offset.reshape(batch, offset_groups, taps, 2, oh, ow)

    def base(axis: int, count: int) -> Tensor:
        """[kernel, count]: where each tap of each window reads before its offset."""
        starts = torch.arange(count, device=x.device, dtype=x.dtype) * strides[axis] - begin[axis]
        steps = (
            torch.arange(weight.shape[2 + axis], device=x.device, dtype=x.dtype) * dilations[axis]
        )
        return steps[:, None] + starts

    rows = shifts[:, :, :, 0] + base(0, oh)[:, None, :, None].expand(kh, kw, oh, ow).reshape(
        taps, oh, ow
    )
    columns = shifts[:, :, :, 1] + base(1, ow)[None, :, None, :].expand(kh, kw, oh, ow).reshape(
        taps, oh, ow
    )
    images = x.reshape(batch * offset_groups, channels // offset_groups, height, width)
    grid = torch.stack(
        (2 * columns / max(width - 1, 1) - 1, 2 * rows / max(height - 1, 1) - 1), dim=-1
    ).reshape(batch * offset_groups, taps, oh * ow, 2)
    read = F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=True)
    read = read.reshape(batch, offset_groups, channels // offset_groups, taps, oh, ow)
    if mask is not None:
        read = read * mask.reshape(batch, offset_groups, 1, taps, oh, ow)
    columns_by_group = read.reshape(batch, groups, channels // groups * taps, oh * ow)
    kernels = weight.reshape(groups, weight.shape[0] // groups, -1)
    result = torch.matmul(kernels, columns_by_group).reshape(batch, weight.shape[0], oh, ow)
    return result if bias is None else result + bias.reshape(-1, 1, 1)


def _windows(padded: Tensor, kernel: Extents, strides: Extents, dilations: Extents) -> Tensor:
    """[n, c, *o, *k]: a view of every window's elements."""
    for axis, (size, stride, dilation) in enumerate(
        zip(kernel, strides, dilations, strict=True), 2
    ):
        padded = padded.unfold(axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    return padded


def average_pool(
    x: Tensor,
    kernel: Extents,
    strides: Extents,
    dilations: Extents,
    pads: Extents,
    counted: Extents,
) -> Tensor:
    """Mean of each window of x padded by `pads`; of those pads only what lies within `counted` is
    counted.
    """

    def means(padded: Tensor) -> Tensor:
        if set(dilations) == {1}:
            return _AVERAGE[len(kernel) - 1](padded, kernel, strides)
        return _windows(padded, kernel, strides, dilations).mean(tuple(range(-len(kernel), 0)))

    ones = F.pad(
        torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device), counted, value=1.0
    )
    rest = tuple(pad - known for pad, known in zip(pads, counted, strict=True))
    return means(F.pad(x, pads)) / means(F.pad(ones, rest))


def lp_pool(
    x: Tensor, kernel: Extents, strides: Extents, dilations: Extents, pads: Extents, power: int
) -> Tensor:
    windows = _windows(F.pad(x, pads), kernel, strides, dilations)
    norms: Tensor = torch.linalg.vector_norm(windows, power, tuple(range(-len(kernel), 0)))
    return norms


def max_pool_with_indices(
    x: Tensor, kernel: Extents, strides: Extents, dilations: Extents, pads: Extents, order: int
) -> tuple[Tensor, Tensor]:
    """Largest of each window and its index in the whole of x, laid out by rows (`order` 0) or
    columns (1).
    """
    values = x if x.is_floating_point() else x.float()
    rank = len(kernel)
    windows = _windows(F.pad(values, pads, value=-math.inf), kernel, strides, dilations).flatten(
        -rank
    )
    largest, places = windows.max(-1)
    spatial = range(2, x.dim())
    index = torch.zeros(x.shape, dtype=torch.int64, device=x.device)
    distance = 1  # Between neighbours along an axis: the innermost first.
    for axis in (*(spatial if order else reversed(spatial)), 1, 0):
        index += along(torch.arange(x.shape[axis], device=x.device) * distance, axis, x.dim())
        distance *= x.shape[axis]
    indices = _windows(F.pad(index, pads), kernel, strides, dilations).flatten(-rank)
    found = torch.gather(indices, -1, places.unsqueeze(-1)).squeeze(-1)
    return largest.to(x.dtype), found


def max_unpool(x: Tensor, indices: Tensor, inferred: Extents, shape: Extents) -> Tensor:
    """Zeros of `inferred` with x at `indices` into it, then padded at the end to `shape`."""
    flat = torch.zeros(math.prod(inferred), dtype=x.dtype, device=x.device)
    filled = flat.scatter(0, indices.reshape(-1), x.reshape(-1)).reshape(inferred)
    return F.pad(
        filled,
        [pad for axis in reversed(range(len(shape))) for pad in (0, shape[axis] - inferred[axis])],
    )


ResizedAxis = tuple[int, int, float, float, float]
"""Axis, extent after, scale, and where the part that is read starts and ends (0 to 1)."""
_ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {  # else upwards
    "round_prefer_floor": lambda places: torch.ceil(places - 0.5),
    "round_prefer_ceil": lambda places: torch.floor(places + 0.5),
    "floor": torch.floor,
}


def resize(
    x: Tensor,
    axes: Sequence[ResizedAxis],
    mode: str,
    places: str,
    *,
    rounding: str = "round_prefer_floor",
    coefficient: float = -0.75,
    antialias: bool = False,
    exclude_outside: bool = False,
    outside: float = 0.0,
) -> Tensor:
    """x resized along `axes`. `places` names the rule from places of the result to places of x,
    `rounding` that of nearest neighbours, `coefficient` the cubic kernel's (Keys, 1981); `outside`
    is what lies beyond the part read.
    """
    for resized in axes:
        axis = resized[0]
        extent = x.shape[resized[0]]
        source = _places(resized, extent, places, x.device)
        beyond = (source < 0) | (source > extent - 1)
        if mode == "nearest":
            index = _ROUNDINGS.get(rounding, torch.ceil)(source).long().clamp(0, extent - 1)
            x = x.index_select(axis, index)
        else:
            support = 1 if mode == "linear" else 2
            taps, weights = _taps(
                source, support, coefficient, min(resized[2], 1.0) if antialias else 1.0
            )
            if exclude_outside:
                weights = weights * ((taps >= 0) & (taps < extent))
                weights = weights / weights.sum(1, keepdim=True)
            read = x.index_select(axis, taps.clamp(0, extent - 1).flatten()).unflatten(
                axis, taps.shape
            )
            factors = weights.to(x.dtype).reshape(*weights.shape, *[1] * (x.dim() - axis - 1))
            x = (read * factors).sum(axis + 1)
        if places == "tf_crop_and_resize":
            x = x.masked_fill(along(beyond, axis, x.dim()), outside)
    return x


def _places(resized: ResizedAxis, extent: int, rule: str, device: torch.device) -> Tensor:
    """Where each element of the result lies in x, as float64."""
    _, count, scale, start, stop = resized
    spots = torch.arange(count, dtype=torch.float64, device=device)
    width = scale * extent
    if rule == "align_corners":
        return torch.zeros_like(spots) if width == 1 else spots * (extent - 1) / (width - 1)
    if rule == "asymmetric":
        return spots / scale
    if rule == "tf_half_pixel_for_nn":
        return (spots + 0.5) / scale
    if rule == "tf_crop_and_resize":
        span = (stop - start) * (extent - 1)
        return start * (extent - 1) + (
            spots * 0 + span / 2 if width == 1 else spots * span / (width - 1)
        )
    if rule == "pytorch_half_pixel" and width == 1:
        return torch.full_like(spots, -0.5)
    shift = extent / 2 * (1 - count / width) if rule == "half_pixel_symmetric" else 0.0
    return shift + (spots + 0.5) / scale - 0.5


def _taps(
    places: Tensor, support: int, coefficient: float, stretch: float
) -> tuple[Tensor, Tensor]:
    """Elements of x that each element of the result reads, and their weights: two tensors [result,
    taps].
    """
    first = math.floor(-support / stretch) + 1
    offsets = torch.arange(first, 2 - first, device=places.device)
    base = torch.ceil(places) - 1
    distance = ((offsets - (places - base)[:, None]) * stretch).abs()
    if support == 1:
        weights = (1 - distance).clamp(min=0)
    else:
        near = ((coefficient + 2) * distance - (coefficient + 3)) * distance**2 + 1
        far = (
            (coefficient * distance - 5 * coefficient) * distance + 8 * coefficient
        ) * distance - 4 * coefficient
        weights = torch.where(
            distance <= 1, near, torch.where(distance < 2, far, torch.zeros_like(far))
        )
    return base.long()[:, None] + offsets, weights / weights.sum(1, keepdim=True)


def roi_align(
    images: Tensor,
    regions: Tensor,
    owners: Tensor,
    *,
    size: tuple[int, int],
    samples: int,
    scale: float,
    half_pixel: bool,
    largest: bool,
) -> Tensor:
    """Each region [x1, y1, x2, y2] of `images[owner]` as `size` bins of bilinear samples, averaged
    or the largest. `samples` a bin and axis, or as many as the bin has pixels where 0. He et al.,
    "Mask R-CNN", 2017; the largest is taken over the four weighted neighbours of every sample, as
    ONNX defines.
    """
    starts, ends = (
        (regions.detach() * scale - (0.5 if half_pixel else 0.0))
        .reshape(-1, 2, 2)
        .flip(2)
        .unbind(1)
    )
    extents = (ends - starts).clamp(min=-math.inf if half_pixel else 1.0)
    if samples:
        return _aligned(images, starts, extents, owners, size, (samples, samples), largest)
    # How many samples there are is known to the device alone: it is asked once.
    counts = (
        torch.stack([extents[:, axis] / size[axis] for axis in range(2)], 1)
        .ceil()
        .clamp(min=1)
        .int()
        .tolist()
    )
    parts = (each.split(1) for each in (starts, extents, owners))
    found = [
        _aligned(images, start, extent, owner, size, count, largest)
        for start, extent, owner, count in zip(*parts, counts, strict=False)
    ]
    return torch.cat(found) if found else images.new_zeros((0, images.shape[1], *size))


def _aligned(
    images: Tensor,
    starts: Tensor,
    extents: Tensor,
    owners: Tensor,
    size: tuple[int, int],
    samples: Sequence[int],
    largest: bool,
) -> Tensor:
    """Regions that start at rows and columns `starts` [n, 2], all with `samples` a bin, down and
    across.
    """
    (rows, is_in_y), (columns, is_in_x) = (
        _samples(
            starts[:, axis, None],
            extents[:, axis, None],
            size[axis],
            samples[axis],
            images.shape[2 + axis],
        )
        for axis in range(2)
    )
    inside = (is_in_y[:, :, None] & is_in_x[:, None, :]).to(images.dtype)
    parts = [
        # Indices on both sides of a whole dimension put it last: [n, rows, columns, channels].
        images[owners[:, None, None], :, y[:, :, None], x[:, None, :]]
        * (wy[:, :, None] * wx[:, None, :] * inside).unsqueeze(3)
        for y, wy in rows
        for x, wx in columns
    ]
    merged: Tensor = torch.stack(parts).amax(0) if largest else torch.stack(parts).sum(0)
    binned: Tensor = (
        merged.permute(0, 3, 1, 2)
        .unflatten(3, (size[1], samples[1]))
        .unflatten(2, (size[0], samples[0]))
    )
    return binned.amax((3, 5)) if largest else binned.mean((3, 5))


def _samples(
    starts: Tensor, extents: Tensor, bins: int, samples: int, pixels: int
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Of all bins of [start, start + extent), [n, 1] each, the pixels before and behind each
    sample, their weights, and if it is inside of the image: [n, bins * samples].
    """
    numbers = torch.arange(bins * samples, device=starts.device, dtype=starts.dtype)
    places = starts + (numbers + 0.5) * (extents / bins / samples)
    clamped = places.clamp(0, pixels - 1)
    low = clamped.floor().long()
    inside = (places >= -1.0) & (places <= pixels)
    weight = clamped - low
    return [(low, 1 - weight), ((low + 1).clamp(max=pixels - 1), weight)], inside


def max_roi_pool(images: Tensor, regions: Tensor, *, size: tuple[int, int], scale: float) -> Tensor:
    """The largest pixels of `size` bins of each region [image, x1, y1, x2, y2], whose corners are
    rounded to pixels and belong to it; 0 where a bin has no pixel. Girshick, "Fast R-CNN", 2015.
    """
    corners = regions[:, 1:].detach() * scale
    corners = torch.where(corners < 0, (corners - 0.5).ceil(), (corners + 0.5).floor())
    pooled = images[regions[:, 0].long()]
    empty = torch.zeros((), dtype=torch.bool, device=images.device)
    for axis in (3, 2):
        start = corners[:, 3 - axis]
        count = size[axis - 2]
        extent = (corners[:, 5 - axis] - start + 1).clamp(min=1) / count
        bins = torch.arange(count + 1, device=images.device)[:, None] * extent
        places = torch.arange(images.shape[axis], device=images.device)
        inside = (places >= (bins[:-1].floor() + start)[..., None]) & (
            places < (bins[1:].ceil() + start)[..., None]
        )
        shape = [
            -1,
            1,
            *([1] * (axis - 2)),
            len(places),
            *([1] * (3 - axis)),
        ]  # Of a bin's regions and pixels.
        pooled = torch.stack(
            [pooled.masked_fill(~each.view(shape), -math.inf).amax(axis) for each in inside], axis
        )
        shape[axis] = count
        empty = empty | ~inside.any(2).t().reshape(shape)
    return pooled.masked_fill(empty, 0.0)


def suppressed(
    boxes: Tensor,
    scores: Tensor,
    most: int,
    overlap: float | Tensor = 0.0,
    least: float | Tensor | None = None,
    *,
    corners: bool = False,
) -> Tensor:
    """Of boxes [images, boxes, 4] with scores [images, classes, boxes] for each class those that
    are kept, by their numbers and in the order of their scores: [images, classes, most], -1 behind
    the last. Left out are those whose score is not above `least`, and those that share with one
    kept before more than `overlap` of what both cover. Boxes are two opposite corners, or else a
    center and its extents.
    """
    places = boxes.detach().float().movedim(2, 0)[:, :, None]  # [4, images, 1, boxes]
    one, two = places.split(2)
    low, high = (
        (torch.minimum(one, two), torch.maximum(one, two))
        if corners
        else (one - two / 2, one + two / 2)
    )
    area = (high - low).prod(0)
    count = scores.shape[2]
    scores = scores.detach().float()
    order = scores.argsort(dim=2, descending=True, stable=True)
    rank = order.argsort(2)
    kept = []
    left = torch.ones_like(scores, dtype=torch.bool) if least is None else scores > least
    for _ in range(most):
        best = torch.where(left, rank, count).amin(2, keepdim=True)
        number = order.gather(2, best.clamp(max=count - 1))
        kept.append(torch.where(best < count, number, -1))
        own_low, own_high, own_area = (_picked(each, number) for each in (low, high, area))
        extents = torch.minimum(high, own_high) - torch.maximum(low, own_low)
        shared = extents.prod(0)
        both = area + own_area - shared
        real = (extents > 0).all(0) & (shared > 0) & (area > 0) & (own_area > 0) & (both > 0)
        left = left & (rank > best) & ~(real & (shared / both > overlap))
    return torch.cat(kept, 2) if kept else order[..., :0]


def _picked(facts: Tensor, number: Tensor) -> Tensor:
    """Of facts [..., images, 1, boxes] those of boxes [images, classes, 1]."""
    outer = facts.shape[:-3]
    spread = facts.expand(*outer, *number.shape[:2], facts.shape[-1])
    return spread.gather(-1, number.expand(*outer, *number.shape))


def rows_kept(numbers: Tensor, count: int) -> Tensor:
    """Rows [image, class, box] of the first `count` boxes that are kept."""
    places = nonzero(numbers >= 0, count)
    return torch.cat([places[:2], numbers[tuple(places)][None]]).t()


def dft(
    data: Tensor,
    dim: int,
    *,
    length: int | None = None,
    inverse: bool = False,
    onesided: bool = False,
) -> Tensor:
    """Discrete Fourier transform along `dim` of real (last extent 1) or complex (2) numbers, cut or
    zero-padded. One-sided and inverse together take one half of a spectrum back to real numbers.
    """
    signal = torch.view_as_complex(data.contiguous()) if data.shape[-1] == 2 else data.squeeze(-1)
    if inverse and onesided:
        real: Tensor = torch.fft.irfft(signal, n=length, dim=dim)
        return real.unsqueeze(-1)
    transform = torch.fft.ifft if inverse else torch.fft.rfft if onesided else torch.fft.fft
    return torch.view_as_real(transform(signal, n=length, dim=dim))


def stft(
    signal: Tensor, step: int, window: Tensor | None, length: int, *, onesided: bool
) -> Tensor:
    """Transforms of windows of `length` samples taken every `step`: `[batch, frames, bins, 2]`."""
    samples = (
        torch.view_as_complex(signal.contiguous()) if signal.shape[-1] == 2 else signal.squeeze(-1)
    )
    frames = samples.unfold(1, length, step)
    if window is not None:
        frames = frames * window
    return torch.view_as_real(torch.fft.rfft(frames) if onesided else torch.fft.fft(frames))


def hamming_window(
    length: int, *, periodic: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Hamming's window with the exact coefficients 25/46 and 21/46 that ONNX takes."""
    return torch.hamming_window(
        length, periodic, alpha=25 / 46, beta=21 / 46, dtype=dtype, device=device
    )


def mel_weights(
    bins: int,
    length: int,
    rate: int,
    low: float,
    high: float,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Triangular filters `[length // 2 + 1, bins]` on the mel scale, 2595 log10(1 + f / 700)."""
    ends = [2595 * math.log10(1 + frequency / 700) for frequency in (low, high)]
    mels = (
        torch.arange(bins + 2, dtype=torch.float64, device=device)
        * (ends[1] - ends[0])
        / (bins + 2)
        + ends[0]
    )
    places = ((length + 1) * 700 * (10 ** (mels / 2595) - 1) / rate).floor()
    lower = places[:-2]
    centres = places[1:-1]
    upper = places[2:]
    rows = torch.arange(length // 2 + 1, dtype=torch.float64, device=device)[:, None]
    weights = torch.minimum(
        (rows - lower) / (centres - lower), (upper - rows) / (upper - centres)
    ).clamp(min=0)
    # The peak is 1 also where a side has no width, and its slope is no number.
    return weights.scatter(0, centres.long()[None], 1.0).to(dtype)
