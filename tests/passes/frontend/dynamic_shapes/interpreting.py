"""Facts of the values of a small graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from autopipe.ir.graph import DType, Value
from autopipe.passes.frontend.dynamic_shapes.domain import Fact
from autopipe.passes.frontend.dynamic_shapes.interpretation import DynamicShapes
from autopipe.passes.frontend.inference import Inference
from autopipe.passes.frontend.uses import Uses

OPSET = 20


def facts_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Value],
    held: Mapping[str, np.ndarray],
    bounds: Mapping[str, int] | None = None,
) -> tuple[dict[str, Fact], dict[str, Value]]:
    """Return the facts of the values that have one, and the types of the static values."""
    inference = Inference((("", OPSET),))
    dynamic_shapes = DynamicShapes(nodes, inference, OPSET, Uses(nodes), bounds or {})
    arrays = dict(held)
    types = {**inputs}
    types |= {name: Value(name, DType(each.dtype.name), each.shape) for name, each in held.items()}
    waiting = list(nodes)
    while waiting:
        node = waiting.pop(0)
        operands = tuple(node.input)
        if dynamic_shapes.concerns(node, operands, types, arrays, lambda name: None):
            waiting[:0] = dynamic_shapes.make_static(node, operands, types, arrays)
            continue
        if node.op_type == "Constant":
            (stated,) = node.attribute
            if stated.name == "value":
                array = onnx.numpy_helper.to_array(stated.t)
            elif stated.name == "value_int":
                array = np.array(stated.i)
            else:
                array = np.array(stated.f, np.float32)
            results: tuple[np.ndarray, ...] | None = (array,)
        else:
            known = tuple(arrays.get(name) if name else None for name in operands)
            inferred = inference.types(
                node,
                tuple(
                    (types[name] if name else None, each)
                    for name, each in zip(operands, known, strict=True)
                ),
            )
            for name, each in zip(node.output, inferred, strict=True):
                if name and each is not None:
                    types[name] = Value(name, each.dtype, each.shape)
            is_known = all(name in arrays for name in operands if name)
            results = inference.evaluate(node, known, inferred) if is_known else None
        for name, array in zip(node.output, results or (), strict=False):
            arrays[name] = array
            types[name] = Value(name, DType(array.dtype.name), array.shape)
    return dict(dynamic_shapes), types
