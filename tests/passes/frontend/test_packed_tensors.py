"""Tensors of 8 bits and less, as Olive and optimum write them: they stay packed, and become numbers
at their use.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.helper as oh
import onnx.numpy_helper as onh
import pytest

from autopipe.ir.graph import DType
from autopipe.passes.frontend.read import read_model
from tests.passes.frontend.decompositions.test_operators import computed
from tests.passes.frontend.reference import run

WIDTH = 64
BLOCK = 16
LAYERS = 3


def dequantised(kind: str, axis: int) -> onnx.ModelProto:
    """Products with weights that nodes at the file's beginning take apart, block by block along
    `axis`.
    """
    random = np.random.default_rng(0)
    first = []
    behind = []
    tensors = []
    dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    blocks = [WIDTH, WIDTH]
    blocks[axis] = WIDTH // BLOCK
    names = ["x"]
    for layer in range(LAYERS):
        weight, scale, point, number, product = (
            f"{name}{layer}" for name in ("w", "s", "z", "n", "p")
        )
        whole = random.integers(
            0 if kind.startswith("u") else -2, 4 if kind.startswith("u") else 2, (WIDTH, WIDTH)
        )
        tensors.append(onh.from_array(whole.astype(dtype), weight))
        tensors.append(onh.from_array((random.random(blocks) * 0.1).astype("f4"), scale))
        operands = [weight, scale]
        if not kind.startswith("float"):
            tensors.append(onh.from_array(random.integers(0, 2, blocks).astype(dtype), point))
            operands.append(point)
        first.append(
            oh.make_node("DequantizeLinear", operands, [number], axis=axis, block_size=BLOCK)
        )
        behind.append(oh.make_node("MatMul", [names[-1], number], [product]))
        names.append(product)
    ends = (
        oh.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, WIDTH])
        for name in (names[0], names[-1])
    )
    graph = oh.make_graph([*first, *behind], "g", [next(ends)], [next(ends)], tensors)
    return oh.make_model(graph, opset_imports=[oh.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", ["int4", "uint4", "int8", "uint8", "float8_e4m3fn"])
def test_blocks_of_few_bits(kind: str, axis: int, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    fed = {"x": np.random.default_rng(1).standard_normal((2, WIDTH)).astype("f4")}
    onnx.save(dequantised(kind, axis), path)
    for ours, theirs in zip(computed(path, fed), run(path, fed).values(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    graph = read_model(path, batch_axes={"x": None}).graph
    weights = [each.value for each in graph.parameters if not each.value.dtype.is_floating]
    assert [each.bytes for each in weights] == [
        WIDTH**2 * (DType(kind).packed_bits or 8) // 8
    ] * LAYERS
    operators = [node.op for node in graph.nodes]
    steps = ["Unpack"] * bool(DType(kind).packed_bits) + ["DequantizeLinear", "MatMul"]
    assert operators == steps * LAYERS
