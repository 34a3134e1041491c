"""Convolutions that torch lacks: of integers, with uneven crops, with learned offsets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.backends.torch.runtime.operators.quantization import centre, requantize

Extents = tuple[int, ...]
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def conv_transpose(
    x: Tensor, weight: Tensor, bias: Tensor | None, strides: Extents, dilations: Extents, groups: int, crop: Extents
) -> Tensor:
    """Transposed convolution whose whole result is cropped (negative) or filled up (positive), as `F.pad` counts."""
    full = _CONV_TRANSPOSE[x.dim() - 2](x, weight, None, strides, 0, 0, groups, dilations)
    cropped = F.pad(full, crop)
    return cropped if bias is None else cropped + bias.reshape(-1, *(1 for _ in strides))


def conv_integer(
    x: Tensor,
    weight: Tensor,
    x_zero_point: Tensor | None,
    weight_zero_point: Tensor | None,
    strides: Extents,
    pads: Extents,
    dilations: Extents,
    groups: int,
) -> Tensor:
    """Convolution of integers less their zero points, as int32. Pads hold the zero point, hence 0."""
    exact = F.pad(centre(x, x_zero_point), pads)
    return _CONV[x.dim() - 2](exact, centre(weight, weight_zero_point), None, strides, 0, dilations, groups).to(
        torch.int32
    )


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
    strides: Extents,
    pads: Extents,
    dilations: Extents,
    groups: int,
) -> Tensor:
    """Convolution of quantised numbers, quantised; the bias counts in units of `x_scale * weight_scale`."""
    exact = F.pad(centre(x, x_zero_point), pads)
    exact_bias = None if bias is None else bias.double()
    product = _CONV[x.dim() - 2](exact, centre(weight, weight_zero_point), exact_bias, strides, 0, dilations, groups)
    return requantize(product, x_scale.double() * weight_scale.double() / scale.double(), zero_point, dtype)


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
    """Deformable convolution of images: each tap of each window reads at its own offset, bilinearly.

    x is [n, c, h, w], offset [n, offset_groups * kh * kw * 2, oh, ow], mask [n, offset_groups * kh * kw, oh, ow].
    Dai et al., "Deformable Convolutional Networks", 2017; with a mask, Zhu et al., 2019.
    """
    batch, channels, height, width = x.shape
    kh, kw = weight.shape[2:]
    oh, ow = offset.shape[2:]
    taps = kh * kw
    shifts = offset.reshape(batch, offset_groups, taps, 2, oh, ow)
    rows = shifts[:, :, :, 0] + _base(oh, strides[0], begin[0], kh, dilations[0], x)[:, None, :, None].expand(
        kh, kw, oh, ow
    ).reshape(taps, oh, ow)
    columns = shifts[:, :, :, 1] + _base(ow, strides[1], begin[1], kw, dilations[1], x)[None, :, None, :].expand(
        kh, kw, oh, ow
    ).reshape(taps, oh, ow)
    images = x.reshape(batch * offset_groups, channels // offset_groups, height, width)
    grid = torch.stack((2 * columns / max(width - 1, 1) - 1, 2 * rows / max(height - 1, 1) - 1), dim=-1).reshape(
        batch * offset_groups, taps, oh * ow, 2
    )
    read = F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=True)
    read = read.reshape(batch, offset_groups, channels // offset_groups, taps, oh, ow)
    if mask is not None:
        read = read * mask.reshape(batch, offset_groups, 1, taps, oh, ow)
    columns_by_group = read.reshape(batch, groups, channels // groups * taps, oh * ow)
    kernels = weight.reshape(groups, weight.shape[0] // groups, -1)
    result = torch.matmul(kernels, columns_by_group).reshape(batch, weight.shape[0], oh, ow)
    return result if bias is None else result + bias.reshape(-1, 1, 1)


def _base(count: int, stride: int, begin: int, kernel: int, dilation: int, like: Tensor) -> Tensor:
    """[kernel, count]: where each tap of each window reads before its offset."""
    starts = torch.arange(count, device=like.device, dtype=like.dtype) * stride - begin
    taps = torch.arange(kernel, device=like.device, dtype=like.dtype) * dilation
    return taps[:, None] + starts
