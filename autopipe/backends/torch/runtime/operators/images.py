"""Convolutions, pooling, resizing and regions of images with ONNX semantics that torch lacks, and
Fourier transforms.

Pads are in the order of `F.pad`. A complex number is a pair in a last dimension of size 2.
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
_CONV_BY_RANK = (F.conv1d, F.conv2d, F.conv3d)
_CONV_TRANSPOSE_BY_RANK = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_AVERAGE_POOL_BY_RANK = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    strides: Extents,
    dilations: Extents,
    groups: int,
    crop: Extents,
) -> Tensor:
    """Return a transposed convolution whose full result is cropped (negative entries of `crop`) or
    padded (positive entries), in the order of `F.pad`.
    """
    full = _CONV_TRANSPOSE_BY_RANK[x.dim() - 3](x, weight, None, strides, 0, 0, groups, dilations)
    cropped = F.pad(full, crop)
    return cropped if bias is None else cropped + along(bias, 1, x.dim())


def conv_integer(
    x: Tensor,
    weight: Tensor,
    x_zero_point: Tensor | None,
    weight_zero_point: Tensor | None,
    *window: Any,
) -> Tensor:
    """Return the convolution of integers minus their zero points, as int32. `window` is as in
    `conv_quantized`.
    """
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
    """Return the quantized convolution of quantized operands. The unit of the bias is `x_scale *
    weight_scale`. `window` contains the strides, the pads, the dilations and the number of groups.
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
    """Return the convolution in float64 of integers minus their zero points. Pads have the value of
    the zero point, which is 0 after the subtraction.
    """
    (strides, pads, dilations, groups) = window
    kernel = centre(weight, weight_zero_point)
    bias = None if bias is None else bias.double()
    return _CONV_BY_RANK[x.dim() - 3](
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
    """Deformable convolution of images (Dai et al., "Deformable Convolutional Networks", 2017; with
    a mask: Zhu et al., 2019). Each tap of each window reads at its own offset, by bilinear
    interpolation.

    x is [n, c, h, w], offset is [n, offset_groups * kh * kw * 2, oh, ow], mask is [n, offset_groups
    * kh * kw, oh, ow].
    """
    batch, channels, height, width = x.shape
    kh, kw = weight.shape[2:]
    oh, ow = offset.shape[2:]
    taps = kh * kw
    shifts = offset.reshape(batch, offset_groups, taps, 2, oh, ow)

    def base(axis: int, count: int) -> Tensor:
        """Return the position [kernel, count] that each tap of each window reads without offset."""
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
    # `grid_sample` scales positions by the distance of the first and the last pixel. An image with
    # one row or one column gets a second one of zeros, because this distance would be zero.
    images = F.pad(images, (0, int(width == 1), 0, int(height == 1)))
    height, width = images.shape[2:]
    grid = torch.stack((2 * columns / (width - 1) - 1, 2 * rows / (height - 1) - 1), dim=-1)
    grid = grid.reshape(batch * offset_groups, taps, oh * ow, 2)
    read = F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=True)
    read = read.reshape(batch, offset_groups, channels // offset_groups, taps, oh, ow)
    if mask is not None:
        read = read * mask.reshape(batch, offset_groups, 1, taps, oh, ow)
    columns_by_group = read.reshape(batch, groups, channels // groups * taps, oh * ow)
    kernels = weight.reshape(groups, weight.shape[0] // groups, -1)
    result = torch.matmul(kernels, columns_by_group).reshape(batch, weight.shape[0], oh, ow)
    return result if bias is None else result + bias.reshape(-1, 1, 1)


def _windows(padded: Tensor, kernel: Extents, strides: Extents, dilations: Extents) -> Tensor:
    """Return a view [n, c, *o, *k] of the elements of each window."""
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
    """Return the mean of each window of x, padded by `pads`. The divisor counts the elements of x
    and the pads within `counted`.
    """

    def means(padded: Tensor) -> Tensor:
        if set(dilations) == {1}:
            return _AVERAGE_POOL_BY_RANK[len(kernel) - 1](padded, kernel, strides)
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
    """Return the maximum of each window, and its index in the flattened x. The spatial axes are
    flattened in row-major order (`order` 0) or column-major order (1).
    """
    values = x if x.is_floating_point() else x.float()
    rank = len(kernel)
    windows = _windows(F.pad(values, pads, value=-math.inf), kernel, strides, dilations).flatten(
        -rank
    )
    largest, places = windows.max(-1)
    spatial = range(2, x.dim())
    index = torch.zeros(x.shape, dtype=torch.int64, device=x.device)
    distance = 1  # Index distance of neighbors along the axis.
    for axis in (*(spatial if order else reversed(spatial)), 1, 0):
        index += along(torch.arange(x.shape[axis], device=x.device) * distance, axis, x.dim())
        distance *= x.shape[axis]
    indices = _windows(F.pad(index, pads), kernel, strides, dilations).flatten(-rank)
    found = torch.gather(indices, -1, places.unsqueeze(-1)).squeeze(-1)
    return largest.to(x.dtype), found


def max_unpool(x: Tensor, indices: Tensor, inferred: Extents, shape: Extents) -> Tensor:
    """Scatter x to `indices` in a flattened tensor of zeros of shape `inferred`. Return this
    tensor, padded at the end to `shape`.
    """
    flat = torch.zeros(math.prod(inferred), dtype=x.dtype, device=x.device)
    filled = flat.scatter(0, indices.reshape(-1), x.reshape(-1)).reshape(inferred)
    return F.pad(
        filled,
        [pad for axis in reversed(range(len(shape))) for pad in (0, shape[axis] - inferred[axis])],
    )


ResizedAxis = tuple[int, int, float, float, float]
"""(axis, size of the result, scale, start and end of the range that is read, in fractions from 0 to
1).
"""
_ROUNDING_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {  # Otherwise: ceil.
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
    """Return x resized along `axes`.

    `places` is ONNX's `coordinate_transformation_mode`, `rounding` its `nearest_mode`, and
    `coefficient` the coefficient of the cubic kernel (Keys, 1981). `outside` is the value of
    elements whose position is outside of x, for tf_crop_and_resize.
    """
    for resized in axes:
        axis = resized[0]
        extent = x.shape[resized[0]]
        source = _source_positions(resized, extent, places, x.device)
        beyond = (source < 0) | (source > extent - 1)
        if mode == "nearest":
            index = (
                _ROUNDING_FUNCTIONS.get(rounding, torch.ceil)(source).long().clamp(0, extent - 1)
            )
            x = x.index_select(axis, index)
        else:
            support = 1 if mode == "linear" else 2
            taps, weights = _interpolation_taps(
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


def _source_positions(resized: ResizedAxis, extent: int, rule: str, device: torch.device) -> Tensor:
    """Return the position in x of each element of the result, as float64."""
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


def _interpolation_taps(
    places: Tensor, support: int, coefficient: float, stretch: float
) -> tuple[Tensor, Tensor]:
    """Return (taps, weights), each [result, taps]: the indices in x that each element of the result
    reads, and their weights.
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
    """Return each region [x1, y1, x2, y2] of `images[owner]` as `size` bins (He et al., "Mask
    R-CNN", 2017). A bin is the mean of its bilinear samples, or their maximum if `largest`.

    `samples` is the number of samples per bin and axis. If it is 0, there is one sample per pixel
    of the bin. The maximum is over the four weighted neighbors of all samples, as ONNX defines.
    """
    starts, ends = (
        (regions.detach() * scale - (0.5 if half_pixel else 0.0))
        .reshape(-1, 2, 2)
        .flip(2)
        .unbind(1)
    )
    extents = (ends - starts).clamp(min=-math.inf if half_pixel else 1.0)
    if samples:
        return _align_regions(images, starts, extents, owners, size, (samples, samples), largest)
    # The number of samples is computed on the device: one copy to the host.
    counts = (
        torch.stack([extents[:, axis] / size[axis] for axis in range(2)], 1)
        .ceil()
        .clamp(min=1)
        .int()
        .tolist()
    )
    parts = (each.split(1) for each in (starts, extents, owners))
    found = [
        _align_regions(images, start, extent, owner, size, count, largest)
        for start, extent, owner, count in zip(*parts, counts, strict=False)
    ]
    return torch.cat(found) if found else images.new_zeros((0, images.shape[1], *size))


def _align_regions(
    images: Tensor,
    starts: Tensor,
    extents: Tensor,
    owners: Tensor,
    size: tuple[int, int],
    samples: Sequence[int],
    largest: bool,
) -> Tensor:
    """Return regions that start at rows and columns `starts` [n, 2], with equally many `samples`
    (down, across) per bin.
    """
    (rows, is_in_y), (columns, is_in_x) = (
        _bin_samples(
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
        # A slice between advanced indices becomes the last dimension: [n, rows, columns, channels].
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


def _bin_samples(
    starts: Tensor, extents: Tensor, bins: int, samples: int, pixels: int
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Return the samples of all bins of [start, start + extent) along one axis, each [n, bins *
    samples]: the pixels before and after each sample with their weights, and whether the sample is
    inside of the image.
    """
    numbers = torch.arange(bins * samples, device=starts.device, dtype=starts.dtype)
    places = starts + (numbers + 0.5) * (extents / bins / samples)
    clamped = places.clamp(0, pixels - 1)
    low = clamped.floor().long()
    inside = (places >= -1.0) & (places <= pixels)
    weight = clamped - low
    return [(low, 1 - weight), ((low + 1).clamp(max=pixels - 1), weight)], inside


def max_roi_pool(images: Tensor, regions: Tensor, *, size: tuple[int, int], scale: float) -> Tensor:
    """Return the maximum pixels of `size` bins of each region [image, x1, y1, x2, y2] (Girshick,
    "Fast R-CNN", 2015). Corners are rounded to pixels and belong to the region. A bin without
    pixels is 0.
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
        # The shape of one bin: a dimension of regions and a dimension of pixels.
        shape = [-1, 1, *([1] * (axis - 2)), len(places), *([1] * (3 - axis))]
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
    """Non-maximum suppression of boxes [images, boxes, 4] with scores [images, classes, boxes].

    Return the indices of the selected boxes per image and class, in descending order of score:
    [images, classes, most], padded with -1. A box is skipped if its score is not above `least`, or
    if its intersection over union with a box selected before is above `overlap`.

    A box consists of two opposite corners if `corners`, otherwise of its center and its sizes.
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
        own_low, own_high, own_area = (_pick_boxes(each, number) for each in (low, high, area))
        extents = torch.minimum(high, own_high) - torch.maximum(low, own_low)
        shared = extents.prod(0)
        both = area + own_area - shared
        real = (extents > 0).all(0) & (shared > 0) & (area > 0) & (own_area > 0) & (both > 0)
        left = left & (rank > best) & ~(real & (shared / both > overlap))
    return torch.cat(kept, 2) if kept else order[..., :0]


def _pick_boxes(facts: Tensor, number: Tensor) -> Tensor:
    """Return the entries of `facts` [..., images, 1, boxes] for the boxes `number` [images,
    classes, 1].
    """
    outer = facts.shape[:-3]
    spread = facts.expand(*outer, *number.shape[:2], facts.shape[-1])
    return spread.gather(-1, number.expand(*outer, *number.shape))


def rows_kept(numbers: Tensor, count: int) -> Tensor:
    """Return the rows [image, class, box] of the first `count` selected boxes."""
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
    """Return the discrete Fourier transform along `dim` of real data (last dimension of size 1) or
    complex data (size 2), cropped or zero-padded to `length`.

    With `onesided` and `inverse`, the data are one half of a spectrum, and the result is real.
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
    """Return the Fourier transforms of windows of `length` samples, at a distance of `step`
    samples: `[batch, frames, bins, 2]`.
    """
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
    """Return the Hamming window with ONNX's exact coefficients 25/46 and 21/46."""
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
    """Return triangular filters `[length // 2 + 1, bins]` on the mel scale, 2595 log10(1 + f /
    700).
    """
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
    # The peak is 1. If a side has width 0, the division gives NaN at the peak.
    return weights.scatter(0, centres.long()[None], 1.0).to(dtype)
