"""A graph as an ONNX model again, so that onnxruntime can tell whether reading changed what is
computed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.helper as oh
import onnx.numpy_helper as onh
import onnxruntime as ort

from autopipe.ir.graph import FileSlice, Fill, FoldedSlice, Graph, Node, Parameter, Value
from autopipe.passes.frontend import Model
from autopipe.passes.frontend.elements import NUMBERS
from autopipe.passes.frontend.inference import node_proto

SINCE = {"LayerNormalization": 17, "Gelu": 20, "Attention": 23, "RMSNormalization": 23}
"""Fused operators keep the meaning they have from these opsets on."""


def parameter_array(
    parameter: Parameter, path: Path, absent: np.ndarray | None = None
) -> np.ndarray:
    """A parameter's numbers, read where the reader says they are; `absent` where it says they are
    nowhere.
    """
    value = parameter.value
    storage = parameter.storage
    if isinstance(storage, FileSlice):
        file = path.parent / storage.file if storage.file else path
        data = file.read_bytes()[storage.offset : storage.offset + storage.length]
        numbers = np.frombuffer(data, dtype=value.dtype.value)
        if isinstance(storage, FoldedSlice):
            if storage.rows:
                numbers = numbers[
                    np.array(storage.rows)[:, None] + storage.step * np.arange(value.shape[1])
                ]
            numbers = (
                np.log(-numbers if storage.form == "log of the negative" else numbers)
                if storage.form
                else numbers
            )
        return numbers.reshape(value.shape)
    if isinstance(storage, Fill):
        return np.full(value.shape, storage.value, dtype=value.dtype.value)
    assert absent is not None, f"{value.name} has no numbers"
    return absent


def type_info(value: Value) -> onnx.ValueInfoProto:
    return oh.make_tensor_value_info(value.name, NUMBERS[value.dtype], value.shape)


def written(graph: Graph, node: Node) -> list[onnx.NodeProto]:
    """The node, or what ONNX Runtime has in place of SwiGLU and of rotary positions."""
    if node.op not in ("Rotary", "SwiGLU"):
        return [node_proto(graph, node)]
    assert not node.attributes
    (result,) = node.outputs
    if node.op == "Rotary":
        x, cosines, sines = node.inputs
        parts = [f"{result}_{place}" for place in range(6)]
        return [
            oh.make_node("Split", [x], parts[:2], axis=-1, num_outputs=2),
            oh.make_node("Neg", [parts[1]], [parts[2]]),
            oh.make_node("Concat", [parts[2], parts[0]], [parts[3]], axis=-1),
            oh.make_node("Mul", [parts[3], sines], [parts[4]]),
            oh.make_node("Mul", [x, cosines], [parts[5]]),
            oh.make_node("Add", parts[4:], [result]),
        ]
    gate, up = node.inputs
    return [
        oh.make_node("Sigmoid", [gate], [f"{result}_sigmoid"]),
        oh.make_node("Mul", [gate, f"{result}_sigmoid"], [f"{result}_gate"]),
        oh.make_node("Mul", [f"{result}_gate", up], [result]),
    ]


def as_onnx(graph: Graph, arrays: dict[str, np.ndarray]) -> onnx.ModelProto:
    """The graph as ONNX, its parameters' numbers inside."""
    opset = max([graph.opset, *(SINCE.get(node.op, 0) for node in graph.nodes)])
    held = {constant.value.name: constant.array for constant in graph.constants} | arrays
    body = oh.make_graph(
        [proto for node in graph.nodes for proto in written(graph, node)],
        "again",
        [type_info(value) for value in graph.inputs],
        [type_info(graph.type_of(name)) for name in graph.outputs],
        [onh.from_array(array, name) for name, array in held.items()],
    )
    return oh.make_model(body, opset_imports=[oh.make_opsetid("", opset)], ir_version=10)


def run(model: onnx.ModelProto | Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The model's outputs by onnxruntime, without its optimisations."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    wanted = {value.name for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    results = session.run(names, {name: array for name, array in feeds.items() if name in wanted})
    return dict(zip(names, results, strict=True))


def random_feeds(graph: Graph, seed: int = 0, top: int = 90) -> dict[str, np.ndarray]:
    """Inputs of the graph's types: small whole numbers, standard normal floats."""
    random = np.random.default_rng(seed)
    feeds = {}
    for value in graph.inputs:
        if value.dtype.is_floating:
            feeds[value.name] = random.standard_normal(value.shape).astype(value.dtype.value)
        else:
            feeds[value.name] = random.integers(0, top, value.shape).astype(value.dtype.value)
    return feeds


def run_read(model: Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of a model as it was read."""
    arrays = {each.value.name: parameter_array(each, model.path) for each in model.graph.parameters}
    return run(as_onnx(model.graph, arrays), feeds)


def assert_close(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 1e-5
) -> None:
    """Each output within `tolerance` of the expected one, relative to its norm."""
    assert set(found) <= set(expected)
    for name, array in found.items():
        reference = expected[name].astype(np.float64)
        assert array.shape == reference.shape, name
        difference = np.linalg.norm(array.astype(np.float64) - reference)
        assert difference <= tolerance * max(float(np.linalg.norm(reference)), 1e-12), (
            name,
            difference,
        )
