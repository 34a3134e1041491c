"""Deferred gradients of parameters: equal to undeferred ones, and computed when asked for, not
before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from autopipe.backends.torch.runtime.recompute import Tensors, recompute
from autopipe.backends.torch.runtime.state.arguments import Arguments, set_attribute
from autopipe.backends.torch.runtime.step.weight_gradients import (
    WeightGradQueue,
    compute_weight_gradients,
)

Forward = Callable[[WeightGradQueue, torch.Tensor, list[torch.Tensor]], torch.Tensor]


def linear(later: WeightGradQueue, x: torch.Tensor, w: list[torch.Tensor]) -> torch.Tensor:
    return later(F.linear, x, w[0].t(), w[1])


def two_products(later: WeightGradQueue, x: torch.Tensor, w: list[torch.Tensor]) -> torch.Tensor:
    return torch.tanh(later(torch.matmul, torch.tanh(later(torch.matmul, x, w[0])), w[2]))


def tied(later: WeightGradQueue, x: torch.Tensor, w: list[torch.Tensor]) -> torch.Tensor:
    """One parameter in a lookup, as it is, and transposed."""
    rows = later(F.embedding, torch.tensor([[0, 2], [2, 3]]), w[0])
    return later(torch.matmul, later(torch.matmul, x, w[0]), w[0].t()).sum() * rows.sum(0)


def rows_and_columns(
    later: WeightGradQueue, x: torch.Tensor, w: list[torch.Tensor]
) -> torch.Tensor:
    """Products of tensors of three dimensions, the first of which nothing flows through, by a
    weight and its like.
    """
    first = later(F.linear, torch.ones(2, 3, 6, dtype=torch.float64), w[0])
    return later(torch.matmul, first + x, w[0]) + later(
        torch.matmul, later(torch.mm, x, w[0]), w[5].t()
    )


def pieces(later: WeightGradQueue, x: torch.Tensor, w: list[torch.Tensor]) -> torch.Tensor:
    """An operator of several results, one of them not used and one used twice."""
    first, _, third = torch.split(later(torch.matmul, x, w[0]), 2, -1)
    return first * third + later(lambda y0, y1: 0.5 * torch.mm(y0, y1), first, w[3]) * w[4]


CASES = [linear, two_products, tied, rows_and_columns, pieces]
SHAPES = ((4, 6), (6,), (6, 5), (2, 2), (3, 2), (6, 6))


def drawn() -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    return x, [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in SHAPES
    ]


@pytest.mark.parametrize("forward", CASES)
def test_gradients_equal_undeferred_ones(forward: Forward) -> None:
    plain_x, plain = drawn()
    forward(WeightGradQueue(()), plain_x, plain).square().sum().backward()
    x, weights = drawn()
    later = WeightGradQueue(weights)
    forward(later, x, weights).square().sum().backward()
    assert x.grad is None or torch.equal(x.grad, plain_x.grad)  # type: ignore[arg-type]
    waiting = later.take()
    assert waiting and weights[0].grad is None
    compute_weight_gradients(waiting)
    for found, expected in zip(weights, plain, strict=True):
        if expected.grad is None:
            assert found.grad is None
        else:
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-12)


def test_each_half_does_its_own_products() -> None:
    x = torch.randn(8, 16, requires_grad=True)
    first, second, table = (torch.randn(16, 16, requires_grad=True) for _ in range(3))
    later = WeightGradQueue((first, second, table))
    product = 2 * 8 * 16 * 16
    with FlopCounterMode(display=False) as counter:
        result = later(
            torch.matmul, later(F.linear, x, first, torch.zeros(16, requires_grad=True)), second
        )
    assert counter.get_total_flops() == 2 * product
    with FlopCounterMode(display=False) as counter:
        result.sum().backward()
    assert counter.get_total_flops() == 2 * product
    with FlopCounterMode(display=False) as counter:
        compute_weight_gradients(later.take())
    assert counter.get_total_flops() == 2 * product


def test_a_bias_does_not_wait() -> None:
    weight = torch.randn(4, 3, requires_grad=True)
    bias = torch.randn(4, requires_grad=True)
    later = WeightGradQueue((weight, bias))
    later(F.linear, torch.randn(2, 3), weight, bias).sum().backward()
    assert bias.grad is not None
    assert weight.grad is None


def test_nothing_waits_without_gradients() -> None:
    weight = torch.randn(4, 3, requires_grad=True)
    later = WeightGradQueue((weight,))
    with torch.no_grad():
        later(F.linear, torch.randn(2, 3), weight)
    assert later.used
    assert not later.take()


def test_what_waits_keeps_only_what_it_needs() -> None:
    """The product's operand, until the second half is done; what other operators kept is free after
    the first.
    """
    x = torch.randn(8, 16, requires_grad=True)
    weight = torch.randn(16, 16, requires_grad=True)
    later = WeightGradQueue((weight,))
    operand = torch.tanh(x)
    after = torch.exp(later(torch.matmul, operand, weight))
    needed = operand.untyped_storage()
    other = after.untyped_storage()
    alone = _holders(torch.empty(1).untyped_storage())
    after.sum().backward()
    del operand, after
    assert _holders(needed) > alone
    assert _holders(other) == alone
    compute_weight_gradients(later.take())
    assert _holders(needed) == alone


def test_formulas_queue_no_graph() -> None:
    x = torch.randn(2, 8, 16, requires_grad=True)
    weight = torch.randn(16, 4, requires_grad=True)
    later = WeightGradQueue((weight,))
    later(torch.matmul, x, weight).sum().backward()
    (waits,) = later.take()
    assert isinstance(waits.add, partial) and [type(each) for each in waits.add.args] == [
        torch.Tensor
    ]


def test_autocast_is_autograd_s() -> None:
    """Which casts what flows and the weight, and gives the gradient in the weight's own type."""
    x = torch.randn(8, 16)
    weight = torch.randn(4, 16, requires_grad=True)
    bias = torch.randn(4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        F.linear(x, weight, bias).float().sum().backward()
    expected = weight.grad
    weight.grad = None
    later = WeightGradQueue((weight,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        later(F.linear, x, weight, bias).float().sum().backward()
    compute_weight_gradients(later.take())
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32
    torch.testing.assert_close(weight.grad, expected)


CONVOLUTIONS = [
    (F.conv1d, (2, 4, 9), (6, 2, 3), (6,), {"stride": 2, "padding": 1, "groups": 2}),
    (F.conv2d, (2, 3, 8, 7), (5, 3, 3, 2), (), {"dilation": (2, 1), "padding": (1, 0)}),
    (F.conv3d, (1, 2, 4, 4, 4), (3, 2, 2, 2, 2), (3,), {}),
    (
        F.conv_transpose2d,
        (2, 4, 3, 3),
        (4, 2, 3, 3),
        (4,),
        {"stride": 2, "output_padding": 1, "groups": 2},
    ),
]


@pytest.mark.parametrize(("function", "source", "weight", "bias", "settings"), CONVOLUTIONS)
@pytest.mark.parametrize("flows", [True, False])
def test_convolutions(
    function: Callable[..., torch.Tensor],
    source: tuple[int, ...],
    weight: tuple[int, ...],
    bias: tuple[int, ...],
    settings: dict[str, object],
    flows: bool,
) -> None:
    """Used twice, the second time on what came out of a micro-batch before."""
    shapes = (source, weight, *([bias] if bias else []))
    plain = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    waiting = [each.detach().clone().requires_grad_() for each in plain]
    plain[0].requires_grad_(flows)
    waiting[0].requires_grad_(flows)
    later = WeightGradQueue(waiting[1:])
    for turn in (1.0, 2.0):
        function(plain[0] * turn, *plain[1:], **settings).square().sum().backward()
        later(function, waiting[0] * turn, *waiting[1:], **settings).square().sum().backward()
    assert waiting[1].grad is None
    compute_weight_gradients(later.take())
    for found, expected in zip(waiting[not flows :], plain[not flows :], strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-12)


@recompute
def _two_layers(p: Any, x: torch.Tensor) -> tuple[Tensors, Tensors]:
    """A recomputed segment whose function several segments share."""
    hidden = torch.tanh(p.weight_grads(F.linear, x, p.first))
    return (p.weight_grads(F.linear, hidden, p.second),), ()


def test_segments_of_one_function_may_share_their_first_weight() -> None:
    generator = torch.Generator().manual_seed(1)
    common, *others = (
        torch.randn(4, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    )
    x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    plain = x
    for other in others:
        plain = F.linear(torch.tanh(F.linear(plain, common)), other)
    expected = torch.autograd.grad(plain.square().sum(), [common, *others])

    queue = WeightGradQueue([common, *others])
    p = Arguments(device=x.device, weight_grads=queue, random=SimpleNamespace(state=None))
    for index, other in enumerate(others):
        set_attribute(p, f"layers.{index}.first", common)
        set_attribute(p, f"layers.{index}.second", other)
    found = x
    for layer in p.layers:
        (found,) = _two_layers(layer, found)
    torch.testing.assert_close(found, plain)
    found.square().sum().backward()
    compute_weight_gradients(queue.take())
    for parameter, gradient in zip([common, *others], expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def _holders(storage: torch.UntypedStorage) -> int:
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count
