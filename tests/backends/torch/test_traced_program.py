"""A traced program after the changes for ONNX: smoothed losses in full, and gradients that stay
stopped.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopipe.backends.torch.traced_program import DecomposeUnsupported, prepare_for_onnx

CLASSES = 5


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(4,), (3, 2)])
def test_a_smoothed_cross_entropy_is_torchs(
    weighted: bool, reduction: str, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape[0], CLASSES, *shape[1:], generator=generator, requires_grad=True)
    labels = torch.randint(CLASSES, shape, generator=generator)
    labels[0] = -1
    weight = torch.rand(CLASSES, generator=generator) + 0.5 if weighted else None
    settings = {"ignore_index": -1, "label_smoothing": 0.2, "reduction": reduction}
    expected = F.cross_entropy(logits, labels, weight, **settings)  # type: ignore[arg-type]
    with DecomposeUnsupported():
        found = F.cross_entropy(logits, labels, weight, **settings)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), logits)[0], gradient)


def test_smoothed_probabilities_are_torchs() -> None:
    logits = torch.randn(3, CLASSES, generator=torch.Generator().manual_seed(0))
    target = torch.softmax(logits.flip(0), 1)
    with DecomposeUnsupported():
        found = F.cross_entropy(logits, target, label_smoothing=0.1)
    torch.testing.assert_close(found, F.cross_entropy(logits, target, label_smoothing=0.1))


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, 3, padding_idx=1)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.table(indices).square().sum()  # type: ignore[no-any-return]


class WithoutGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            gate = torch.sigmoid(self.layer(x))
        return (self.layer(x) * gate).sum()


@pytest.mark.parametrize(
    ("module", "example"),
    [(Padded, torch.tensor([[0, 1], [2, 1]])), (WithoutGradient, torch.ones(2, 3))],
    ids=["padding_idx", "no_grad"],
)
def test_a_prepared_program_has_the_gradients_of_the_module(
    module: Callable[[], nn.Module], example: torch.Tensor
) -> None:
    torch.manual_seed(0)
    original = module()
    program = torch.export.export(original, (example,))
    program = prepare_for_onnx(program)
    targets = [node.target for node in program.graph.nodes]
    assert torch.ops.aten.detach.default in targets
    traced = program.module()
    found = traced(example)
    expected = original(example)
    torch.testing.assert_close(found, expected)
    gradients = torch.autograd.grad(found, list(traced.parameters()))
    for gradient, known in zip(
        gradients, torch.autograd.grad(expected, list(original.parameters())), strict=True
    ):
        torch.testing.assert_close(gradient, known)


class Attentive(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        first = F.scaled_dot_product_attention(
            x, x[:, :1], x[:, :1], mask, 1e-9, scale=0.3, enable_gqa=True
        )
        second = F.scaled_dot_product_attention(first, x, x, bias, 1e-9)
        return F.scaled_dot_product_attention(second, x, x, dropout_p=1e-9, is_causal=True)


def test_attention_that_drops_is_computed_from_its_parts() -> None:
    """With a probability at which nothing is dropped, results are those of the module."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 2, 3, 4, generator=generator)
    mask = torch.eye(3, dtype=torch.bool).logical_or(torch.ones(3, 3, dtype=torch.bool).tril())
    bias = torch.randn(3, 3, generator=generator)
    program = prepare_for_onnx(torch.export.export(Attentive(), (x, mask, bias)))
    targets = [node.target for node in program.graph.nodes]
    assert torch.ops.aten.scaled_dot_product_attention.default not in targets
    torch.testing.assert_close(program.module()(x, mask, bias), Attentive()(x, mask, bias))
