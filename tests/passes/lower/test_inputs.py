"""Random data keeps to what an input is used for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from autopipe.ir.graph import Attribute, Constant, DType, Graph, Node, Value
from autopipe.passes.analysis.input_ranges import input_ranges

INT = DType.INT64


def graph(
    *nodes: Node,
    values: tuple[Value, ...],
    constants: tuple[Constant, ...] = (),
    dtype: DType = INT,
) -> Graph:
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
    nodes = (
        node("Gather", "x", "ids", output="a", axis=2),
        node("Gather", "x", "ids", output="b", axis=1),
    )
    assert below(graph(*nodes, values=(value("a", (4, 5, 2, 3)), value("b", (4, 2, 3, 6))))) == 5


def test_tuples_stay_below_the_least_extent() -> None:
    assert below(graph(node("GatherND", "x", "ids"), values=(value("y", (2,)),))) == 4


@pytest.mark.parametrize("op", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_labels_stay_below_the_classes(op: str) -> None:
    assert below(graph(node(op, "x", "ids"), values=(value("y", ()),))) == 5


def test_one_hot_depth() -> None:
    found = graph(
        node("OneHot", "ids", "depth", "x"),
        values=(value("y", (2, 3, 9)),),
        constants=(whole("depth", 9),),
    )
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
    found = graph(
        passing, node("Gather", "x", "same"), values=values, constants=(whole("shape", [3, 2]),)
    )
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
    found = graph(
        shift,
        node("Gather", "x", "more"),
        values=values,
        constants=(whole("one", 1), whole("many", 7)),
    )
    assert below(found) == limit


def test_what_indexes_nothing_is_a_mask() -> None:
    found = graph(node("Cast", "ids", output="y", to=1), values=(value("y", (2, 3)),))
    assert below(found) == 2
    assert (
        below(graph(node("Not", "ids"), values=(value("y", (2, 3), DType.BOOL),), dtype=DType.BOOL))
        == 2
    )


def drawn(found: Graph) -> list[tuple[int, int]]:
    return [(each.least, each.below) for each in input_ranges(found)[0].drawn]


@pytest.mark.parametrize("operands", [("column", "classes"), ("classes", "column")])
def test_numbers_compared_with_classes_are_classes(operands: tuple[str, str]) -> None:
    """A one-hot as JAX writes it. Other numbers make an empty row, so they are not rejected."""
    nodes = (node("Unsqueeze", "ids", "last", output="column"), node("Equal", *operands))
    values = (value("column", (2, 3, 1), INT), value("y", (2, 3, 9), DType.BOOL))
    constants = (whole("last", [2]), whole("classes", [[list(range(9))]]))
    found = graph(*nodes, values=values, constants=constants)
    assert below(found) == 9
    assert drawn(found) == []
    assert allowed(found) == []


@pytest.mark.parametrize("operation", ["Less", "LessOrEqual", "Greater", "GreaterOrEqual"])
@pytest.mark.parametrize("first", [0, 1])
def test_numbers_compared_with_positions_are_lengths(operation: str, first: int) -> None:
    """A sample of length 0 has a mean over nothing."""
    compared = node(operation, "positions", "ids")
    positions = whole("positions", [[[first]], [[first + 1]], [[first + 2]], [[first + 3]]])
    found = graph(compared, values=(value("y", (4, 2, 3), DType.BOOL),), constants=(positions,))
    assert drawn(found) == [(1, 5)]
    assert allowed(found) == []


@pytest.mark.parametrize("other", [[[0], [1]], [7], [2, 3, 4], [0, 2, 4]])
def test_other_comparisons_tell_nothing(other: object) -> None:
    for operation in ("Equal", "Less"):
        compared = node(operation, "ids", "other")
        found = graph(
            compared, values=(value("y", (2, 3), DType.BOOL),), constants=(whole("other", other),)
        )
        assert below(found) == 2
        assert drawn(found) == []


@pytest.mark.parametrize(
    "reader",
    [
        node("ReverseSequence", "x", "lengths"),
        node("GRU", "x", "weight", "recurrence", "", "lengths", hidden_size=6),
    ],
)
def test_lengths_of_sequences_are_at_least_1(reader: Node) -> None:
    inputs = (Value("lengths", INT, (5,)), value("x", (4, 5, 6)), value("weight", (1, 18, 6)))
    inputs += (value("recurrence", (1, 18, 6)),)
    found = Graph("g", 21, inputs, (), (), (reader,), ("y",), (value("y", (4, 5, 6)),), ())
    assert drawn(found) == [(1, 5)]


def test_divisors_are_at_least_1() -> None:
    nodes = (node("Cast", "ids", output="count", to=1), node("Div", "ones", "count"))
    constant = Constant(value("ones", (2, 3)), np.ones((2, 3), np.float32))
    found = graph(
        *nodes, values=(value("count", (2, 3)), value("y", (2, 3))), constants=(constant,)
    )
    assert drawn(found) == [(1, 2)]


def test_a_divisor_that_is_a_length_is_drawn_as_a_length() -> None:
    nodes = (node("Div", "ids", "ids", output="ratio"), node("Less", "ids", "positions"))
    values = (value("ratio", (2, 3), INT), value("y", (2, 3), DType.BOOL))
    found = graph(*nodes, values=values, constants=(whole("positions", [0, 1, 2]),))
    assert drawn(found) == [(1, 4)]


def test_real_numbers_are_free() -> None:
    found = input_ranges(graph(node("Tanh", "x"), values=(value("y", (4, 5, 6)),)))
    assert [each.below for each in found] == [2, None]
    assert [each.batch_axis for each in found] == [0, None]


def allowed(found: Graph) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    return [
        (each.least, each.below, each.starts, each.stops) for each in input_ranges(found)[0].allowed
    ]


def test_given_indices_may_count_from_the_end_but_not_those_of_embeddings() -> None:
    picks = graph(node("Gather", "x", "ids", axis=1), values=(value("y", (4, 2, 3, 6)),))
    assert allowed(picks) == [(-5, 5, (0, 0), (2, 3))]
    table = dataclasses.replace(picks, inputs=(picks.inputs[0], value("x", (4, 5))))
    embeds = dataclasses.replace(
        table, nodes=(node("Gather", "x", "ids"),), values=(value("y", (2, 3, 5)),)
    )
    assert allowed(embeds) == [(0, 4, (0, 0), (2, 3))]


def test_labels_may_be_the_one_that_is_ignored() -> None:
    loss = node("SoftmaxCrossEntropyLoss", "x", "ids", ignore_index=-100)
    found = input_ranges(graph(loss, values=(value("y", ()),)))[0]
    assert (found.allowed[0].below, found.ignored) == (5, -100)
    assert (
        input_ranges(graph(node("SoftmaxCrossEntropyLoss", "x", "ids"), values=(value("y", ()),)))[
            0
        ].ignored
        is None
    )


def test_each_column_keeps_to_the_table_that_it_indexes() -> None:
    """A recommender's: column 0 by Gather, columns 1 and 2 by Slice; the second is moved on into a
    common table.
    """
    nodes = (
        node("Gather", "ids", "one", output="second", axis=1),
        node("Slice", "ids", "nought", "one", "one", output="first"),
        node("Slice", "ids", "two", "many", "one", output="third"),
        node("Gather", "x", "second", output="a", axis=2),
        node("Gather", "x", "first", output="b", axis=0),
        node("Add", "third", "offset", output="moved"),
        node("Gather", "x", "moved", output="c", axis=1),
    )
    values = (value("second", (2,), INT), value("first", (2, 1), INT), value("third", (2, 1), INT))
    values += (
        value("moved", (2, 1), INT),
        value("a", (4, 5, 2)),
        value("b", (2, 1, 5, 6)),
        value("c", (4, 2, 1, 6)),
    )
    known = (whole("one", 1), whole("offset", [[2]]))
    known += tuple(
        whole(name, [number]) for name, number in (("nought", 0), ("two", 2), ("many", 99))
    )
    known = (whole("one", [1]), *known[1:])
    found = graph(*nodes, values=values, constants=known)
    found = dataclasses.replace(
        found, nodes=(dataclasses.replace(nodes[0], inputs=("ids", "place")), *nodes[1:])
    )
    found = dataclasses.replace(found, constants=(*known, whole("place", 1)))
    columns = {starts[1]: (least, limit) for least, limit, starts, _ in allowed(found)}
    assert columns == {0: (-4, 4), 1: (-6, 6), 2: (-7, 3)}
    drawn = input_ranges(found)[0].drawn
    assert {each.starts[1]: each.below for each in drawn} == {0: 4, 1: 6, 2: 3}
    assert input_ranges(found)[0].below == 3


@pytest.mark.parametrize("axes", [(), ("last",)])
def test_labels_that_the_graph_moves_are_bounded_from_the_second_on(axes: tuple[str, ...]) -> None:
    """As transformers do: a label that counts for nothing is put behind them, and the first one is
    cut off.
    """
    nodes = (
        node("Pad", "ids", "pads", "nothing", *axes, output="padded"),
        node("Slice", "padded", "one", "many", "last", output="labels"),
        node("SoftmaxCrossEntropyLoss", "scores", "labels", ignore_index=-100),
    )
    values = (value("padded", (2, 4), INT), value("labels", (2, 3), INT), value("y", ()))
    constants = (
        whole("pads", [0, 1] if axes else [0, 0, 0, 1]),
        whole("nothing", -100),
        whole("last", [1]),
    )
    found = graph(
        *nodes, values=values, constants=(*constants, whole("one", [1]), whole("many", [99]))
    )
    found = dataclasses.replace(found, inputs=(*found.inputs, value("scores", (2, 5, 3))))
    assert allowed(found) == [(0, 5, (0, 1), (2, 3))]
    assert input_ranges(found)[0].ignored == -100


@pytest.mark.parametrize("changing", ["Clip", "Mod", "Where"])
def test_numbers_that_are_changed_first_are_drawn_in_range_and_never_refused(changing: str) -> None:
    inputs = {
        "Clip": ("ids", "one", "many"),
        "Mod": ("ids", "many"),
        "Where": ("hidden", "one", "ids"),
    }[changing]
    values = (value("same", (2, 3), INT), value("y", (4, 2, 3, 6)))
    nodes = (node(changing, *inputs, output="same"), node("Gather", "x", "same", axis=1))
    hidden = Constant(value("hidden", (2, 3), DType.BOOL), np.zeros((2, 3), bool))
    found = graph(*nodes, values=values, constants=(whole("one", 1), whole("many", 7), hidden))
    assert below(found) == 5 and allowed(found) == []


def test_a_mask_whose_sum_is_a_place_is_drawn_without_empty_samples() -> None:
    values = (value("length", (2,), INT), value("last", (2,), INT), value("y", (4, 2, 6)))
    nodes = (
        node("ReduceSum", "ids", "one", output="length", keepdims=0),
        node("Sub", "length", "one", output="last"),
        node("Gather", "x", "last", axis=1),
    )
    found = input_ranges(graph(*nodes, values=values, constants=(whole("one", [1]),)))[0]
    assert [(each.least, each.below) for each in found.drawn] == [(1, 2)] and not found.allowed


def test_masks_and_classes_of_one_hots_may_be_any_number() -> None:
    found = graph(
        node("OneHot", "ids", "depth", "x"),
        values=(value("y", (2, 3, 9)),),
        constants=(whole("depth", 9),),
    )
    assert allowed(found) == []
    assert allowed(graph(node("Cast", "ids", output="y", to=1), values=(value("y", (2, 3)),))) == []


def test_indices_written_as_real_numbers_are_drawn_from_the_table() -> None:
    values = (value("whole", (2, 3), INT), value("y", (4, 2, 3, 6)))
    nodes = (node("Cast", "ids", output="whole", to=7), node("Gather", "x", "whole", axis=1))
    found = input_ranges(graph(*nodes, values=values, dtype=DType.FLOAT32))[0]
    assert found.below is None
    assert [(each.least, each.below) for each in found.drawn] == [(-5, 5)]


def test_a_scalar_index_is_bounded() -> None:
    lookup = node("Gather", "x", "number", axis=0)
    inputs = (Value("number", INT, ()), Value("x", DType.FLOAT32, (4, 5, 6)))
    one = Graph("g", 21, inputs, (), (), (lookup,), ("y",), (value("y", (5, 6)),), ())
    (found,) = [each for each in input_ranges(one) if each.value.name == "number"]
    assert found.below == 4
    assert [(part.least, part.below, part.starts, part.stops) for part in found.allowed] == [
        (-4, 4, (), ())
    ]


def test_rows_with_bounds_of_their_own_are_blocks_in_ascending_order() -> None:
    first = whole("first", [0])
    last = whole("last", [1])
    nodes = (
        node("Gather", "ids", "last", output="row 1", axis=0),
        node("Gather", "x", "row 1", output="a", axis=0),
        node("Gather", "ids", "first", output="row 0", axis=0),
        node("Gather", "x", "row 0", output="b", axis=1),
    )
    values = (value("row 0", (1, 3), INT), value("row 1", (1, 3), INT))
    values += (value("a", (1, 3, 5, 6)), value("b", (4, 1, 3, 6)))
    made = dataclasses.replace(graph(*nodes, values=values, constants=(first, last)), batch_axes=())
    parts = input_ranges(made)[0].allowed
    found = [(part.least, part.below, part.starts, part.stops) for part in parts]
    assert found == [(-5, 5, (0, 0), (1, 3)), (-4, 4, (1, 0), (2, 3))]
