"""Graphs: what is looked up, what is refused, and what tells two apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Constant, DType, FileSlice, Fill, Graph, Node, Parameter, Value
from tests.distributed.support.builder import Builder


def example() -> Graph:
    builder = Builder()
    value = builder.node("MatMul", builder.input((4, 4)), builder.parameter((4, 4)))
    two = builder.constant(2.0, DType.FLOAT64)
    return builder.graph(builder.node("Mul", builder.node("Mul", value, value), two))


def test_lookups() -> None:
    graph = example()
    assert graph.type_of("v0") == Value("v0", DType.FLOAT64, (4, 4))
    assert (graph.producer("v1"), graph.producer("in0"), graph.producer("w0")) == (1, None, None)
    assert (graph.parameter("w0"), graph.parameter("v0"), graph.parameter("k0")) == (
        graph.parameters[0],
        None,
        None,
    )
    assert (graph.constant("k0"), graph.constant("w0")) == (graph.constants[0], None)
    assert graph.has("v2")
    assert not graph.has("v3")
    assert graph.consumers() == {"in0": (0,), "w0": (0,), "v0": (1,), "v1": (2,), "k0": (2,)}
    assert Value("x", DType.BFLOAT16, (3, 5)).bytes == 30
    with pytest.raises(KeyError):
        graph.type_of("v3")


def test_a_name_defined_twice() -> None:
    graph = example()
    with pytest.raises(ModelError, match="value 'in0' is defined twice"):
        replace(graph, values=(*graph.values, Value("in0", DType.FLOAT32, ())))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"nodes": (Node("n", "Tanh", ("nowhere",), ("v0",)),)},
            "Tanh reads 'nowhere' before a node writes it",
        ),
        (
            {"nodes": (Node("n", "Tanh", ("v1",), ("v0",)), Node("m", "Tanh", ("v0",), ("v1",)))},
            "reads 'v1' before",
        ),
        (
            {"nodes": (Node("n", "Tanh", ("in0",), ("untyped",)),)},
            "writes 'untyped', whose type is unknown",
        ),
        ({"nodes": (Node("n", "Tanh", ("in0",), ("v0",)),) * 2}, "writes 'v0', which another node"),
        ({"nodes": (Node("n", "Tanh", ("in0",), ("w0",)),)}, "writes 'w0', which another node"),
        ({"outputs": ("nowhere",)}, "no node writes the output 'nowhere'"),
    ],
)
def test_graphs_that_are_refused(change: dict[str, tuple[object, ...]], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(example(), **change).verify()  # type: ignore[arg-type]


def test_attributes_have_the_type_that_is_asked_for() -> None:
    node = Node("n", "Op", (), (), (("axis", 1), ("eps", 0.5), ("mode", "edge"), ("pads", (1, 2))))
    assert (node.integer("axis"), node.integer("other", 7)) == (1, 7)
    assert (node.number("eps"), node.number("axis")) == (0.5, 1.0)
    assert (node.text("mode"), node.text("other", "x")) == ("edge", "x")
    assert (node.integers("pads"), node.numbers("other", (1.0,)), node.texts("other")) == (
        (1, 2),
        (1.0,),
        (),
    )
    assert node.has("eps")
    assert not node.has("other")
    for read in (
        lambda: node.integer("eps"),
        lambda: node.text("axis"),
        lambda: node.integers("mode"),
    ):
        with pytest.raises(ModelError, match="of Op has the type"):
            read()


def test_constants_cannot_be_changed() -> None:
    constant = example().constants[0]
    with pytest.raises(ValueError, match="read-only"):
        constant.array[...] = 3


def test_equal_constants_have_equal_numbers() -> None:
    value = Value("c", DType.FLOAT32, (2,))
    one, other = (Constant(value, np.array([1, number], np.float32)) for number in (2, 3))
    assert one == Constant(value, np.array([1, 2], np.float32))
    assert one != other
    assert one != value


def test_digests_tell_graphs_apart() -> None:
    graph = example()
    assert graph.digest() == example().digest()
    changed = [
        replace(graph, opset=20),
        replace(graph, outputs=("v1",)),
        replace(graph, batch_axes=()),
        replace(graph, constants=(Constant(graph.constants[0].value, np.array(3.0)),)),
        replace(graph, parameters=(Parameter(graph.parameters[0].value, Fill(0.0)),)),
        replace(graph, parameters=(Parameter(graph.parameters[0].value, FileSlice("", 0, 128)),)),
        replace(graph, parameters=(replace(graph.parameters[0], trainable=False),)),
        replace(graph, nodes=(*graph.nodes[:2], replace(graph.nodes[2], op="Add"))),
    ]
    digests = {each.digest() for each in changed}
    assert len(digests) == len(changed)
    assert graph.digest() not in digests
    assert replace(graph, name="other").digest() == graph.digest()
