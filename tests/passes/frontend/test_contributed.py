"""ONNX Runtime's own operators, as files hold them: what is read, emitted and run equals its own kernels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnx.helper as oh
import onnx.numpy_helper as onh
import onnxruntime as ort
import pytest
import torch

from autopipe.backends.torch.emission.stage import emit_forward
from autopipe.passes.frontend.read import read_model
from tests.conformance.adapter import forward_of, stage_of, to_array, to_tensor
from tests.ir.ops.splitting import Use, check
from tests.passes.frontend.reference import parameter_array

Arrays = dict[str, np.ndarray]
RANDOM = np.random.default_rng(0)


def floats(*shape: int, scale: float = 1.0) -> np.ndarray:
    """Standard normal numbers."""
    return (RANDOM.standard_normal(shape) * scale).astype(np.float32)


def whole(*shape: int, dtype: str = "uint8") -> np.ndarray:
    """Whole numbers of a type of one byte, all of them."""
    limits = np.iinfo(dtype)
    return RANDOM.integers(limits.min, limits.max + 1, shape).astype(dtype)


def model_of(
    operator: str, operands: list[tuple[str, np.ndarray] | None], held: Arrays, results: int = 1, **attributes: object
) -> onnx.ModelProto:
    """A model of one node of the domain com.microsoft; operands are inputs unless `held`."""
    names = [each[0] if each else "" for each in operands]
    outputs = [f"y{index}" for index in range(results)]
    node = oh.make_node(operator, names, outputs, name="node", domain="com.microsoft", **attributes)
    inputs = [
        oh.make_tensor_value_info(name, oh.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in filter(None, operands)
        if name not in held
    ]
    graph = oh.make_graph(
        [node],
        "g",
        inputs,
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [onh.from_array(array, name) for name, array in held.items()],
    )
    opsets = [oh.make_opsetid("", 21), oh.make_opsetid("com.microsoft", 1)]
    return oh.make_model(graph, opset_imports=opsets, ir_version=10)


def compare(
    tmp_path: Path,
    operator: str,
    operands: list[tuple[str, np.ndarray] | None],
    held: str = "",
    results: int = 1,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    steps: float = 0.0,
    **attributes: object,
) -> None:
    """Assert that a node's results are those of onnxruntime. Operands named in `held` are tensors of the file. Of whole
    numbers a share of `steps` may differ by one: roundings of halves."""
    stored = {name: array for name, array in filter(None, operands) if name in held.split()}
    fed = {name: array for name, array in filter(None, operands) if name not in stored}
    model, path = model_of(operator, operands, stored, results, **attributes), tmp_path / "model.onnx"
    onnx.save(model, path)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    expected = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, fed)
    graph = read_model(path, batch_axes=dict.fromkeys(fed)).graph
    place = SimpleNamespace(
        device=torch.device("cpu"),
        **{f"w{index}": to_tensor(parameter_array(each, path)) for index, each in enumerate(graph.parameters)},
        **{f"c{index}": to_tensor(each.array) for index, each in enumerate(graph.constants)},
    )
    forward = forward_of(emit_forward(stage_of(graph)).text)
    found = forward(place, *(to_tensor(fed[each.name]) for each in graph.inputs))
    for ours, theirs in zip(map(to_array, found), expected, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        if theirs.dtype.kind in "iu":
            apart = np.abs(ours.astype(np.int64) - theirs.astype(np.int64))
            assert apart.max() <= bool(steps) and (apart > 0).mean() <= steps
        else:
            np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)


def packed(bits: int, points: str, inner: int, rows: int = 24, block: int = 32) -> list[tuple[str, np.ndarray] | None]:
    """Operands B, scales and zero points of MatMulNBits."""
    blocks = -(-inner // block)
    zero = {
        "packed": whole(rows, -(-blocks * bits // 8)), "numbers": floats(rows, blocks), "": None
    }[points]  # fmt: skip
    made = [("b", whole(rows, blocks, block * bits // 8)), ("scales", floats(rows, blocks, scale=0.05))]
    return [*made, None if zero is None else ("points", zero)]


@pytest.mark.parametrize("inner", [128, 80])
@pytest.mark.parametrize(
    ("bits", "points"), [(4, ""), (4, "packed"), (4, "numbers"), (8, "packed"), (8, ""), (2, "packed"), (2, "numbers")]
)
def test_products_of_packed_weights(bits: int, points: str, inner: int, tmp_path: Path) -> None:
    operands = [("x", floats(2, 3, inner)), *packed(bits, points, inner), None, ("bias", floats(24))]
    settings = {"K": inner, "N": 24, "bits": bits, "block_size": 32}
    compare(tmp_path, "MatMulNBits", operands, "b scales points bias", **settings)


def test_older_files_have_flat_scales(tmp_path: Path) -> None:
    b, scales, points = filter(None, packed(4, "packed", 128))
    operands = [("x", floats(3, 128)), b, ("scales", scales[1].reshape(-1)), ("points", points[1].reshape(-1))]
    compare(tmp_path, "MatMulNBits", operands, "b scales points", K=128, N=24, bits=4, block_size=32)


@pytest.mark.parametrize("points", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_lookups_of_packed_rows(bits: int, points: bool, tmp_path: Path) -> None:
    zero = ("points", whole(10, 4 * bits // 8)) if points else None
    operands = [
        ("table", whole(10, 16 * bits)),
        ("places", np.array([[3, 9], [0, -2]])),
        ("scales", floats(10, 4)),
        zero,
    ]
    settings = {"bits": bits, "block_size": 32, "gather_axis": 0, "quantize_axis": 1}
    compare(tmp_path, "GatherBlockQuantized", operands, "table scales points", **settings)


def use_of(tmp_path: Path, operator: str, operands: list[tuple[str, np.ndarray] | None], **attributes: object) -> Use:
    """A node as it is read, all its operands inputs."""
    arrays = dict(filter(None, operands))
    onnx.save(model_of(operator, operands, {}, **attributes), tmp_path / "model.onnx")
    graph = read_model(tmp_path / "model.onnx", batch_axes=dict.fromkeys(arrays)).graph
    return Use(graph, graph.nodes[0], arrays)


@pytest.mark.parametrize("points", ["packed", "numbers", ""])
def test_products_of_packed_weights_in_parts(points: str, tmp_path: Path) -> None:
    operands = [("x", floats(2, 4, 128)), *packed(4, points, 128)]
    use = use_of(tmp_path, "MatMulNBits", operands, bits=4, block_size=32, K=128, N=24)
    assert check(use, 1e-4, 1e-5) == 4


@pytest.mark.parametrize("points", ["packed", ""])
def test_lookups_of_packed_rows_in_parts(points: str, tmp_path: Path) -> None:
    table, *others = packed(4, points, 128)
    assert table is not None
    operands = [("table", table[1].reshape(24, -1)), ("places", np.array([[1, 5], [23, 0]])), *others]
    settings = {"gather_axis": 0, "quantize_axis": 1, "block_size": 32}
    assert check(use_of(tmp_path, "GatherBlockQuantized", operands, bits=4, **settings), 1e-4, 1e-5) == 4
