"""The table of decompositions: nodes that are kept, nodes that are replaced, and errors."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import DType, Node, Value
from autopipe.passes.frontend.decompositions.registry import (
    DECOMPOSITIONS,
    decompose,
    decomposition_of,
    node_from_proto,
)
from autopipe.passes.frontend.rewriter import NEWEST, FileRewriter


class Recorder:
    """A scope that records nodes and does not infer types."""

    opset = NEWEST

    def __init__(self, *values: Value) -> None:
        self.types = {value.name: value for value in values}
        self.nodes: list[Node] = []
        self.copies: list[onnx.NodeProto] = []

    def type_of(self, name: str) -> Value:
        return self.types[name]

    def array(self, name: str) -> np.ndarray | None:
        return None

    def unique_name(self, name: str) -> str:
        return name

    def add_constant(self, value: Value, array: np.ndarray) -> None:
        self.types[value.name] = value

    def add(self, node: Node, results: tuple[Value, ...]) -> None:
        self.nodes.append(node)
        self.types.update((value.name, value) for value in results)


def replaced(proto: onnx.NodeProto, *values: Value) -> tuple[bool, Recorder]:
    """Decompose a node. Return whether it was replaced, and the scope."""
    scope = Recorder(*values)
    operands = tuple(proto.input)
    rewriter = FileRewriter(scope, node_from_proto(proto, operands), proto, scope.copies.append)
    decomposition = decomposition_of(proto)
    assert decomposition is not None
    return decompose(decomposition, rewriter), scope


def matmul_nbits(operands: list[str]) -> onnx.NodeProto:
    settings = {"K": 64, "N": 8, "bits": 4, "block_size": 32}
    return helper.make_node(
        "MatMulNBits", operands, ["y"], "node", domain="com.microsoft", **settings
    )


X = Value("x", DType.FLOAT32, (2, 64))
WEIGHT = Value("w", DType.UINT8, (8, 2, 16))
FLAT = Value("flat", DType.FLOAT32, (16,))
SCALES = Value("scales", DType.FLOAT32, (8, 2))
BIAS = Value("bias", DType.FLOAT32, (8,))


def test_a_node_in_its_final_form_is_kept() -> None:
    is_replaced, scope = replaced(matmul_nbits(["x", "w", "scales"]), X, WEIGHT, SCALES)
    assert not is_replaced
    assert not scope.nodes and not scope.copies


def test_a_node_is_repeated_with_other_operands() -> None:
    is_replaced, scope = replaced(matmul_nbits(["x", "w", "flat"]), X, WEIGHT, FLAT)
    assert is_replaced
    (reshape,) = scope.nodes
    (copy,) = scope.copies
    assert (reshape.op, reshape.name) == ("Reshape", "node/reshape")
    assert list(copy.input) == ["x", "w", reshape.outputs[0]]
    assert list(copy.output) == ["y"]
    assert [each.name for each in copy.attribute] == ["K", "N", "bits", "block_size"]


def test_a_bias_follows_a_repeated_node() -> None:
    operands = ["x", "w", "scales", "", "", "bias"]
    is_replaced, scope = replaced(matmul_nbits(operands), X, WEIGHT, SCALES, BIAS)
    assert is_replaced
    (copy,) = scope.copies
    assert list(copy.input) == ["x", "w", "scales"]
    assert scope.nodes == [Node("node/add", "Add", ("y/product", "bias"), ("y",))]


def test_operands_that_do_not_fit_are_reported_with_their_shapes() -> None:
    """A LookupError or ValueError of a decomposition becomes a ModelError."""
    proto = helper.make_node("BiasSplitGelu", ["x", ""], ["y"], "node", domain="com.microsoft")
    with pytest.raises(ModelError, match="BiasSplitGelu lacks operand 1"):
        replaced(proto, X)
    proto = helper.make_node(
        "Attention", ["flat", "flat"], ["y"], "node", domain="com.microsoft", num_heads=2
    )
    with pytest.raises(ModelError, match=r"operands have the shapes \(16,\), \(16,\), which"):
        replaced(proto, FLAT)
    proto = helper.make_node(
        "Attention", ["flat", "scales"], ["y"], "node", domain="com.microsoft", num_heads=2
    )
    with pytest.raises(ModelError, match="expected 8"):
        replaced(proto, FLAT, SCALES)
    proto = helper.make_node(
        "MatMulBnb4", ["x"], ["y"], "node", domain="com.microsoft", transB=1, block_size=4
    )
    with pytest.raises(ModelError, match="lacks operand 2") as caught:
        replaced(proto, X)
    assert caught.value.where == "MatMulBnb4 'node'"


def test_graphs_are_no_attributes_of_the_replaced_node() -> None:
    graph = helper.make_graph([], "g", [], [])
    proto = helper.make_node(
        "FlexAttention",
        ["q", "k", "v"],
        ["y"],
        domain="ai.onnx.preview",
        score_mod=graph,
        scale=0.5,
    )
    assert node_from_proto(proto, ("q", "k", "v")).attributes == (("scale", 0.5),)


def test_operators_of_other_domains_have_no_decomposition() -> None:
    assert decomposition_of(helper.make_node("Attention", ["x"], ["y"])) is None
    assert decomposition_of(helper.make_node("Attention", ["x"], ["y"], domain="org.other")) is None


def test_decompositions_that_give_types_use_the_newest_operators() -> None:
    """The others are inferred by ONNX under the opset of the file."""
    typed = {op for (_, op), each in DECOMPOSITIONS.items() if each.is_typed}
    assert {"Attention", "GroupQueryAttention", "MultiHeadAttention"} <= typed
    assert typed.isdisjoint({"FusedConv", "QLinearAdd", "MatMulNBits"})
