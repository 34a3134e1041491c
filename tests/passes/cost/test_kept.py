"""What a device keeps of tensors that it holds a part of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.ir.graph import DType, Graph
from autopipe.passes.analysis.gradients import attention_tensors, saved_tensors
from autopipe.passes.cost.roofline import roofline_costs
from tests.distributed.support.builder import Builder
from tests.distributed.support.trained import in_double
from tests.distributed.support.zoo import small_graph


def test_of_an_image_read_through_windows_the_rows_that_they_read() -> None:
    builder = Builder()
    hidden = builder.node(
        "Relu", builder.node("Mul", builder.input((4, 2, 8, 6)), builder.parameter((6,)))
    )
    weight = builder.parameter((2, 2, 3, 3))
    made = builder.node("Conv", hidden, weight, pads=(1, 1, 1, 1), strides=(1, 2), dilations=(1, 1))
    graph = builder.graph(builder.mean_square(made))
    (kept,) = (each for each in saved_tensors(graph)[2] if each.key[0] == hidden)
    row = 4 * 2 * 6 * 8
    assert kept.bytes == 8 * row
    assert kept.local_bytes({}) == kept.local_bytes({"o0": 1}) == 8 * row
    assert kept.local_bytes({"o0": 2}) == 6 * row, "four rows and one beyond each end"
    assert kept.local_bytes({"o0": 4, "n": 2}) == 4 * row // 2
    assert kept.local_bytes({"o1": 3}) == 8 * row // 2, "three of six columns"


@pytest.mark.parametrize("only_products", [True, False])
def test_autocast_copies_a_value_for_each_product_that_reads_it_and_a_weight_once(
    only_products: bool,
) -> None:
    """A weight that nothing reads but products is copied once a step, and is no part of what a
    micro-batch keeps.
    """
    builder = Builder(dtype=DType.FLOAT32)
    data = builder.input((8, 16))
    scale = builder.parameter((16,))
    read = builder.node("Mul", data, scale)
    weight = builder.parameter((16, 16))
    once = builder.node("MatMul", read, weight)
    again = builder.node("MatMul", read, weight)
    last = (
        again
        if only_products
        else builder.node("MatMul", again, builder.node("Mul", weight, scale))
    )
    graph = builder.graph(builder.mean_square(builder.node("Add", once, last)))
    at = {precision: saved_tensors(graph, precision) for precision in ("fp32", "bf16")}
    copies = {each.key: each.bytes for index in (1, 2) for each in at["bf16"][index]}
    assert sorted(copies.values()) == [2 * 8 * 16] * 2 + [2 * 16 * 16] * (not only_products)
    assert [each.key for index in (1, 2) for each in at["fp32"][index]] == [(read, 4)] * 2, (
        "no copies"
    )


def test_a_bias_that_is_added_with_a_product_leaves_16_bits() -> None:
    builder = Builder()
    product = builder.node("MatMul", builder.input((8, 16)), builder.parameter((16, 32)))
    together = builder.node("Relu", builder.node("Add", product, builder.parameter((32,))))
    alone = builder.node("Relu", builder.node("Add", together, builder.parameter((32,))))
    graph = builder.graph(builder.mean_square(alone))
    kept = {each.key[0]: each.bytes for node in saved_tensors(graph, "bf16") for each in node}
    assert (kept[together], kept[alone]) == (2 * 8 * 32, 8 * 8 * 32)


def test_what_a_gpu_writes_for_attention_is_priced() -> None:
    """Llama's key-value heads are shared in pairs: in fp32 the fused kernel reads them repeated, in
    bf16 not. In double precision there is only the kernel that writes all scores. On a CPU nothing
    is written.
    """
    graph, _ = small_graph("llama")
    base, fused, flash = (
        saved_tensors(graph, precision, capability)
        for precision, capability in (("fp32", None), ("fp32", (8, 0)), ("bf16", (8, 0)))
    )
    more = [
        sum(each.bytes for each in new) - sum(each.bytes for each in old)
        for new, old in zip(fused, base, strict=True)
    ]
    layers = [index for index, node in enumerate(graph.nodes) if node.op == "Attention"]
    assert len(layers) == 2
    assert {index for index, size in enumerate(more) if size} == set(layers)
    # samples, heads, keys, numbers of key and value, bytes
    assert more[layers[0]] == 12 * 12 * 12 * (4 + 4) * 4
    assert flash == saved_tensors(graph, "bf16")
    double = in_double(graph)
    scores = attention_tensors(double, "fp32", (8, 0))[layers[0]].tensor
    assert scores in saved_tensors(double, "fp32", (8, 0))[layers[0]]
    assert scores.bytes == 12 * 12 * 12 * 12 * 8
    assert scores.local_bytes({"b": 3, "h": 2}) == scores.bytes // 6
    written = roofline_costs(double)[layers[0]]
    priced = roofline_costs(double, "fp32", (8, 0))[layers[0]]
    assert priced.forward_bytes - written.forward_bytes == 4 * scores.bytes


def test_capped_scores_are_moved_and_windows_are_masks() -> None:
    """No kernel caps scores: they are written on every device, and backward makes them again. A
    window is a mask, of which flash attention knows none: for heads of 4 numbers in bf16 that
    leaves the kernel that writes scores.
    """
    graph, _ = small_graph("llama")

    def with_attribute(name: str, number: float) -> Graph:
        nodes = (
            replace(node, attributes=tuple(sorted((*node.attributes, (name, number)))))
            if node.op == "Attention"
            else node
            for node in graph.nodes
        )
        return replace(graph, nodes=tuple(nodes))

    layer = next(index for index, node in enumerate(graph.nodes) if node.op == "Attention")
    capped = with_attribute("softcap", 30.0)
    narrow = with_attribute("left_window_size", 2)
    assert saved_tensors(capped) == saved_tensors(graph)
    scores = attention_tensors(capped)[layer].tensor
    assert scores.bytes == 12 * 12 * 12 * 12 * 4
    assert (
        roofline_costs(capped)[layer].forward_bytes - roofline_costs(graph)[layer].forward_bytes
        == 12 * scores.bytes
    )
    assert layer not in attention_tensors(graph, "bf16", (8, 0))
    masked = attention_tensors(narrow, "bf16", (8, 0))[layer]
    assert masked.scores and masked.kept
