"""The networks of onnx's `light` data on smaller images, with narrower linear layers and any batch.

They keep every operator of the network as it ships, but for the extent of its last pooling. What is
smaller has few units, of which one is seldom so near to where a ReLU or a maximum turns that
rounding decides; and it runs in a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import numpy_helper

from tests.exports.light import drawn, shipped

IMAGES: Mapping[str, int] = {
    "bvlc_alexnet": 96,
    "densenet121": 32,
    "inception_v2": 32,
    "resnet50": 32,
    "vgg19": 32,
    "zfnet512": 96,
}
"""Height and width of the image where they are not `IMAGE`."""
IMAGE = 64
SHIPPED_IMAGE = 224
NARROWER: Mapping[int, int] = {1000: 24, 4096: 48}
"""Classes, and units of the linear layers, and what they become."""


def drawn_small(model: str, folder: Path, batch: int) -> Path:
    """A small copy of a network in `folder`, on `batch` images, with random weights."""
    own = folder / f"batch_{batch}"
    own.mkdir(exist_ok=True)
    return drawn(model, own, shrunk(model, batch))


def shrunk(model: str, batch: int) -> onnx.ModelProto:
    """A network on `batch` small images."""
    proto = onnx.load(shipped(model))
    graph = proto.graph
    image = IMAGES.get(model, IMAGE)
    stored = {each.name for each in graph.initializer}
    images = next(each for each in graph.input if each.name not in stored)
    for dimension, extent in zip(
        images.type.tensor_type.shape.dim, (batch, 3, image, image), strict=True
    ):
        dimension.dim_value = extent
    _narrow(graph, batch, image)
    del graph.value_info[:]
    graph.output[0].type.tensor_type.ClearField("shape")
    last = next(
        (node for node in graph.node if node.op_type == "AveragePool" and _kernel(node) == [7, 7]),
        None,
    )
    if last is not None:
        pads = next((list(each.ints) for each in last.attribute if each.name == "pads"), [0] * 4)
        _, _, height, width = _shape(proto, last.input[0])
        _kernel(last)[:] = [height + pads[0] + pads[2], width + pads[1] + pads[3]]
    _fit_linear(proto, batch)
    return proto


def _narrow(graph: onnx.GraphProto, batch: int, image: int) -> None:
    """Change the shapes that are data: those of weights, and those that activations take."""
    weights = {node.input[0] for node in graph.node if node.op_type == "ConstantOfShape"}
    moved = {node.input[1]: node for node in graph.node if node.op_type == "Reshape"}
    for each in graph.initializer:
        if each.name not in weights and each.name not in moved:
            continue
        shape = numpy_helper.to_array(each).copy()
        if each.name in moved and shape[0] == 1:
            shape[0] = batch
            shape[3 if len(shape) == 5 else 2 :] *= image
            shape[3 if len(shape) == 5 else 2 :] //= SHIPPED_IMAGE
        for index, extent in enumerate(shape):
            shape[index] = NARROWER.get(int(extent), extent)
        each.CopyFrom(numpy_helper.from_array(shape, each.name))


def _fit_linear(proto: onnx.ModelProto, batch: int) -> None:
    """Fit the first linear layer to what the last image flattens to."""
    graph = proto.graph
    flat = next(
        (
            node
            for node in graph.node
            if node.op_type == "Reshape" and _extents(graph, node.input[1]) == 2
        ),
        None,
    )
    if flat is None:
        return
    shapes = {each.name: each for each in graph.initializer}
    target = numpy_helper.to_array(shapes[flat.input[1]]).copy()
    if target[0] != batch:
        return
    _, channels, height, width = _shape(proto, flat.input[0])
    former, target[1] = int(target[1]), channels * height * width
    shapes[flat.input[1]].CopyFrom(numpy_helper.from_array(target, flat.input[1]))
    for node in graph.node:
        if node.op_type == "ConstantOfShape":
            shape = numpy_helper.to_array(shapes[node.input[0]]).copy()
            if len(shape) == 2 and shape[1] == former:
                shape[1] = target[1]
                shapes[node.input[0]].CopyFrom(numpy_helper.from_array(shape, node.input[0]))


def _extents(graph: onnx.GraphProto, name: str) -> int:
    return next(len(numpy_helper.to_array(each)) for each in graph.initializer if each.name == name)


def _shape(proto: onnx.ModelProto, name: str) -> tuple[int, ...]:
    """The shape of a value before the last pooling."""
    inferred = onnx.shape_inference.infer_shapes(proto)
    value = next(each for each in inferred.graph.value_info if each.name == name)
    return tuple(each.dim_value for each in value.type.tensor_type.shape.dim)


def _kernel(node: onnx.NodeProto) -> list[int]:
    return next(each.ints for each in node.attribute if each.name == "kernel_shape")
