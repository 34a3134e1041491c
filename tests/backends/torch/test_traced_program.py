"""A traced program after the changes for ONNX: smoothed losses in full, and gradients that stay stopped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopipe.backends.torch.traced_program import InSupportedParts, prepare

CLASSES = 5


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(4,), (3, 2)])
def test_a_smoothed_cross_entropy_is_torchs(weighted: bool, reduction: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape[0], CLASSES, *shape[1:], generator=generator, requires_grad=True)
    labels = torch.randint(CLASSES, shape, generator=generator)
    labels[0] = -1
    weight = torch.rand(CLASSES, generator=generator) + 0.5 if weighted else None
    settings = {"ignore_index": -1, "label_smoothing": 0.2, "reduction": reduction}
    expected = F.cross_entropy(logits, labels, weight, **settings)  # type: ignore[arg-type]
    with InSupportedParts():
        found = F.cross_entropy(logits, labels, weight, **settings)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), logits)[0], gradient)


def test_smoothed_probabilities_are_torchs() -> None:
    logits = torch.randn(3, CLASSES, generator=torch.Generator().manual_seed(0))
    target = torch.softmax(logits.flip(0), 1)
    with InSupportedParts():
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
    prepare(program)
    targets = [node.target for node in program.graph.nodes]
    assert torch.ops.aten.detach.default in targets
    traced = program.module()
    found, expected = traced(example), original(example)
    torch.testing.assert_close(found, expected)
    gradients = torch.autograd.grad(found, list(traced.parameters()))
    for gradient, known in zip(gradients, torch.autograd.grad(expected, list(original.parameters())), strict=True):
        torch.testing.assert_close(gradient, known)
