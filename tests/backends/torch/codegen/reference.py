"""One node of any domain, run by us and by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx.helper
import onnxruntime
import torch

from autopipe.ir.graph import Attribute, Constant, Graph, Node, Value
from autopipe.ir.ops import OPERATORS, qualified_name, signature_of
from autopipe.passes.frontend.elements import attributes_of, dtype_of
from tests.conformance.adapter import to_array, to_tensor
from tests.ir.ops.splitting import Use, computed


def compare(
    op: str,
    arrays: Sequence[np.ndarray | None],
    *,
    opset: int,
    outputs: Sequence[bool] = (True,),
    domain: str = "",
    rtol: float = 1e-4,
    atol: float = 1e-5,
    **attributes: Attribute,
) -> Use:
    """Assert that the node's results are ONNX Runtime's; `outputs` says which results are asked
    for.
    """
    names = ["" if array is None else f"i{index}" for index, array in enumerate(arrays)]
    results = [f"o{index}" if wanted else "" for index, wanted in enumerate(outputs)]
    proto = onnx.helper.make_node(op, names, results, domain=domain, **attributes)
    given = {name: array for name, array in zip(names, arrays, strict=True) if array is not None}
    wanted = _run(proto, given, opset, domain)
    node = Node(op, op, tuple(names), tuple(results), attributes_of(proto), domain)
    static = {
        names[index] for index in OPERATORS[qualified_name(node)].static if index < len(names)
    }
    values = {name: _value(name, array) for name, array in given.items()}
    graph = Graph(
        name=op,
        opset=opset,
        inputs=tuple(value for name, value in values.items() if name not in static),
        parameters=(),
        constants=tuple(Constant(values[name], given[name]) for name in static if name in given),
        nodes=(node,),
        outputs=tuple(name for name in results if name),
        values=tuple(_value(name, array) for name, array in wanted.items()),
    )
    found = computed(
        signature_of(graph, node), {name: to_tensor(array) for name, array in given.items()}
    )
    for (name, array), tensor in zip(wanted.items(), found, strict=True):
        assert to_array(tensor).dtype == array.dtype
        np.testing.assert_allclose(to_array(tensor), array, rtol, atol, err_msg=f"{name} of {op}")
    return Use(graph, node, given)


def gradients(use: Use) -> list[torch.Tensor]:
    """Gradients of the sum of the results' squares to the floating operands."""
    tensors = {
        name: to_tensor(array).requires_grad_(bool(np.issubdtype(array.dtype, np.floating)))
        for name, array in use.arrays.items()
    }
    results = computed(signature_of(use.graph, use.node), tensors)
    torch.stack([result.square().sum() for result in results]).sum().backward()
    return [tensor.grad for tensor in tensors.values() if tensor.grad is not None]


def _run(
    proto: onnx.NodeProto, given: dict[str, np.ndarray], opset: int, domain: str
) -> dict[str, np.ndarray]:
    inputs = [
        onnx.helper.make_tensor_value_info(
            name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
        )
        for name, array in given.items()
    ]
    names = [name for name in proto.output if name]
    graph = onnx.helper.make_graph(
        [proto], "node", inputs, [onnx.ValueInfoProto(name=name) for name in names]
    )
    opsets = [
        onnx.helper.make_opsetid("", opset),
        *([onnx.helper.make_opsetid(domain, 1)] if domain else []),
    ]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )
    return dict(zip(names, session.run(names, given), strict=True))


def _value(name: str, array: np.ndarray) -> Value:
    return Value(
        name, dtype_of(onnx.helper.np_dtype_to_tensor_dtype(array.dtype), name), array.shape
    )
