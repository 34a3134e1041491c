"""The rewriter on a graph: names, types and numbers of the nodes that it writes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import DType, Graph, Node, Value
from autopipe.passes.frontend.elements import NUMBERS
from autopipe.passes.frontend.inference import node_proto
from autopipe.passes.frontend.rewriter import MAX_RANGE, NEWEST, GraphEdit, Rewriter

X = Value("x", DType.FLOAT32, (2, 3, 4))
NODE = Node("node", "Old", ("x", "", "x"), ("y", "z"))


def graph_of(node: Node, opset: int = NEWEST) -> Graph:
    """Return a graph of one node that reads x; its results have the type of x."""
    values = tuple(Value(name, X.dtype, X.shape) for name in node.outputs)
    return Graph("g", opset, (X,), (), (), (node,), ("y",), values)


def rewriter_of(node: Node = NODE, opset: int = NEWEST) -> Rewriter:
    return Rewriter(GraphEdit(graph_of(node, opset)), node)


def computed(edit: GraphEdit, nodes: list[Node], output: str, x: np.ndarray) -> np.ndarray:
    """Return what ONNX Runtime computes by the nodes."""
    graph = edit.build(nodes)
    proto = onnx.helper.make_graph(
        [node_proto(graph, node) for node in nodes],
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, X.shape)],
        [
            onnx.helper.make_tensor_value_info(
                output, NUMBERS[graph.type_of(output).dtype], graph.type_of(output).shape
            )
        ],
        [
            onnx.numpy_helper.from_array(constant.array, constant.value.name)
            for constant in graph.constants
        ],
    )
    opsets = [onnx.helper.make_opsetid("", min(graph.opset, 21))]
    model = onnx.helper.make_model(proto, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run([output], {"x": x})[0]
    return found


HELPERS: dict[str, tuple[Callable[[Rewriter], str], Callable[[np.ndarray], np.ndarray]]] = {
    "reshape": (lambda to: to.reshape("x", 6, 4), lambda x: x.reshape(6, 4)),
    "transpose": (lambda to: to.transpose("x", 2, 0, 1), lambda x: x.transpose(2, 0, 1)),
    "cast": (lambda to: to.cast("x", DType.INT64), lambda x: x.astype(np.int64)),
    "binary": (
        lambda to: to.binary("Less", "x", to.number(0.5, DType.FLOAT32), DType.BOOL),
        lambda x: x < 0.5,
    ),
    "select": (
        lambda to: to.select(
            to.constant(np.arange(4) < 2), "x", to.number(-1.0, DType.FLOAT32)
        ),
        lambda x: np.where(np.arange(4) < 2, x, np.float32(-1)),
    ),
    "expand": (lambda to: to.expand(to.floats(1.0, 2.0), 3, 2), lambda x: np.tile([1.0, 2.0], (3, 1))),
    "split": (lambda to: to.split("x", 2, 1, 3)[1], lambda x: x[..., 1:]),
    "concat": (lambda to: to.concat(1, "x", "x"), lambda x: np.concatenate([x, x], 1)),
    "slice": (lambda to: to.slice("x", {1: (1, 3), 2: (0, 2)}), lambda x: x[:, 1:3, :2]),
    "clip": (lambda to: to.clip("x", 0.25, 0.5), lambda x: x.clip(0.25, 0.5)),
    "sum": (lambda to: to.sum("x", 0, 2), lambda x: x.sum((0, 2), keepdims=True)),
    "pad_end": (lambda to: to.pad_end("x", 1, 5), lambda x: np.pad(x, ((0, 0), (0, 2), (0, 0)))),
}  # fmt: skip
"""By name, a helper of the rewriter and the same in numpy."""


@pytest.mark.parametrize(
    ("name", "opset"),
    [(name, opset) for name in HELPERS for opset in (9, 21) if (name, opset) != ("pad_end", 9)],
)
def test_helpers_compute_what_numpy_does(name: str, opset: int) -> None:
    """In opset 9, Slice, Clip, Split and ReduceSum have attributes in place of operands."""
    write, expected = HELPERS[name]
    rewriter = rewriter_of(opset=opset)
    result = write(rewriter)
    edit = rewriter.scope
    assert isinstance(edit, GraphEdit)
    x = np.random.default_rng(0).random(X.shape, np.float32)
    found = computed(edit, rewriter.nodes, result, x)
    np.testing.assert_allclose(found, expected(x), rtol=1e-6)
    assert rewriter.shape(result) == found.shape
    assert edit.type_of(result).dtype.value == found.dtype.name


def test_names_of_nodes_and_values() -> None:
    rewriter = rewriter_of()
    first, second = rewriter.split("x", 0, 1, 1)
    total = rewriter.add("Add", [first, second], (1, 3, 4))
    rewriter.add("Expand", [total, rewriter.integers(2, 3, 4)], (2, 3, 4), result=0)
    assert [node.name for node in rewriter.nodes] == ["node/split", "node/add", "node/expand"]
    assert (first, second) == ("y/split_0", "y/split_0/1")
    assert total == "y/add_1"
    assert rewriter.nodes[-1].outputs == ("y",)
    assert rewriter.nodes[-1].inputs == ("y/add_1", "y/constant_1")


def test_a_single_node_keeps_the_name_of_the_replaced_node() -> None:
    rewriter = rewriter_of()
    rewriter.add("Relu", ["x"], X.shape, result=0)
    assert rewriter.nodes == [Node("node", "Relu", ("x",), ("y",))]


def test_a_node_without_a_name_is_called_after_its_operator() -> None:
    rewriter = rewriter_of(Node("", "Old", ("x",), ("y",)))
    rewriter.add("Relu", ["x"], X.shape)
    assert rewriter.nodes[0].name == "Old/relu"


def test_absent_operands_and_attributes_are_omitted() -> None:
    rewriter = rewriter_of()
    rewriter.add("Clip", ["x", "", ""], X.shape, min=None, max=1.0)
    assert rewriter.nodes[0].inputs == ("x",)
    assert rewriter.nodes[0].attributes == (("max", 1.0),)


def test_helpers_that_change_nothing_write_nothing() -> None:
    rewriter = rewriter_of()
    assert rewriter.reshape("x", *X.shape) == "x"
    assert rewriter.expand("x", *X.shape) == "x"
    assert rewriter.cast("x", X.dtype) == "x"
    assert rewriter.pad_end("x", 1, 3) == "x"
    assert not rewriter.nodes


def test_operands_and_results_of_the_replaced_node() -> None:
    rewriter = rewriter_of()
    assert [rewriter.operand(index) for index in range(4)] == ["x", "", "x", ""]
    assert [rewriter.has_result(index) for index in range(3)] == [True, True, False]
    rewriter.set_result(1, "x")
    rewriter.set_result(2, "x")
    assert rewriter.aliases == {"z": "x"}
    with pytest.raises(ModelError, match="Old lacks operand 1"):
        rewriter.required(1)


def test_known_operands() -> None:
    edit = GraphEdit(graph_of(NODE))
    five = edit.constant("five", np.asarray([5]))
    vector = edit.constant("vector", np.asarray([5, 6]))
    rewriter = Rewriter(edit, Node("node", "Old", (five, vector, "x", ""), ("y",)))
    assert [rewriter.known_integer(index) for index in range(4)] == [5, None, None, None]


def test_shapes_that_do_not_fit_are_rejected() -> None:
    rewriter = rewriter_of()
    with pytest.raises(ModelError, match=r"the parts \(1, 2\) of axis 2 do not add up to"):
        rewriter.split("x", 2, 1, 2)
    with pytest.raises(ModelError, match="cannot be broadcast") as caught:
        rewriter.binary("Add", "x", rewriter.floats(1.0, 2.0, 3.0))
    assert caught.value.where == "Old 'node'"
    with pytest.raises(ModelError, match="the maximum is"):
        rewriter.range(0, MAX_RANGE + 1)


def test_new_names_of_a_graph_are_unique() -> None:
    edit = GraphEdit(graph_of(NODE))
    assert [edit.unique_name("x"), edit.unique_name("x"), edit.unique_name("w")] == [
        "x_",
        "x__",
        "w",
    ]
    assert edit.value("w", DType.BOOL, (2,)) == "w_"
    assert edit.type_of("w_") == Value("w_", DType.BOOL, (2,))


def test_a_number_beyond_the_type_is_the_largest_one() -> None:
    rewriter = rewriter_of()
    name = rewriter.number(-np.inf, DType.FLOAT16)
    array = rewriter.scope.array(name)
    assert array is not None and array.item() == np.finfo(np.float16).min


def test_a_built_graph_is_valid() -> None:
    edit = GraphEdit(graph_of(NODE))
    rewriter = Rewriter(edit, NODE)
    moved = rewriter.reshape("x", 6, 4)
    rewriter.reshape(moved, 2, 3, 4, result=0)
    graph = edit.build(rewriter.nodes)
    graph.verify()
    assert [value.name for value in graph.values] == ["y/reshape_0", "y"]
    assert [constant.value.name for constant in graph.constants] == ["y/constant_0", "y/constant_1"]
