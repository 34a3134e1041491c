"""The networks of onnx's `light` data, as they ship and with random weights.

Each of their weights is a ConstantOfShape node that gives 0.02 everywhere: all classes then score
alike and all gradients but the last layer's are 0, so that there is nothing to compare. Copies with
random weights take their place where gradients are verified.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

LIGHT = {
    "bvlc_alexnet": "r24",
    "densenet121": "fc6_1",
    "inception_v1": "r143",
    "inception_v2": "r507",
    "resnet50": "r174",
    "shufflenet": "r201",
    "squeezenet": "r65",
    "vgg19": "r46",
    "zfnet512": "r20",
}
"""The networks of onnx's `light` data and the value with their scores before the softmax: a batch
of one image is baked in, weights are ConstantOfShape nodes, there is no loss.
"""

_SCALES = {("BatchNormalization", 1), ("BatchNormalization", 4), ("Mul", 0), ("Mul", 1)}
"""Operators and operands of which a vector multiplies: scales and variances, drawn around 1."""
_MOVES = ("Unsqueeze", "Reshape")


def shipped(model: str) -> Path:
    """The file as onnx ships it."""
    import onnx.backend.test

    return Path(onnx.backend.test.__file__).parent / "data" / "light" / f"light_{model}.onnx"


def drawn(model: str, folder: Path, proto: onnx.ModelProto | None = None) -> Path:
    """A copy in `folder`, of `proto` if it is given, whose weights are random, stored in the
    file.
    """
    path = folder / f"{model}.onnx"
    proto = proto or onnx.load(shipped(model))
    graph = proto.graph
    shapes = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    generator = np.random.default_rng(0)
    kept = []
    for node in graph.node:
        if node.op_type != "ConstantOfShape":
            kept.append(node)
            continue
        shape = tuple(int(extent) for extent in shapes[node.input[0]])
        weight = _weight(generator, shape, _is_scale(graph, node.output[0]))
        graph.initializer.append(numpy_helper.from_array(weight, node.output[0]))
    del graph.node[:]
    graph.node.extend(kept)
    _scale_scores(proto, LIGHT[model], path)
    onnx.save(proto, path)
    return path


def _scale_scores(proto: onnx.ModelProto, name: str, path: Path) -> None:
    """Scale the last layer until the scores' deviation is 1, lest the softmax be 1 for one class
    and 0 for the rest.

    A network whose scores come out of a pooling or convolution keeps its weights: its scores are of
    that order.
    """
    import onnxruntime

    graph = proto.graph
    last = next(node for node in graph.node if name in node.output)
    if last.op_type != "Gemm":
        return
    watched = onnx.ModelProto()
    watched.CopyFrom(proto)
    watched.graph.output.append(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
    )
    onnx.save(watched, path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    weights = {each.name: each for each in graph.initializer}
    image = next(each for each in session.get_inputs() if each.name not in weights)
    drawn_image = np.random.default_rng(1).standard_normal(image.shape, dtype=np.float32)
    deviation = float(np.std(session.run([name], {image.name: drawn_image})[0]))
    reshaped = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Reshape"}
    for operand in last.input[1:]:
        stored = reshaped.get(operand, operand)
        array = numpy_helper.to_array(weights[stored]) / np.float32(deviation)
        weights[stored].CopyFrom(numpy_helper.from_array(array, stored))


def _weight(generator: np.random.Generator, shape: tuple[int, ...], scale: bool) -> np.ndarray:
    """Filters keep the variance of what a ReLU leaves of their input (He et al. 2015, section
    2.2).
    """
    if scale:
        return generator.uniform(0.5, 1.5, shape).astype(np.float32)
    deviation = math.sqrt(2 / math.prod(shape[1:])) if len(shape) > 1 else 0.1
    return generator.standard_normal(shape, dtype=np.float32) * np.float32(deviation)


def _is_scale(graph: onnx.GraphProto, name: str) -> bool:
    for node in graph.node:
        if name in node.input:
            if node.op_type in _MOVES:
                return _is_scale(graph, node.output[0])
            return (node.op_type, list(node.input).index(name)) in _SCALES
    return False
