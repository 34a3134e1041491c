"""Parallel branches of a graph."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.frontend import read_model
from autopipe.passes.frontend.branches import find_branches
from tests.passes.frontend.building import Shape, floats, model, node, saved


def towers(count: int, layers: int) -> onnx.ModelProto:
    """Return a model of `count` parallel chains of `layers` matrix products, whose results are
    summed and multiplied once more.
    """
    nodes = []
    ends = []
    for tower in range(count):
        value = f"x{tower}"
        for layer in range(layers):
            result = f"t{tower}_{layer}"
            nodes.append(node("MatMul", f"{value} w{tower}_{layer}", result))
            value = result
        ends.append(value)
    nodes += [node("Sum", " ".join(ends), "s"), node("MatMul", "s head", "y")]
    held = {f"w{tower}_{layer}": floats(8, 8) for tower in range(count) for layer in range(layers)}
    inputs: dict[str, Shape | tuple[int, Shape]] = {f"x{tower}": [2, 8] for tower in range(count)}
    return model(nodes, inputs, "y", held | {"head": floats(8, 8)})


@pytest.mark.parametrize(("count", "layers"), [(2, 3), (4, 2), (3, 1)])
def test_towers_are_branches(count: int, layers: int, tmp_path: Path) -> None:
    graph = read_model(saved(towers(count, layers), tmp_path)).graph
    work = [each.forward_flops for each in roofline_costs(graph)]
    found = find_branches(graph, work)
    assert [branch.first for branch in found] == [f"matmul_t{tower}_0" for tower in range(count)]
    assert [branch.nodes for branch in found] == [layers] * count
    assert {branch.flops for branch in found} == {layers * 2.0 * 2 * 8 * 8}


def test_a_chain_has_no_branches(tmp_path: Path) -> None:
    graph = read_model(saved(towers(1, 4), tmp_path)).graph
    assert find_branches(graph, [each.forward_flops for each in roofline_costs(graph)]) == ()


def test_consecutive_forks(tmp_path: Path) -> None:
    """Of two forks in a row, only the branches of one are returned."""
    nodes = [
        node("MatMul", "x a", "a1"), node("MatMul", "x b", "b1"), node("Add", "a1 b1", "m"),
        node("MatMul", "m c", "c1"), node("MatMul", "m d", "d1"), node("Add", "c1 d1", "y"),
    ]  # fmt: skip
    proto = model(nodes, {"x": [2, 8]}, "y", {name: floats(8, 8) for name in "abcd"})
    graph = read_model(saved(proto, tmp_path)).graph
    found = find_branches(graph, [each.forward_flops for each in roofline_costs(graph)])
    assert [branch.first for branch in found] == ["matmul_a1", "matmul_b1"]
