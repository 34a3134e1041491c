"""Rewriting of ONNX graphs to compute in float64, for a reference that is more accurate than the
model's own type.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx

_NO_KERNEL_PATTERN = re.compile(r"Could not find an implementation for (\w+)\(")
_WRONG_TYPE_PATTERN = re.compile(r"of operator \((\w+)\) in node")
"""Patterns of two error messages of ONNX Runtime: no kernel of an operator for the types of its
operands, and operand types that ONNX forbids.
"""


def operators_to_keep_in_float32(reason: str, proto: onnx.ModelProto) -> set[str]:
    """Return the operator types to keep in float32, given ONNX Runtime's message `reason` for
    rejecting a graph in float64. Return an empty set if the message names no operator.

    ONNX Runtime expands some operators of `proto` to functions of other operators. If the message
    names an operator that is only inside such a function, the result is all operator types of
    `proto` that may be functions.
    """
    found = _NO_KERNEL_PATTERN.search(reason) or _WRONG_TYPE_PATTERN.search(reason)
    if found is None:
        return set()
    used = {node.op_type for node in proto.graph.node}
    if found[1] in used:
        return {found[1]}
    return {node.op_type for node in proto.graph.node if _has_function_definition(node)}


def _has_function_definition(node: onnx.NodeProto) -> bool:
    """Return True if ONNX Runtime may expand a node to other operators: ONNX defines its operator
    as a function, or the operator is not one of ONNX's own.
    """
    from onnx import defs

    if node.domain not in ("", "ai.onnx") or not defs.has(node.op_type):
        return True
    # The variable has the type Any, because the type stubs of onnx lack `has_function` and
    # `has_context_dependent_function`.
    schema: Any = defs.get_schema(node.op_type)
    return bool(schema.has_function or schema.has_context_dependent_function)


def has_only_plain_nodes(proto: onnx.ModelProto) -> bool:
    """Return True if a model contains neither functions nor nodes with subgraphs, such as If and
    Loop.
    """
    graphs = (
        each
        for node in proto.graph.node
        for each in node.attribute
        if each.HasField("g") or each.graphs
    )
    return not proto.functions and next(graphs, None) is None


def widen_tensors(proto: onnx.ModelProto) -> None:
    """Convert each floating-point initializer, input and output of a model to float64, in place.
    The data of initializers must be in `proto`, not in other files.
    """
    import numpy as np
    from onnx import TensorProto, numpy_helper

    narrow = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
    for tensor in proto.graph.initializer:
        if tensor.data_type in narrow:
            array = numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for value in (*proto.graph.input, *proto.graph.output):
        if value.type.tensor_type.elem_type in narrow:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    del proto.graph.value_info[:]


def widen_nodes(
    proto: onnx.ModelProto, floating: Collection[str], kept: Collection[str]
) -> list[onnx.NodeProto]:
    """Return nodes that replace the nodes of the model, so that all floating-point values are
    float64. `floating` has the names of these values.

    A node whose operator is in `kept` computes in float32, between casts of its operands and
    results. A node that has floating-point results but no floating-point operand, such as a
    Constant, keeps its type, and its results are cast.
    """
    made: list[onnx.NodeProto] = []
    for place, node in enumerate(proto.graph.node):
        made.extend(_widen_node(node, f"float64/{place}", floating, kept))
    return made


def _widen_node(
    node: onnx.NodeProto, prefix: str, floating: Collection[str], kept: Collection[str]
) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that replace `node`, so that those of its operands and results that are in
    `floating` are float64. If the operator is in `kept`, or no operand is in `floating`, these
    nodes are a copy of `node` and casts. Names of new values begin with `prefix`.
    """
    import onnx
    from onnx import TensorProto
    from onnx.helper import make_node

    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    reads = [name in floating for name in node.input]
    writes = [name in floating for name in node.output]
    if any(reads) and node.op_type not in kept:
        if node.op_type == "Cast" and all(writes):
            copy.attribute[0].i = TensorProto.DOUBLE
        yield copy
        return
    for slot, name in enumerate(node.input):
        if reads[slot]:
            copy.input[slot] = f"{prefix}/input {slot}"
            yield make_node("Cast", [name], [copy.input[slot]], to=TensorProto.FLOAT)
    for slot, is_floating in enumerate(writes):
        if is_floating:
            copy.output[slot] = f"{prefix}/output {slot}"
    yield copy
    for slot, name in enumerate(node.output):
        if writes[slot]:
            yield make_node("Cast", [copy.output[slot]], [name], to=TensorProto.DOUBLE)
