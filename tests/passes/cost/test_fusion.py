"""Kernels of compiled operators, by graphs made by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autopipe.passes.cost.fusion import fused_groups, fused_work
from autopipe.passes.cost.roofline import node_seconds, roofline_costs
from tests.distributed.support.builder import Builder
from tests.passes.cost.graphs import device

SHAPE = 8, 16
BYTES = 8 * 16 * 8.0
"""Of one tensor."""


def test_a_chain_is_one_pass_over_memory() -> None:
    builder = Builder()
    x = builder.parameter(SHAPE)
    y = builder.input(SHAPE)
    graph = builder.graph(builder.node("Mul", builder.node("Sigmoid", builder.node("Tanh", x)), y))
    assert fused_groups(graph) == ((0, 1, 2),)
    apart = roofline_costs(graph)
    together = fused_work(graph, "fp32", apart)
    assert sum(each.forward_bytes for each in apart) == 7 * BYTES
    # Reads x and y, writes the result; backward reads x, y and the result's gradient, and writes
    # that of x.
    assert sum(each.forward_bytes for each in together) == pytest.approx(3 * BYTES)
    assert sum(each.backward_bytes for each in together) == pytest.approx(4 * BYTES)
    toy = device(bandwidth=1e30, flops=1e30, latency=1e-6)
    forward, backward = node_seconds(together, toy, "fp32")
    assert forward.sum() == pytest.approx(1e-6)
    assert backward.sum() == pytest.approx(1e-6)
    assert node_seconds(apart, toy, "fp32")[0].sum() == pytest.approx(3e-6)


def test_what_others_read_is_written() -> None:
    builder = Builder()
    inner = builder.node("Tanh", builder.input(SHAPE))
    graph = builder.graph(
        builder.node("MatMul", inner, builder.parameter((16, 4))), builder.node("Neg", inner)
    )
    assert fused_groups(graph) == ((0, 2),)
    assert sum(
        fused_work(graph, "fp32", roofline_costs(graph))[index].forward_bytes for index in (0, 2)
    ) == pytest.approx(3 * BYTES)


def around_a_product(builder: Builder, x: str) -> str:
    """The sum reads the first kernel, and what a product makes of it."""
    inner = builder.node("Tanh", x)
    return builder.node("Add", inner, builder.node("MatMul", inner, builder.parameter((16, 16))))


def behind_a_product(builder: Builder, x: str) -> str:
    product = builder.node("MatMul", x, builder.parameter((16, 16)))
    return builder.node("Tanh", builder.node("Add", product, builder.parameter((16,))))


def through_a_view(builder: Builder, x: str) -> str:
    return builder.node("Neg", builder.node("Transpose", builder.node("Tanh", x), perm=(1, 0)))


def around_a_reduction(builder: Builder, x: str) -> str:
    total = builder.node("ReduceSum", builder.node("Tanh", x), builder.constant([1]), keepdims=1)
    return builder.node("Mul", builder.node("Neg", total), x)


def of_other_sizes(builder: Builder, x: str) -> str:
    """What runs over a column is no part of what runs over all."""
    return builder.node("Mul", x, builder.node("Neg", builder.input((8, 1))))


@pytest.mark.parametrize(
    ("make", "groups"),
    [
        (around_a_product, ()),
        (behind_a_product, ((1, 2),)),
        (through_a_view, ((0, 2),)),
        (around_a_reduction, ((0, 1, 2, 3),)),
        (of_other_sizes, ()),
    ],
)
def test_groups(make: Callable[[Builder, str], str], groups: tuple[tuple[int, ...], ...]) -> None:
    builder = Builder()
    assert fused_groups(builder.graph(make(builder, builder.input(SHAPE)))) == groups
