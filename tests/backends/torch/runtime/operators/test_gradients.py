"""Gradients of the library's operators against finite differences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopipe.backends.torch.runtime import operators

PLACES = torch.tensor([[0, -1, 1], [2, 0, -2]])
TUPLES = torch.tensor([[0, 1], [2, 3]])
LENGTHS = torch.tensor([1, 3, 2])

CASES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "cumsum": (lambda x: operators.cumsum(x, 1, exclusive=True, reverse=True), ((2, 4),)),
    "cumprod": (lambda x: operators.cumprod(x, 1, exclusive=True, reverse=False), ((2, 4),)),
    "top_k": (lambda x: operators.top_k(x, 2, 1, largest=True)[0], ((3, 4),)),
    "pad reflect": (lambda x: operators.pad(x, ((0, 0), (2, 1)), "reflect"), ((2, 4),)),
    "pad edge": (lambda x: operators.pad(x, ((1, 0), (2, 1)), "edge"), ((2, 4),)),
    "pad wrap": (lambda x: operators.pad(x, ((0, 1), (2, -1)), "wrap"), ((2, 4),)),
    "reverse_sequence": (lambda x: operators.reverse_sequence(x, LENGTHS, 0, 1), ((4, 3, 2),)),
    "compress": (
        lambda x: operators.compress(x, torch.tensor([True, False, True]), 1, 2),
        ((2, 3),),
    ),
    "col2im": (
        lambda x: operators.col2im(
            x, (4, 4), (2, 2), dilations=(1, 1), strides=(1, 1), pads=(0, 0, 0, 0)
        ),
        ((1, 8, 9),),
    ),
    "gather_elements": (lambda x: operators.gather_elements(x, 1, PLACES), ((2, 4),)),
    "gather_nd": (lambda x: operators.gather_nd(x, TUPLES.unsqueeze(1), 1), ((2, 3, 4),)),
    "scatter_elements": (
        lambda x, y: operators.scatter_elements(x, 1, torch.tensor([[0, -1], [1, 2]]), y),
        ((2, 4), (2, 2)),
    ),
    "scatter_elements sum": (
        lambda x, y: operators.scatter_elements(x, 1, PLACES, y, "sum"),
        ((2, 4), (2, 3)),
    ),
    "scatter_nd": (lambda x, y: operators.scatter_nd(x, TUPLES, y), ((3, 4, 2), (2, 2))),
    "scatter_nd sum": (lambda x, y: operators.scatter_nd(x, TUPLES, y, "sum"), ((3, 4, 2), (2, 2))),
    "scatter_nd prod": (
        lambda x, y: operators.scatter_nd(x, TUPLES, y, "prod"),
        ((3, 4, 2), (2, 2)),
    ),
    "tensor_scatter": (
        lambda x, y: operators.tensor_scatter(x, y, torch.tensor([1, 3]), 2, circular=True),
        ((2, 3, 4), (2, 3, 2)),
    ),
    "shrink": (lambda x: operators.shrink(x, 0.3, 0.1), ((7,),)),
    "dft": (lambda x: operators.dft(x, 1, length=6), ((2, 5, 2),)),
    "dft onesided": (lambda x: operators.dft(x, 1, onesided=True), ((2, 5, 1),)),
    "stft": (lambda x, w: operators.stft(x, 2, w, 4, onesided=True), ((1, 8, 1), (4,))),
}


@pytest.mark.parametrize("name", CASES)
def test_gradient(name: str) -> None:
    function, shapes = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    operands = [
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in shapes
    ]
    assert torch.autograd.gradcheck(function, operands)


@pytest.mark.parametrize(
    "name",
    ["scatter_elements", "scatter_nd", "scatter_nd sum", "scatter_nd prod", "tensor_scatter"],
)
def test_what_is_written_may_have_another_type(name: str) -> None:
    function, shapes = CASES[name]
    first, second = (torch.full(shape, 0.5) for shape in shapes)
    for left, right in ((first.bfloat16(), second), (first, second.bfloat16())):
        assert torch.equal(function(left, right).float(), function(first, second))
