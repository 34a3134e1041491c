"""Single nodes with numbers, for tests of rows and of emission."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx
import onnx.helper
from onnx.reference import ReferenceEvaluator

from autopipe.ir.graph import Attribute, Constant, Graph, Node, Value
from autopipe.ir.ops import OPERATORS
from autopipe.passes.frontend.elements import attributes_of, dtype_of
from autopipe.passes.frontend.inference import Inference
from tests.ir.ops.splitting import Use

OPSET = 23


def use_of(
    op: str,
    arrays: Sequence[np.ndarray | None],
    *,
    results: int = 1,
    opset: int = OPSET,
    known: Collection[int] = (),
    **attributes: Attribute,
) -> Use:
    """One node reading `arrays`; those at static positions and at `known` are constants. Types are
    ONNX's own.
    """
    names = ["" if array is None else f"i{index}" for index, array in enumerate(arrays)]
    outputs = [f"o{index}" for index in range(results)]
    proto = onnx.helper.make_node(op, names, outputs, **attributes)
    typed = [
        None if array is None else _value(name, array)
        for name, array in zip(names, arrays, strict=True)
    ]
    fixed = {
        names[index]
        for index in {*OPERATORS[op].static, *known}
        if index < len(names) and names[index]
    }
    operands = tuple(
        (value, array if value is not None and value.name in fixed else None)
        for value, array in zip(typed, arrays, strict=True)
    )
    given = {name: array for name, array in zip(names, arrays, strict=True) if array is not None}
    types = Inference((("", opset),)).types(proto, operands)
    if None in types:
        found = ReferenceEvaluator(proto, opsets={"": opset}).run(None, given)
        types = tuple(
            _value(name, np.asarray(each)) for name, each in zip(outputs, found, strict=True)
        )
    node = Node(op, op, tuple(names), tuple(outputs), attributes_of(proto))
    graph = Graph(
        name=op,
        opset=opset,
        inputs=tuple(value for value in typed if value is not None and value.name not in fixed),
        parameters=(),
        constants=tuple(
            Constant(value, given[value.name]) for value in typed if value and value.name in fixed
        ),
        nodes=(node,),
        outputs=tuple(outputs),
        values=tuple(
            Value(name, value.dtype, value.shape)
            for name, value in zip(outputs, types, strict=True)
            if value is not None
        ),
    )
    return Use(graph, node, given)


def _value(name: str, array: np.ndarray) -> Value:
    return Value(
        name, dtype_of(onnx.helper.np_dtype_to_tensor_dtype(array.dtype), name), array.shape
    )


def expected(use: Use) -> list[np.ndarray]:
    """The node's results by onnx's reference implementation."""
    attributes = dict(use.node.attributes)
    proto = onnx.helper.make_node(use.node.op, use.node.inputs, use.node.outputs, **attributes)
    found = ReferenceEvaluator(proto, opsets={"": use.graph.opset}).run(None, use.arrays)
    return [np.asarray(each) for each in found]
