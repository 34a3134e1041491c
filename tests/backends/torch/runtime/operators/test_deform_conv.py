"""Deformable convolution outside of the image."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from autopipe.backends.torch.runtime import operators

PADDING = 6


@pytest.mark.parametrize("size", [(1, 4), (4, 1), (1, 1), (3, 5)], ids=str)
def test_positions_outside_of_the_image_read_zeros(size: tuple[int, int]) -> None:
    """Offsets that leave the image read the zeros of a padded image, also if the image has one row
    or one column.
    """
    generator = torch.Generator().manual_seed(0)
    kernel = [min(extent, 2) for extent in size]
    windows = [extent - taps + 1 for extent, taps in zip(size, kernel, strict=True)]
    x = torch.randn(2, 2, *size, generator=generator, dtype=torch.float64)
    weight = torch.randn(3, 2, *kernel, generator=generator, dtype=torch.float64)
    offset_channels = 2 * kernel[0] * kernel[1]
    offset = torch.randn(2, offset_channels, *windows, generator=generator, dtype=torch.float64)
    offset = offset.clamp(-3, 3)

    def convolve(image: torch.Tensor, begin: tuple[int, int]) -> torch.Tensor:
        return operators.deform_conv(image, weight, offset, None, None, (1, 1), begin, (1, 1), 1, 1)

    padded = F.pad(x, [PADDING] * 4)
    expected = convolve(padded, (-PADDING, -PADDING))
    torch.testing.assert_close(convolve(x, (0, 0)), expected, rtol=1e-9, atol=1e-9)
