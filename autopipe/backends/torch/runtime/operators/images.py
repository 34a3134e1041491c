"""Convolutions, pooling, resizing and regions of images with ONNX semantics that torch lacks; and
Fourier transforms.

Pads are in the order of `F.pad`: before and after the last dimension, then the second last, and so
on. A complex number is a pair in a last dimension of size 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.backends.torch.runtime.operators.onnx_operators import (
    broadcast_along,
    nonzero,
    requantize,
    subtract_zero_point,
)

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
    """Return a transposed convolution of x. Its full result is padded by `crop`, in the order of
    `F.pad`; negative entries crop it.
    """
    full = _CONV_TRANSPOSE_BY_RANK[x.dim() - 3](x, weight, None, strides, 0, 0, groups, dilations)
    cropped = F.pad(full, crop)
    return cropped if bias is None else cropped + broadcast_along(bias, 1, x.dim())


def conv_integer(
    x: Tensor,
    weight: Tensor,
    x_zero_point: Tensor | None,
    weight_zero_point: Tensor | None,
    *window: Any,
) -> Tensor:
    """Return the convolution of integers x and weight, minus their zero points, as int32. `window`
    is (strides, pads, dilations, number of groups).
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
    """Return the convolution of quantized operands, quantized to `dtype` with `scale` and
    `zero_point`. A unit of the integer `bias` is `x_scale * weight_scale`. `window` is (strides,
    pads, dilations, number of groups).
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
    """Return the convolution in float64 of integers minus their zero points, in which it is exact.
    Padding is 0 after the subtraction of the zero point. `window` is (strides, pads, dilations,
    number of groups).
    """
    (strides, pads, dilations, groups) = window
    kernel = subtract_zero_point(weight, weight_zero_point)
    bias = None if bias is None else bias.double()
    return _CONV_BY_RANK[x.dim() - 3](
        F.pad(subtract_zero_point(x, x_zero_point), pads),
        kernel,
        bias,
        strides,
        0,
        dilations,
        groups,
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
    """Return a deformable convolution of images (Dai et al., "Deformable Convolutional Networks",
    2017; with a mask: Zhu et al., 2019). Each tap (element of the kernel) reads x at an offset of
    its own in each window, by bilinear interpolation.

    x is [n, c, h, w], offset is [n, offset_groups * kh * kw * 2, oh, ow], mask is [n, offset_groups
    * kh * kw, oh, ow]; kh and kw are the sizes of the kernel. `begin` are the pads before each
    spatial axis.
    """
    batch, channels, height, width = x.shape
    kh, kw = weight.shape[2:]
    oh, ow = offset.shape[2:]
    taps = kh * kw
    shifts = offset.reshape(batch, offset_groups, taps, 2, oh, ow)

    def unshifted_positions(axis: int, count: int) -> Tensor:
        """Return the positions along a spatial axis that the elements of the kernel would read
        without an offset: [size of the kernel, count], for `count` windows.
        """
        starts = torch.arange(count, device=x.device, dtype=x.dtype) * strides[axis] - begin[axis]
        steps = (
            torch.arange(weight.shape[2 + axis], device=x.device, dtype=x.dtype) * dilations[axis]
        )
        return steps[:, None] + starts

    rows = shifts[:, :, :, 0] + unshifted_positions(0, oh)[:, None, :, None].expand(
        kh, kw, oh, ow
    ).reshape(taps, oh, ow)
    columns = shifts[:, :, :, 1] + unshifted_positions(1, ow)[None, :, None, :].expand(
        kh, kw, oh, ow
    ).reshape(taps, oh, ow)
    images = x.reshape(batch * offset_groups, channels // offset_groups, height, width)
    # `grid_sample` divides positions by the distance between the first and the last pixel, which is
    # 0 if there is one row or one column. Such an image is padded with a second row or column of
    # zeros.
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
    """Return a view [n, c, *o, *k] of padded images [n, c, ...], with the elements [*k] of each
    window [*o].
    """
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
    """Return the mean of each window of x, padded with zeros by `pads`. A mean divides by the
    number of elements of the window that are in x or in the part `counted` of the pads.
    """

    def means(padded: Tensor) -> Tensor:
        """Return the mean of each window, including all padding."""
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
    """Return the p-norm of each window of x, padded with zeros by `pads`; p is `power`."""
    windows = _windows(F.pad(x, pads), kernel, strides, dilations)
    norms: Tensor = torch.linalg.vector_norm(windows, power, tuple(range(-len(kernel), 0)))
    return norms


def max_pool_with_indices(
    x: Tensor, kernel: Extents, strides: Extents, dilations: Extents, pads: Extents, order: int
) -> tuple[Tensor, Tensor]:
    """Return (maximum of each window, its index in the flattened x). For the index, spatial axes
    are flattened in row-major order if `order` is 0, in column-major order if it is 1.
    """
    values = x if x.is_floating_point() else x.float()
    rank = len(kernel)
    windows = _windows(F.pad(values, pads, value=-math.inf), kernel, strides, dilations).flatten(
        -rank
    )
    largest, places = windows.max(-1)
    spatial = range(2, x.dim())
    index = torch.zeros(x.shape, dtype=torch.int64, device=x.device)
    # `distance` is the difference between the flattened indices of two neighbours along `axis`.
    distance = 1
    for axis in (*(spatial if order else reversed(spatial)), 1, 0):
        index += broadcast_along(
            torch.arange(x.shape[axis], device=x.device) * distance, axis, x.dim()
        )
        distance *= x.shape[axis]
    indices = _windows(F.pad(index, pads), kernel, strides, dilations).flatten(-rank)
    found = torch.gather(indices, -1, places.unsqueeze(-1)).squeeze(-1)
    return largest.to(x.dtype), found


def max_unpool(x: Tensor, indices: Tensor, inferred: Extents, shape: Extents) -> Tensor:
    """Return a tensor of zeros with x at the flattened `indices`. The indices refer to the shape
    `inferred`; the result is padded at the end of each axis to `shape`.
    """
    flat = torch.zeros(math.prod(inferred), dtype=x.dtype, device=x.device)
    filled = flat.scatter(0, indices.reshape(-1), x.reshape(-1)).reshape(inferred)
    return F.pad(
        filled,
        [pad for axis in reversed(range(len(shape))) for pad in (0, shape[axis] - inferred[axis])],
    )


ResizedAxis = tuple[int, int, float, float, float]
"""(axis, size of the result, scale, start, end) of an axis that is resized. For tf_crop_and_resize,
start and end limit the range of x that is read, as fractions of the axis.
"""
# `_ROUNDING_FUNCTIONS` does not contain ONNX's mode `ceil`, because each lookup returns torch.ceil
# by default.
_ROUNDING_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
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

    `mode` is `nearest`, `linear` or `cubic`. `places` is ONNX's `coordinate_transformation_mode`,
    `rounding` its `nearest_mode`. `coefficient` is the parameter of the cubic kernel (Keys, 1981).
    With tf_crop_and_resize, elements whose position is outside of x get the value `outside`.
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
            x = x.masked_fill(broadcast_along(beyond, axis, x.dim()), outside)
    return x


def _source_positions(resized: ResizedAxis, extent: int, rule: str, device: torch.device) -> Tensor:
    """Return the position in x of each element of the result along one axis, float64 [size of the
    result]. `extent` is the size of the axis of x, `rule` ONNX's `coordinate_transformation_mode`.
    """
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
    """Return (indices, weights), each [size of the result, elements read]: the indices in x that
    each element of the result reads along one axis, and their weights. An index may be outside of
    x. `places` are the positions in x; `support` is the radius of the kernel, 1 if linear and 2 if
    cubic; a `stretch` below 1 widens the kernel, for antialiasing.
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
    """Return the `regions` [n, 4], given as x1, y1, x2, y2, of images, as [n, channels, *size].
    Region i is in `images[owners[i]]`. Each region is divided into `size` bins, and an element of
    the result belongs to a bin. Its value is the mean over points in the bin of the bilinearly
    interpolated image, or the maximum if `largest` (He et al., "Mask R-CNN", 2017). Coordinates are
    multiplied by `scale`; with `half_pixel`, 0.5 is then subtracted.

    `samples` is the number of points per bin along each axis. If it is 0, there is about one point
    per pixel of the bin. As ONNX defines it, the maximum is over the four weighted pixels around
    each point.
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
    # Without a fixed `samples`, the number of samples depends on the size of each region. The host
    # needs these numbers, so they are copied once for all regions.
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
    """Return regions as `roi_align` does, with `samples` = (down, across) points per bin along each
    axis, for all regions. `starts` and `extents` [n, 2] are (row, column) and (height, width) of
    each region.
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
        # In torch, the slice between advanced indices becomes the last dimension of the result, so
        # its shape is [n, rows, columns, channels].
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
    """Return ([(low, weight), (high, weight)], inside) for the points at which an image is
    interpolated, along one axis. All tensors are [n, bins * samples], for n regions with `bins`
    bins and `samples` points per bin. Region i is [starts[i], starts[i] + extents[i]).

    low, high: the pixels before and after a point, with their weights for linear interpolation.
    inside: true for points inside of the image, which has `pixels` pixels.
    """
    numbers = torch.arange(bins * samples, device=starts.device, dtype=starts.dtype)
    places = starts + (numbers + 0.5) * (extents / bins / samples)
    clamped = places.clamp(0, pixels - 1)
    low = clamped.floor().long()
    inside = (places >= -1.0) & (places <= pixels)
    weight = clamped - low
    return [(low, 1 - weight), ((low + 1).clamp(max=pixels - 1), weight)], inside


