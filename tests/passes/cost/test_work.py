from __future__ import annotations

import pytest

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import DType, Graph, Node, Value
from autopipe.passes.analysis.operators import op_instances
from autopipe.passes.cost.roofline import roofline_costs
from tests.passes.cost.graphs import Builder, perceptron


def test_product_counts_two_a_multiply_add_and_one_product_for_each_gradient() -> None:
    first, _, second, _ = roofline_costs(perceptron([16, 32, 4], batch=8))
    assert first.forward_flops == 2 * 8 * 16 * 32
    assert first.backward_flops == first.forward_flops, "the data needs no gradient"
    assert second.forward_flops == 2 * 8 * 32 * 4
    assert second.backward_flops == 2 * second.forward_flops
    assert second.forward_bytes == 4 * (8 * 32 + 32 * 4 + 8 * 4)
    assert second.backward_bytes == 2 * second.forward_bytes


def test_nothing_flows_back_through_frozen_layers() -> None:
    builder = Builder(8, 16)
    frozen = builder.relu(builder.linear("x", 16, trainable=False))
    graph = builder.finish(builder.linear(frozen, 4))
    product, relu, head = roofline_costs(graph)
    assert (product.backward_flops, product.backward_bytes, product.kept_bytes) == (0, 0, 0)
    assert (relu.backward_flops, relu.kept_bytes) == (0, 0)
    assert head.backward_flops == head.forward_flops
    assert head.kept_bytes == 4 * 8 * 16


def test_a_value_kept_by_several_is_counted_once_at_the_first() -> None:
    builder = Builder(8, 16)
    hidden = builder.relu(builder.linear("x", 32))
    left = builder.linear(hidden, 4)
    right = builder.linear(hidden, 4)
    work = roofline_costs(builder.finish(builder.add(left, right)))
    size = 4 * 8 * 32
    assert [each.kept_bytes for each in work] == [0, size, 0, 0, 0], (
        "relu's result serves the products too"
    )


def test_views_move_nothing_and_keep_nothing_themselves() -> None:
    builder = Builder(8, 16)
    hidden = builder.linear("x", 32)
    turned = builder.node("Identity", (hidden,), (8, 32))
    work = roofline_costs(builder.finish(builder.linear(turned, 4)))
    assert work[1].kind == "view"
    assert (work[1].forward_bytes, work[1].backward_bytes, work[1].kept_bytes) == (0, 0, 0)
    assert work[2].kept_bytes == 4 * 8 * 32


def test_sixteen_bits_halve_products() -> None:
    graph = perceptron([16, 32, 4], batch=8)
    full = roofline_costs(graph, "fp32")
    half = roofline_costs(graph, "bf16")
    assert half[2].kept_bytes == 0, (
        "Relu's result is kept in 16 bits already, and the weight's copy stays all step"
    )
    assert half[0].kept_bytes == 2 * 8 * 16, "the data's copy"
    assert half[1].forward_bytes == full[1].forward_bytes / 2


def test_equal_layers_are_worked_out_once() -> None:
    uses = op_instances(perceptron([16] * 50))
    assert len({id(use) for use in uses}) == 2


def test_a_lookup_reads_rows_and_its_gradient_is_a_table() -> None:
    builder = Builder(8, 4)
    builder.inputs = (Value("x", DType.INT64, (8,)),)
    table = builder.parameter("table", (100, 4))
    (work,) = roofline_costs(builder.finish(builder.node("Gather", (table, "x"), (8, 4))))
    rows = 4 * 8 * 4
    indices = 8 * 8
    assert work.forward_bytes == 2 * rows + indices
    assert work.backward_bytes == work.forward_bytes + (4 * 100 * 4 - rows)


def test_an_unknown_operator_is_named() -> None:
    value = Value("x", DType.FLOAT32, (2,))
    node = Node("odd one", "Conjure", ("x",), ("y",))
    graph = Graph("g", 20, (value,), (), (), (node,), ("y",), (Value("y", DType.FLOAT32, (2,)),))
    with pytest.raises(ModelError, match=r"odd one.*Conjure is not supported"):
        roofline_costs(graph)
