"""Gradients of layers against finite differences, and where they must stay finite."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.backends.torch.runtime import operators

LABELS = torch.tensor([[0, 2], [1, 2]])
LENGTHS = torch.tensor([3, 1])
HEADS = (2, 2, 3, 4)
ANGLES = (2, 3, 2, 6), (2, 4), (3, 1, 2)
AXES = [(2, 3, 0.75, 0.0, 1.0), (3, 5, 1.25, 0.0, 1.0)]
REGIONS = torch.tensor([[0.0, 0.0, 3.0, 2.0], [1.0, 0.5, 2.5, 3.5]], dtype=torch.float64)


def roi_align(images: Tensor) -> Tensor:
    settings = {"size": (2, 2), "samples": 2, "scale": 1.0, "half_pixel": True, "largest": False}
    return operators.roi_align(images, REGIONS, torch.tensor([0, 1]), **settings)


def lstm(x: Tensor, w: Tensor, r: Tensor, p: Tensor) -> Tensor:
    return operators.lstm(x, w, r, peepholes=p, lengths=LENGTHS, direction="bidirectional")[0]


CASES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "attention": (
        lambda q, k, v, m: operators.attention(q, k, v, m, causal=True, softcap=2.0)[0],
        (*[HEADS] * 3, (3, 3)),
    ),
    "attention cache": (
        lambda q, k, v, a, b: operators.attention(q, k, v, None, a, b, causal=True)[0],
        (*[HEADS] * 3, *[(2, 2, 2, 4)] * 2),
    ),
    "attention shared heads": (
        lambda q, k, v: operators.attention(q, k, v, window=(1, 0), capture=3)[3],
        ((1, 4, 3, 2), (1, 2, 3, 2), (1, 2, 3, 2)),
    ),
    "rotary": (
        lambda x, c, s: operators.rotary_embedding(x, c, s, width=2),
        ((2, 3, 2, 4), (2, 2, 1), (2, 2, 1)),
    ),
    "rotary of neighbours": (
        lambda *each: operators.rotary(*each, interleaved=True, width=4),
        ANGLES,
    ),
    "rotary put apart": (
        lambda *each: operators.rotary(*each, interleaved=True, width=4, apart=True),
        ANGLES,
    ),
    "average_pool": (
        lambda x: operators.average_pool(x, (2, 2), (2, 1), (1, 2), (1, 1, 0, 1), (0, 0, 0, 0)),
        ((1, 2, 4, 4),),
    ),
    "lp_pool": (lambda x: operators.lp_pool(x, (2,), (2,), (1,), (1, 0), 3), ((1, 2, 5),)),
    "max_pool": (
        lambda x: operators.max_pool_with_indices(x, (2,), (1,), (2,), (1, 0), 0)[0],
        ((1, 2, 5),),
    ),
    "max_unpool": (
        lambda x: operators.max_unpool(x, torch.tensor([[[1, 3], [4, 7]]]), (1, 2, 4), (1, 2, 5)),
        ((1, 2, 2),),
    ),
    "conv_transpose": (
        lambda x, w, b: operators.conv_transpose(x, w, b, (2,), (1,), 1, (-2, 3)),
        ((1, 2, 4), (2, 3, 3), (3,)),
    ),
    "deform_conv": (
        lambda x, w, o, b, m: operators.deform_conv(
            x, w, 0.3 * torch.tanh(o) + 0.4, b, m, (1, 1), (0, 0), (1, 1), 1, 1
        ),
        ((1, 2, 4, 4), (2, 2, 2, 2), (1, 8, 3, 3), (2,), (1, 4, 3, 3)),
    ),
    "resize linear": (
        lambda x: operators.resize(x, AXES, "linear", "half_pixel", antialias=True),
        ((1, 1, 4, 4),),
    ),
    "resize cubic": (
        lambda x: operators.resize(x, AXES, "cubic", "half_pixel_symmetric", exclude_outside=True),
        ((1, 1, 4, 4),),
    ),
    "batch_norm": (
        lambda x, s, b: operators.batch_norm(x, s, b, torch.zeros(2), torch.ones(2), 0.9, 1e-5)[0],
        ((3, 2, 2), (2,), (2,)),
    ),
    "batch_norm_by": (
        lambda x, m, v, s, b: operators.batch_norm_by(x, m, v.exp(), s, b, 1e-5),
        ((3, 2, 2), *[(2,)] * 4),
    ),
    "layer_norm": (
        lambda x, s: operators.layer_norm(x, (3, 2), s, None, 1e-5)[0],
        ((2, 3, 2), (3, 1)),
    ),
    "skip_layer_norm": (
        lambda x, y, s, t, b: operators.skip_layer_norm(x, y, s, t, b, 1e-5)[0],
        ((2, 4), (2, 4), (4,), (4,), (4,)),
    ),
    "mean_variance_norm": (lambda x: operators.mean_variance_norm(x, (0, 2)), ((2, 3, 2),)),
    "local_response_norm": (
        lambda x: operators.local_response_norm(x, 4, 0.1, 0.75, 1.0),
        ((1, 5, 2),),
    ),
    "cross_entropy": (
        lambda x: operators.cross_entropy(x, LABELS, ignore_index=0)[0],
        ((2, 3, 2),),
    ),
    "roi_align": (roi_align, ((2, 1, 4, 4),)),
    "lstm": (lstm, ((3, 2, 2), (2, 12, 2), (2, 12, 3), (2, 9))),
    "gru": (
        lambda x, w, r, b: operators.gru(x, w, r, bias=b, clip=1.5, direction="reverse")[0],
        ((3, 2, 2), (1, 6, 2), (1, 6, 2), (1, 12)),
    ),
    "rnn": (
        lambda x, w, r: operators.rnn(x, w, r, activations=("affine",), alpha=(0.5,), beta=(0.1,))[
            0
        ],
        ((3, 2, 2), (1, 2, 2), (1, 2, 2)),
    ),
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


@pytest.mark.parametrize("capture", [None, 3])
@pytest.mark.parametrize("truth", [True, False])
def test_queries_that_see_nothing_give_zero_and_finite_gradients(
    truth: bool, capture: int | None
) -> None:
    seen = torch.ones(3, 3, dtype=torch.bool).tril(-1)
    mask = seen if truth else torch.zeros(3, 3).masked_fill(~seen, float("-inf"))
    query, key, value = (
        torch.randn(HEADS, generator=torch.Generator().manual_seed(2)) for _ in range(3)
    )
    operands = [key[:, :, :3].clone().requires_grad_() for key in (query, key, value)]
    result = operators.attention(*operands, mask, capture=capture)[0]
    assert torch.equal(result[:, :, 0], torch.zeros_like(result[:, :, 0]))
    result.square().sum().backward()
    assert all(bool(torch.isfinite(operand.grad).all()) for operand in operands)


def test_both_ways_through_attention_agree() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(HEADS, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    mask = torch.randn(2, 1, 3, 3, generator=generator, dtype=torch.float64)
    fused = operators.attention(query, key, value, mask, scale=0.3, merge=True)[0]
    stepwise = operators.attention(query, key, value, mask, scale=0.3, merge=True, capture=0)[0]
    torch.testing.assert_close(fused, stepwise)
    torch.testing.assert_close(
        fused,
        F.scaled_dot_product_attention(query, key, value, mask, scale=0.3)
        .transpose(1, 2)
        .reshape(2, 3, 8),
    )


@pytest.mark.parametrize("with_sink", [True, False])
def test_backward_of_a_capped_attention_keeps_its_operands_alone(with_sink: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(1, 4, 3, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(1, 2, 3, 2, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in "kv"
    )
    sink = (
        torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
        if with_sink
        else None
    )
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: kept.append(each.data_ptr()) or each, lambda each: each
    ):
        result = operators.attention(query, key, value, sink=sink, softcap=2.0)[0]
    leaves = [each for each in (query, key, value, sink) if each is not None]
    assert kept == [each.data_ptr() for each in leaves]
    stepwise = operators.attention(query, key, value, sink=sink, softcap=2.0, capture=0)[0]
    found, expected = (
        torch.autograd.grad(each.square().sum(), leaves) for each in (result, stepwise)
    )
    torch.testing.assert_close(found, expected)
