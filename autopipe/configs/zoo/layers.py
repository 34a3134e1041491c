"""Layers that several models share, written as the operators an exporter would give."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopipe.configs.zoo.builder import ONES, ZEROS, GraphBuilder, Initializer, kaiming, lecun

if TYPE_CHECKING:
    import onnx_ir as ir


def linear(
    graph: GraphBuilder,
    name: str,
    data: ir.Value,
    inputs: int,
    outputs: int,
    *,
    init: Initializer,
    bias: bool = True,
) -> ir.Value:
    """[…, inputs] -> […, outputs] as MatMul, and Add where there is a `bias`; the weight is [inputs, outputs]."""
    with graph.scope(name):
        result = graph.op("MatMul", data, graph.parameter("weight", inputs, outputs, init=init))
        if bias:
            result = graph.op("Add", result, graph.parameter("bias", outputs, init=ZEROS))
    return result


def dense(graph: GraphBuilder, name: str, data: ir.Value, inputs: int, outputs: int, *, relu: bool = True) -> ir.Value:
    """[batch, inputs] -> [batch, outputs] as Gemm with a weight [outputs, inputs], then Relu where wanted."""
    with graph.scope(name):
        weight = graph.parameter("weight", outputs, inputs, init=kaiming(inputs) if relu else lecun(inputs))
        result = graph.op("Gemm", data, weight, graph.parameter("bias", outputs, init=ZEROS), transB=1)
        return graph.op("Relu", result) if relu else result


def embedding(
    graph: GraphBuilder, name: str, indices: ir.Value, rows: int, width: int, *, init: Initializer
) -> tuple[ir.Value, ir.Value]:
    """Rows of a table [rows, width] chosen by int64 `indices`; the result [*indices, width] and the table."""
    with graph.scope(name):
        table = graph.parameter("weight", rows, width, init=init)
        return graph.op("Gather", table, indices, axis=0), table


def positions(graph: GraphBuilder, length: int) -> ir.Value:
    """The int64 vector 0 … length - 1."""
    return graph.op("Range", graph.constant(0), graph.constant(length), graph.constant(1))


def float_positions(graph: GraphBuilder, length: int) -> ir.Value:
    """The float32 vector 0 … length - 1."""
    return graph.op("Range", graph.constant(0.0), graph.constant(float(length)), graph.constant(1.0))


def layer_norm(graph: GraphBuilder, name: str, data: ir.Value, width: int, epsilon: float = 1e-5) -> ir.Value:
    """LayerNormalization of the last axis, of extent `width`."""
    with graph.scope(name):
        scale = graph.parameter("weight", width, init=ONES)
        shift = graph.parameter("bias", width, init=ZEROS)
        return graph.op("LayerNormalization", data, scale, shift, axis=-1, epsilon=epsilon)


def rms_norm(graph: GraphBuilder, name: str, data: ir.Value, width: int, epsilon: float) -> ir.Value:
    """Root-mean-square norm of the last axis, of extent `width`, spelled out (Zhang and Sennrich, 2019)."""
    with graph.scope(name):
        mean = graph.op("ReduceMean", graph.op("Pow", data, graph.constant(2.0)), graph.constant([-1]), keepdims=1)
        deviation = graph.op("Sqrt", graph.op("Add", mean, graph.constant(epsilon)))
        return graph.op("Mul", graph.op("Div", data, deviation), graph.parameter("weight", width, init=ONES))


def convolution(
    graph: GraphBuilder,
    name: str,
    data: ir.Value,
    inputs: int,
    outputs: int,
    *,
    kernel: tuple[int, int],
    stride: int = 1,
    padding: tuple[int, int] = (0, 0),
    bias: bool = True,
) -> ir.Value:
    """Conv of [batch, inputs, height, width] with `padding` on both sides of height and width."""
    with graph.scope(name):
        weight = graph.parameter("weight", outputs, inputs, *kernel, init=kaiming(inputs * kernel[0] * kernel[1]))
        shift = [graph.parameter("bias", outputs, init=ZEROS)] if bias else []
        pads = [*padding, *padding]
        return graph.op("Conv", data, weight, *shift, kernel_shape=kernel, strides=[stride, stride], pads=pads)


def batch_norm(graph: GraphBuilder, name: str, data: ir.Value, channels: int, epsilon: float = 1e-5) -> ir.Value:
    """BatchNormalization by running statistics, as in a model exported for fine-tuning."""
    with graph.scope(name):
        scale = graph.parameter("weight", channels, init=ONES)
        shift = graph.parameter("bias", channels, init=ZEROS)
        mean = graph.parameter("running_mean", channels, init=ZEROS)
        variance = graph.parameter("running_var", channels, init=ONES)
        return graph.op("BatchNormalization", data, scale, shift, mean, variance, epsilon=epsilon)


def max_pool(graph: GraphBuilder, data: ir.Value, kernel: int, stride: int, padding: int = 0) -> ir.Value:
    """MaxPool with a square window."""
    return graph.op("MaxPool", data, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[padding] * 4)


def pooled(extent: int, kernel: int, stride: int, padding: int = 0) -> int:
    """Extent of an axis of `extent` after a window of `kernel` with `stride`; 0 or less where it does not fit."""
    return (extent + 2 * padding - kernel) // stride + 1