def max_roi_pool(images: Tensor, regions: Tensor, *, size: tuple[int, int], scale: float) -> Tensor:
    """Return the `regions` [n, 5], given as image, x1, y1, x2, y2, of images, as [n, channels,
    *size]. Each region is divided into `size` bins. An element of the result is the maximum of the
    pixels in a bin, 0 if there are none (Girshick, "Fast R-CNN", 2015). Coordinates are multiplied
    by `scale` and rounded to pixels; both corners belong to the region.
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
        # In this shape, the mask of one bin broadcasts over images and channels: one entry per
        # region and per pixel of the axis.
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

    Return the indices of the selected boxes of each image and class, in descending order of score:
    [images, classes, most], padded with -1. A box is skipped if its score is not above `least`, or
    if its intersection over union with a box selected before exceeds `overlap`.

    The numbers of a box are two opposite corners if `corners`, otherwise its center and its sizes.
    """
    # `places` contains the four coordinates of each box. Its shape is [4, images, 1, boxes].
    places = boxes.detach().float().movedim(2, 0)[:, :, None]
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
    """Return the entries of `facts` [..., images, 1, boxes], such as the areas of all boxes, for
    the boxes with the indices `number` [images, classes, 1]. The result is [..., images, classes,
    1].
    """
    outer = facts.shape[:-3]
    spread = facts.expand(*outer, *number.shape[:2], facts.shape[-1])
    return spread.gather(-1, number.expand(*outer, *number.shape))


def rows_kept(numbers: Tensor, count: int) -> Tensor:
    """Return the first `count` selected boxes as rows (image, class, box), [count, 3]. `numbers` is
    the result of `suppressed`.
    """
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
    complex data (size 2), cropped or zero-padded to `length`. The result has pairs in its last
    dimension.

    `onesided` restricts the spectrum of real data to nonnegative frequencies. With `onesided` and
    `inverse`, the data are such a spectrum, and the result is real, with a last dimension of size
    1.
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
    """Return the Fourier transforms of windows of `length` samples, whose starts are `step` samples
    apart: [batch, frames, bins, 2]. `window` is multiplied with each window; None for no weights.
    `onesided` restricts the result to nonnegative frequencies.
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
    """Return a Hamming window [length] with ONNX's coefficients 25/46 and 21/46."""
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
    """Return triangular filters [length // 2 + 1, bins] from frequencies to bins of the mel scale,
    2595 log10(1 + f / 700). `length` is the length of the transform, `rate` the samples per second,
    `low` and `high` the limits in Hz.
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
    # The weight at the centre of each triangle is set to 1, because the division results in NaN at
    # the centre if a side of the triangle has width 0.
    return weights.scatter(0, centres.long()[None], 1.0).to(dtype)
