"""Operators that a group computes in parts: their results and gradients against torch's own on the
whole.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.backends.torch.runtime import operators
from tests.ir.ops.meeting import Member, together

SIZE = 3


def drawn(*shape: int, seed: int = 0, scale: float = 4.0) -> Tensor:
    return scale * torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def in_parts(
    whole: Tensor, dim: int, computed: Callable[[Tensor, Member], Tensor]
) -> tuple[list[Tensor], Tensor]:
    """What each member computes of its part, and the gradient of the sum of the squares of all
    results.
    """

    def run(member: Member) -> tuple[Tensor, Tensor]:
        part = whole.chunk(SIZE, dim)[member.position].clone().requires_grad_()
        result = computed(part, member)
        (gradient,) = torch.autograd.grad((result**2).sum() if result.dim() else result, part)
        return result.detach(), gradient

    found = together([run] * SIZE)
    return [result for result, _ in found], torch.cat([gradient for _, gradient in found], dim)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmaxes(name: str, dim: int) -> None:
    whole = drawn(6, 3, 9)
    parts, gradient = in_parts(
        whole, dim, lambda part, member: getattr(operators, f"sharded_{name}")(part, dim, member)
    )
    expected = getattr(torch, name)(whole.requires_grad_(), dim)
    torch.testing.assert_close(torch.cat(parts, dim), expected)
    torch.testing.assert_close(gradient, torch.autograd.grad((expected**2).sum(), whole)[0])


def test_large_scores_do_not_overflow() -> None:
    whole = torch.tensor([[1000.0, -1000.0, 999.0]])
    parts, _ = in_parts(whole, 1, lambda part, member: operators.sharded_softmax(part, 1, member))
    torch.testing.assert_close(torch.cat(parts, 1), torch.softmax(whole, 1))


@pytest.mark.parametrize("ignored", [-100, 4])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(8, 6), (4, 6, 5)])
@pytest.mark.parametrize("both", [False, True])
def test_cross_entropy(
    both: bool, shape: tuple[int, ...], reduction: str, weighted: bool, ignored: int
) -> None:
    whole = drawn(*shape)
    labels = (
        torch.arange(shape[0] * (shape[2] if len(shape) > 2 else 1)).reshape(shape[0], *shape[2:])
        % shape[1]
    )
    weight = drawn(shape[1], seed=1).abs() if weighted else None
    settings = {"ignore_index": ignored, "reduction": reduction}

    def computed(part: Tensor, member: Member) -> Tensor:
        if both:
            return operators.sharded_cross_entropy_and_logarithms(
                part, labels, weight, group=member, **settings
            )[0]
        return operators.sharded_cross_entropy(part, labels, weight, group=member, **settings)

    parts, gradient = in_parts(whole, 1, computed)
    expected = F.cross_entropy(whole.requires_grad_(), labels, weight, **settings)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.stack(parts).sum(0), expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, whole)[0])


def test_a_loss_for_each_label() -> None:
    whole = drawn(4, 6)
    labels = torch.tensor([0, 5, 2, 3])

    def computed(part: Tensor, member: Member) -> Tensor:
        return operators.sharded_cross_entropy(part, labels, reduction="none", group=member)

    parts, gradient = in_parts(whole, 1, computed)
    expected = F.cross_entropy(whole.requires_grad_(), labels, reduction="none")
    torch.testing.assert_close(torch.stack(parts).sum(0), expected.detach())
    # Each label's loss is the share of one rank; of the others', which are 0, the squares have no
    # gradient.
    torch.testing.assert_close(gradient, torch.autograd.grad((expected**2).sum(), whole)[0])


def test_classes_that_cannot_be() -> None:
    """A vocabulary padded by scores of minus infinity, all of one rank's part."""
    whole = torch.cat([drawn(3, 4), torch.full((3, 2), -torch.inf, dtype=torch.float64)], 1)
    labels = torch.tensor([0, 3, 1])
    parts, gradient = in_parts(
        whole, 1, lambda part, member: operators.sharded_cross_entropy(part, labels, group=member)
    )
    expected = F.cross_entropy(whole.requires_grad_(), labels)
    torch.testing.assert_close(torch.stack(parts).sum(0), expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, whole)[0])


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_of_a_table(dim: int) -> None:
    whole = drawn(9, 12, seed=2)
    indices = torch.tensor([[0, 8, 3], [-1, 5, 3]])
    parts, gradient = in_parts(
        whole, dim, lambda part, member: operators.sharded_gather(part, dim, indices, member)
    )
    expected = whole.requires_grad_()[indices] if dim == 0 else whole.requires_grad_()[:, indices]
    torch.testing.assert_close(torch.stack(parts).sum(0), expected)
    torch.testing.assert_close(gradient, torch.autograd.grad((expected**2).sum(), whole)[0])


def test_what_no_rank_has_is_refused() -> None:
    table = drawn(6, 2)
    with pytest.raises(RuntimeError, match="an index is out of range"):
        in_parts(
            table,
            0,
            lambda part, member: operators.sharded_gather(part, 0, torch.tensor([6]), member),
        )
    with pytest.raises(RuntimeError, match="a label is out of range"):
        in_parts(
            drawn(1, 6),
            1,
            lambda part, member: operators.sharded_nll(part, torch.tensor([-1]), group=member),
        )


def test_autocast_computes_in_single_precision() -> None:
    def run(member: Member) -> torch.dtype:
        with torch.autocast("cpu", torch.bfloat16):
            return operators.sharded_log_softmax(
                torch.ones(2, 2, dtype=torch.bfloat16), 1, member
            ).dtype

    assert together([run] * 2) == [torch.float32] * 2
