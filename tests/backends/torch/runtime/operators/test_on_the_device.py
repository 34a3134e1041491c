"""Operators spelled so that a GPU's host need not wait give what torch's own do, which would have
it wait.
"""

from __future__ import annotations

import pytest
import torch

from autopipe.backends.torch.runtime import operators
from autopipe.backends.torch.runtime.operators import onnx_operators

CPU = torch.device("cpu")


@pytest.mark.parametrize("held", [1, 2**24])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize(
    "shapes",
    [((2, 3), (3, 4)), ((3,), (3,)), ((3,), (5, 3, 2)), ((2, 1, 4, 3), (5, 3, 2)), ((4, 3), (3,))],
)
def test_products_of_integers(
    monkeypatch: pytest.MonkeyPatch,
    shapes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    held: int,
) -> None:
    """They wrap around where they leave their type."""
    monkeypatch.setattr(onnx_operators, "_MAX_PRODUCTS_IN_MEMORY", held)
    generator = torch.Generator().manual_seed(1)
    most = torch.iinfo(dtype).max
    a, b = (
        torch.randint(most // 2, most, shape, dtype=dtype, generator=generator) for shape in shapes
    )
    found = operators.matmul_by_element(a, b)
    assert torch.equal(found, torch.matmul(a, b)) and found.dtype is dtype


@pytest.mark.parametrize("shape", [(), (7,), (3, 0), (2, 3, 4)])
def test_places_of_what_is_not_zero(shape: tuple[int, ...]) -> None:
    data = torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(2))
    expected = torch.nonzero(data).T
    assert torch.equal(operators.nonzero(data, expected.shape[1]), expected)


def test_numbers_are_written_in_the_type_asked_for() -> None:
    found = operators.listed([2**40, -3], dtype=torch.int64, device=CPU)
    assert torch.equal(found, torch.tensor([2**40, -3]))
    found = operators.listed([0.5, float("inf")], dtype=torch.float16, device=CPU)
    assert torch.equal(found, torch.tensor([0.5, float("inf")], dtype=torch.float16))


@pytest.mark.parametrize("largest", [False, True])
def test_regions_have_as_many_samples_as_pixels(largest: bool) -> None:
    images = torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(3))
    # 3.5 and 7 pixels wide and high.
    regions = torch.tensor([[1.0, 0.5, 4.5, 4.0], [-3.0, 2.0, 4.0, 9.0]])
    settings = {"size": (2, 2), "scale": 1.0, "half_pixel": True, "largest": largest}
    owners = torch.tensor([1, 0])
    found = operators.roi_align(images, regions, owners, samples=0, **settings)
    alone = [
        operators.roi_align(
            images, regions[each : each + 1], owners[each : each + 1], samples=samples, **settings
        )
        for each, samples in ((0, 2), (1, 4))
    ]
    torch.testing.assert_close(found, torch.cat(alone))
    assert operators.roi_align(images, regions[:0], owners[:0], samples=0, **settings).shape == (
        0,
        3,
        2,
        2,
    )
