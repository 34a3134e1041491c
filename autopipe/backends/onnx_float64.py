"""ONNX graphs rewritten to compute in float64: a reference that is more accurate than the model's
own type.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx

_NO_KERNEL_PATTERN = re.compile(r"Could not find an implementation for (\w+)\(")
_WRONG_TYPE_PATTERN = re.compile(r"of operator \((\w+)\) in node")
"""ONNX Runtime's messages for an operator without a kernel for its operands, and for operands that
ONNX forbids.
"""


def operators_to_keep_in_float32(reason: str, proto: onnx.ModelProto) -> set[str]:
    """Return the operators to keep in float32, given ONNX Runtime's `reason` for refusing a graph
    in float64.

    ONNX Runtime expands some operators of `proto` to functions. If the reason names an operator
    that is only in such a function, the result is all operators that may be functions.
    """
    found = _NO_KERNEL_PATTERN.search(reason) or _WRONG_TYPE_PATTERN.search(reason)
    if found is None:
        return set()
    used = {node.op_type for node in proto.graph.node}
    if found[1] in used:
        return {found[1]}
    return {node.op_type for node in proto.graph.node if _has_function_definition(node)}


def _has_function_definition(node: onnx.NodeProto) -> bool:
    """Return True if a node's operator has a definition by other operators, or is not one of ONNX's
    own.
    """
    from onnx import defs

    if node.domain not in ("", "ai.onnx") or not defs.has(node.op_type):
        return True
    schema: Any = defs.get_schema(node.op_type)  # The stubs of onnx lack both attributes.
    return bool(schema.has_function or schema.has_context_dependent_function)


def has_only_plain_nodes(proto: onnx.ModelProto) -> bool:
    """Return True if a model has neither functions nor nodes with graphs of their own, as If and
    Loop have.
    """
    graphs = (
        each
        for node in proto.graph.node
        for each in node.attribute
        if each.HasField("g") or each.graphs
    )
    return not proto.functions and next(graphs, None) is None


def widen_tensors(proto: onnx.ModelProto) -> None:
    """Make every floating-point initializer, input and output float64. Requires external data to be
    loaded.
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
    """Return the nodes of a graph with `floating` values in float64.

    A node of an operator in `kept` reads and writes float32, between casts. A node that makes
    floating-point values of other operands, such as a Constant, keeps its type, and its results are
    cast.
    """
    made: list[onnx.NodeProto] = []
    for place, node in enumerate(proto.graph.node):
        made.extend(_widen_node(node, f"float64/{place}", floating, kept))
    return made


def _widen_node(
    node: onnx.NodeProto, prefix: str, floating: Collection[str], kept: Collection[str]
) -> Iterator[onnx.NodeProto]:
    """Return the nodes that replace `node`. The names of new values begin with `prefix`."""
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
