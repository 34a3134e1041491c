"""Random data keeps to what an input is used for."""

from __future__ import annotations

import numpy as np
import pytest

from autopipe.ir.dtype import DType
from autopipe.ir.graph import Attribute, Constant, Graph, Node, Value
from autopipe.passes.lower.inputs import input_ranges

INT = DType.INT64


def graph(*nodes: Node, values: tuple[Value, ...], constants: tuple[Constant, ...] = (), dtype: DType = INT) -> Graph:
    """Nodes that read the input `ids` of shape (2, 3) and a float input `x` of shape (4, 5, 6)."""
    inputs = (Value("ids", dtype, (2, 3)), Value("x", DType.FLOAT32, (4, 5, 6)))
    return Graph("g", 21, inputs, (), constants, nodes, (values[-1].name,), values, (("ids", 0),))


def node(op: str, *inputs: str, output: str = "y", **attributes: Attribute) -> Node:
    return Node(op, op, inputs, (output,), tuple(sorted(attributes.items())))


def value(name: str, shape: tuple[int, ...], dtype: DType = DType.FLOAT32) -> Value:
    return Value(name, dtype, shape)


def whole(name: str, number: object) -> Constant:
    array = np.asarray(number, np.int64)
    return Constant(Value(name, INT, array.shape), array)


def below(found: Graph) -> int | None:
    return input_ranges(found)[0].below


@pytest.mark.parametrize(("axis", "limit"), [(0, 4), (1, 5), (2, 6), (-1, 6), (-3, 4)])
@pytest.mark.parametrize("op", ["Gather", "GatherElements"])
def test_indices_stay_below_the_extent_they_index(op: str, axis: int, limit: int) -> None:
    assert below(graph(node(op, "x", "ids", axis=axis), values=(value("y", (2, 3)),))) == limit


def test_the_first_axis_is_meant_where_none_is_said() -> None:
    assert below(graph(node("Gather", "x", "ids"), values=(value("y", (2, 3, 5, 6)),))) == 4


def test_several_uses_take_the_least() -> None:
    nodes = (node("Gather", "x", "ids", output="a", axis=2), node("Gather", "x", "ids", output="b", axis=1))
    assert below(graph(*nodes, values=(value("a", (4, 5, 2, 3)), value("b", (4, 2, 3, 6))))) == 5


def test_tuples_stay_below_the_least_extent() -> None:
    assert below(graph(node("GatherND", "x", "ids"), values=(value("y", (2,)),))) == 4


@pytest.mark.parametrize("op", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_labels_stay_below_the_classes(op: str) -> None:
    assert below(graph(node(op, "x", "ids"), values=(value("y", ()),))) == 5


def test_one_hot_depth() -> None:
    found = graph(node("OneHot", "ids", "depth", "x"), values=(value("y", (2, 3, 9)),), constants=(whole("depth", 9),))
    assert below(found) == 9


@pytest.mark.parametrize(
    "passing",
    [
        node("Reshape", "ids", "shape", output="same"),
        node("Cast", "ids", output="same", to=6),
        node("Transpose", "ids", output="same", perm=(1, 0)),
        node("Identity", "ids", output="same"),
    ],
)
def test_limits_are_seen_through_what_only_moves_numbers(passing: Node) -> None:
    values = (value("same", (3, 2), INT), value("y", (3, 2, 5, 6)))
    found = graph(passing, node("Gather", "x", "same"), values=values, constants=(whole("shape", [3, 2]),))
    assert below(found) == 4


@pytest.mark.parametrize(
    ("shift", "limit"),
    [
        (node("Add", "ids", "one", output="more"), 3),
        (node("Add", "one", "ids", output="more"), 3),
        (node("Sub", "ids", "one", output="more"), 5),
        (node("Add", "ids", "many", output="more"), 1),
        (node("Sub", "one", "ids", output="more"), 2),
    ],
)
def test_numbers_that_are_moved_first_stay_in_range(shift: Node, limit: int) -> None:
    """Indices below zero count from the end; there is always one number left to draw."""
    values = (value("more", (2, 3), INT), value("y", (2, 3, 5, 6)))
    found = graph(shift, node("Gather", "x", "more"), values=values, constants=(whole("one", 1), whole("many", 7)))
    assert below(found) == limit


def test_what_indexes_nothing_is_a_mask() -> None:
    found = graph(node("Cast", "ids", output="y", to=1), values=(value("y", (2, 3)),))
    assert below(found) == 2
    assert below(graph(node("Not", "ids"), values=(value("y", (2, 3), DType.BOOL),), dtype=DType.BOOL)) == 2


def test_real_numbers_are_free() -> None:
    found = input_ranges(graph(node("Tanh", "x"), values=(value("y", (4, 5, 6)),)))
    assert [each.below for each in found] == [2, None]
    assert [each.batch_axis for each in found] == [0, None]
