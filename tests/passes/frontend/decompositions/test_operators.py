"""Operators of ONNX Runtime: the numbers of the emitted program equal those of ONNX Runtime's
kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.helper as oh
import onnx.numpy_helper as onh
import onnxruntime as ort
import pytest
import torch

from autopipe.backends.onnxruntime import ReferenceModel
from autopipe.passes.frontend.read import read_model
from tests.ir.ops.splitting import Use, check
from tests.passes.frontend.evaluated import emitted

Arrays = dict[str, np.ndarray]
RANDOM = np.random.default_rng(0)


def floats(*shape: int, scale: float = 1.0) -> np.ndarray:
    """Return float32 numbers of the standard normal distribution."""
    return (RANDOM.standard_normal(shape) * scale).astype(np.float32)


def integers_of(*shape: int, dtype: str = "uint8") -> np.ndarray:
    """Return uniform random integers of a one-byte type, over its whole range."""
    limits = np.iinfo(dtype)
    return RANDOM.integers(limits.min, limits.max + 1, shape).astype(dtype)


def model_of(
    operator: str,
    operands: list[tuple[str, np.ndarray] | None],
    held: Arrays,
    results: int = 1,
    **attributes: object,
) -> onnx.ModelProto:
    """Return a model of one node of the domain com.microsoft. Operands are graph inputs, except
    those in `held`, which are initializers.
    """
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


def computed(path: Path, fed: Arrays) -> list[np.ndarray]:
    """Return the outputs that the emitted program computes for a file."""
    return [*emitted(read_model(path, batch_axes=dict.fromkeys(fed)), fed).values()]


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
    """Assert that a node's results equal those of onnxruntime. Operands named in `held` are
    initializers. Of integers, a fraction `steps` of the elements may differ by 1, because halves
    are rounded.
    """
    stored = {name: array for name, array in filter(None, operands) if name in held.split()}
    fed = {name: array for name, array in filter(None, operands) if name not in stored}
    model = model_of(operator, operands, stored, results, **attributes)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    expected = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(
        None, fed
    )
    for ours, theirs in zip(computed(path, fed), expected, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        if theirs.dtype.kind in "iu":
            apart = np.abs(ours.astype(np.int64) - theirs.astype(np.int64))
            assert apart.max() <= bool(steps) and (apart > 0).mean() <= steps
        else:
            np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)


def packed(
    bits: int, points: str, inner: int, rows: int = 24, block: int = 32
) -> list[tuple[str, np.ndarray] | None]:
    """Return the operands B, scales and zero points of MatMulNBits."""
    blocks = -(-inner // block)
    zero = {
        "packed": integers_of(rows, -(-blocks * bits // 8)), "numbers": floats(rows, blocks), "": None
    }[points]  # fmt: skip
    made = [
        ("b", integers_of(rows, blocks, block * bits // 8)),
        ("scales", floats(rows, blocks, scale=0.05)),
    ]
    return [*made, None if zero is None else ("points", zero)]


@pytest.mark.parametrize("inner", [128, 80])
@pytest.mark.parametrize(
    ("bits", "points"),
    [(4, ""), (4, "packed"), (4, "numbers"), (8, "packed"), (8, ""), (2, "packed"), (2, "numbers")],
)
def test_matmul_nbits(bits: int, points: str, inner: int, tmp_path: Path) -> None:
    operands = [
        ("x", floats(2, 3, inner)),
        *packed(bits, points, inner),
        None,
        ("bias", floats(24)),
    ]
    settings = {"K": inner, "N": 24, "bits": bits, "block_size": 32}
    compare(tmp_path, "MatMulNBits", operands, "b scales points bias", **settings)


@pytest.mark.parametrize("kind", [0, 1])
def test_matmul_bnb4(kind: int, tmp_path: Path) -> None:
    operands = [
        ("x", floats(2, 3, 48)),
        ("b", integers_of(12 * 48 // 2)),
        ("scales", floats(12 * 48 // 16, scale=0.05)),
    ]
    compare(
        tmp_path, "MatMulBnb4", operands, "b scales", K=48, N=12, block_size=16, quant_type=kind
    )


def test_matmul_nbits_with_flat_scales(tmp_path: Path) -> None:
    b, scales, points = filter(None, packed(4, "packed", 128))
    operands = [
        ("x", floats(3, 128)),
        b,
        ("scales", scales[1].reshape(-1)),
        ("points", points[1].reshape(-1)),
    ]
    compare(
        tmp_path, "MatMulNBits", operands, "b scales points", K=128, N=24, bits=4, block_size=32
    )


@pytest.mark.parametrize("points", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_gather_block_quantized(bits: int, points: bool, tmp_path: Path) -> None:
    zero = ("points", integers_of(10, 4 * bits // 8)) if points else None
    operands = [
        ("table", integers_of(10, 16 * bits)),
        ("places", np.array([[3, 9], [0, -2]])),
        ("scales", floats(10, 4)),
        zero,
    ]
    settings = {"bits": bits, "block_size": 32, "gather_axis": 0, "quantize_axis": 1}
    compare(tmp_path, "GatherBlockQuantized", operands, "table scales points", **settings)


def use_of(
    tmp_path: Path,
    operator: str,
    operands: list[tuple[str, np.ndarray] | None],
    **attributes: object,
) -> Use:
    """Return the only node of the graph that is read from a node of com.microsoft whose operands
    are inputs.
    """
    arrays = dict(filter(None, operands))
    onnx.save(model_of(operator, operands, {}, **attributes), tmp_path / "model.onnx")
    graph = read_model(tmp_path / "model.onnx", batch_axes=dict.fromkeys(arrays)).graph
    return Use(graph, graph.nodes[0], arrays)


@pytest.mark.parametrize("points", ["packed", "numbers", ""])
def test_matmul_nbits_is_split_over_devices(points: str, tmp_path: Path) -> None:
    operands = [("x", floats(2, 4, 128)), *packed(4, points, 128)]
    use = use_of(tmp_path, "MatMulNBits", operands, bits=4, block_size=32, K=128, N=24)
    assert check(use, 1e-4, 1e-5) == 4


@pytest.mark.parametrize("points", ["packed", ""])
def test_gather_block_quantized_is_split_over_devices(points: str, tmp_path: Path) -> None:
    table, *others = packed(4, points, 128)
    assert table is not None
    operands = [
        ("table", table[1].reshape(24, -1)),
        ("places", np.array([[1, 5], [23, 0]])),
        *others,
    ]
    settings = {"gather_axis": 0, "quantize_axis": 1, "block_size": 32}
    assert (
        check(use_of(tmp_path, "GatherBlockQuantized", operands, bits=4, **settings), 1e-4, 1e-5)
        == 4
    )


def scale_of(name: str, value: float) -> tuple[str, np.ndarray]:
    """Return an operand that is a scale."""
    return name, np.array(value, np.float32)


def zero_point_of(name: str, value: int, dtype: str = "uint8") -> tuple[str, np.ndarray]:
    """Return an operand that is a zero point."""
    return name, np.array(value, dtype)


def quantized_operand(
    name: str, *shape: int, scale: float = 0.0517, zero: int = 120, dtype: str = "uint8"
) -> list[Any]:
    """Return a quantised operand, its scale and its zero point."""
    return [
        (name, integers_of(*shape, dtype=dtype)),
        scale_of(f"{name}_scale", scale),
        zero_point_of(f"{name}_point", zero, dtype),
    ]


def result_scale(scale: float = 0.0493, zero: int = 110, dtype: str = "uint8") -> list[Any]:
    """Return the scale and zero point of a result."""
    return [scale_of("y_scale", scale), zero_point_of("y_point", zero, dtype)]


A = quantized_operand("a", 2, 3, 8)
IMAGE = quantized_operand("a", 2, 4, 6, 5)
SIGNED = quantized_operand("a", 2, 3, 8, zero=-3, dtype="int8")
NARROW = result_scale(1 / 256, 0)
QUANTIZED: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("QLinearAdd", [*A, *quantized_operand("b", 3, 1), *result_scale(0.0971)], {}),
    (
        "QLinearAdd",
        [
            *SIGNED,
            *quantized_operand("b", 8, zero=4, dtype="int8"),
            *result_scale(0.0971, 5, "int8"),
        ],
        {},
    ),
    ("QLinearMul", [*A, *quantized_operand("b", 2, 3, 8, zero=130), *result_scale(0.317)], {}),
    ("QLinearSigmoid", [*A, *NARROW], {}),
    ("QLinearLeakyRelu", [*A, *result_scale()], {"alpha": 0.2}),
    (
        "QLinearSoftmax",
        [*quantized_operand("a", 3, 9, scale=0.02), *NARROW],
        {"opset": 13, "axis": -1},
    ),
    (
        "QLinearSoftmax",
        [*quantized_operand("a", 3, 2, 5, scale=0.02), *NARROW],
        {"opset": 12, "axis": 1},
    ),
    (
        "QLinearSoftmax",
        [*quantized_operand("a", 9, 8, scale=0.001), *result_scale(1 / 255, 0)],
        {"opset": 13, "axis": -1},
    ),
    (
        "QLinearConcat",
        [*result_scale(), *A, *quantized_operand("b", 2, 3, 2, scale=0.04, zero=100)],
        {"axis": 2},
    ),
    (
        "QLinearWhere",
        [
            ("c", integers_of(3, 8) > 127),
            *quantized_operand("a", 3, 8),
            *quantized_operand("b", 8, scale=0.04),
            *result_scale(),
        ],
        {},
    ),
    ("QLinearGlobalAveragePool", [*IMAGE, *result_scale(0.0213)], {}),
    ("QLinearGlobalAveragePool", [*IMAGE, *result_scale(0.0213)], {"channels_last": 1}),
    (
        "QLinearAveragePool",
        [*IMAGE, *result_scale(0.04)],
        {"kernel_shape": [3, 2], "pads": [1, 0, 1, 0], "strides": [2, 1]},
    ),
    (
        "QLinearAveragePool",
        [*IMAGE, *result_scale(0.04)],
        {"kernel_shape": [2, 2], "channels_last": 1},
    ),
    (
        "QGemm",
        [
            *quantized_operand("a", 4, 6),
            *quantized_operand("b", 6, 5),
            ("c", np.arange(5, dtype=np.int32) * 99),
            *result_scale(0.9),
        ],
        {},
    ),
    (
        "QGemm",
        [*quantized_operand("a", 6, 4), *quantized_operand("b", 5, 6)],
        {"transA": 1, "transB": 1, "alpha": 0.5},
    ),
]


@pytest.mark.parametrize(
    ("operator", "operands", "attributes"),
    QUANTIZED,
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_quantised_operators(
    operator: str, operands: list[Any], attributes: dict[str, Any], tmp_path: Path
) -> None:
    held = " ".join(each[0] for each in operands if each and "_" in each[0])
    compare(tmp_path, operator, operands, held, steps=0.02, **attributes)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("per_column", [False, True])
def test_integer_matrix_products(signed: bool, per_column: bool, tmp_path: Path) -> None:
    """Signed weights are at most 64 in magnitude. On CPUs without VNNI, onnxruntime's kernel adds two
    products of uint8 and int8 in 16 bits, which saturates for larger weights.
    """
    dtype = "int8" if signed else "uint8"
    count = (5,) if per_column else ()
    weights = integers_of(6, 5, dtype=dtype)
    b = ("b", weights // 2 if signed else weights)
    bias = ("bias", floats(5))
    scale = ("b_scale", np.abs(floats(*count)) + 0.01)
    zero = ("b_point", integers_of(*count, dtype=dtype))
    compare(
        tmp_path,
        "DynamicQuantizeMatMul",
        [("a", floats(2, 4, 6)), b, scale, zero, bias],
        "b b_scale b_point bias",
        rtol=1e-3,
        atol=1e-3,
    )
    a, a_scale, a_point = quantized_operand("a", 2, 4, 6)
    operands = [a, b, a_scale, scale, a_point, zero, bias]
    compare(
        tmp_path,
        "MatMulIntegerToFloat",
        operands,
        "b a_scale b_scale a_point b_point bias",
        rtol=1e-3,
        atol=1e-3,
    )


@pytest.mark.parametrize("settings", ["", "mask", "lengths", "unidirectional", "past"])
def test_quantised_attention(settings: str, tmp_path: Path) -> None:
    a, scale, zero = quantized_operand("a", 2, 4, 8, scale=0.02)
    past = ("past", floats(2, 2, 2, 3, 4)) if settings == "past" else None
    mask = {
        "mask": ("mask", np.array([[1, 1, 1, 0], [1, 0, 1, 1]], np.int32)),
        "lengths": ("mask", np.array([3, 4], np.int32)),
    }
    operands = [
        a,
        ("w", integers_of(8, 24)),
        ("bias", floats(24)),
        scale,
        scale_of("w_scale", 0.01),
        mask.get(settings),
        zero,
        zero_point_of("w_point", 128),
        past,
    ]
    attributes = {"num_heads": 2, "unidirectional": int(settings in ("unidirectional", "past"))}
    held = "w bias w_scale w_point a_scale a_point"
    compare(
        tmp_path,
        "QAttention",
        operands,
        held,
        results=2 if past else 1,
        rtol=1e-3,
        atol=1e-3,
        **attributes,
    )


@pytest.mark.parametrize("per_row", [False, True])
def test_quantised_lstm(per_row: bool, tmp_path: Path) -> None:
    """The kernel quantises the layer's inputs, the decomposition does not. The test's inputs are
    representable in a byte, so that both agree.
    """
    operands: list[Any] = [
        ("x", np.linspace(-128, 127, 10).round().astype(np.float32).reshape(1, 2, 5) / 64),
        ("w", integers_of(2, 5, 12)),
        ("r", integers_of(2, 3, 12)),
        ("b", floats(2, 24, scale=0.1)),
        None,
        None,
        None,
        None,
    ]
    for name in "wr":
        scales = RANDOM.uniform(0.005, 0.01, (2, 12) if per_row else (2,)).astype(np.float32)
        points = np.full(scales.shape, 128, np.uint8)
        operands += [(f"{name}_scale", scales), (f"{name}_point", points)]
    settings = {"hidden_size": 3, "direction": "bidirectional"}
    held = "w r b w_scale w_point r_scale r_point"
    compare(tmp_path, "DynamicQuantizeLSTM", operands, held, results=3, **settings)
    stored = dict(filter(None, operands[1:]))
    fed = {"x": floats(4, 2, 5)}
    operands[0] = ("x", fed["x"])
    onnx.save(
        model_of("DynamicQuantizeLSTM", operands, stored, 3, **settings), tmp_path / "long.onnx"
    )
    wanted = ReferenceModel(tmp_path / "long.onnx", {}).run(fed)
    for ours, theirs in zip(computed(tmp_path / "long.onnx", fed), wanted.values(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("results", [2, 3])
@pytest.mark.parametrize("given", ["", "segments", "mask", "places"])
def test_embeddings(given: str, results: int, tmp_path: Path) -> None:
    def tokens(below: int) -> np.ndarray:
        return RANDOM.integers(0, below, (2, 4)).astype(np.int32)

    segments = given == "segments"
    operands: list[Any] = [
        ("ids", tokens(9)),
        ("segments", tokens(2)) if segments else None,
        ("words", floats(9, 8)),
    ]
    operands += [
        ("positions", floats(6, 8)),
        ("table", floats(2, 8)) if segments else None,
        ("gamma", floats(8)),
        ("beta", floats(8)),
    ]
    operands += [
        ("mask", np.array([[1, 1, 0, 0], [1, 1, 1, 1]], np.int32)) if given == "mask" else None
    ]
    operands += [("places", tokens(6)) if given == "places" else None]
    compare(
        tmp_path,
        "EmbedLayerNormalization",
        operands,
        "words positions table gamma beta",
        results,
        epsilon=1e-5,
    )


PIXELS = [("x", floats(2, 4, 5, 5)), ("w", floats(6, 4, 3, 3)), ("b", floats(6))]
MATRICES = [("x", floats(3, 4)), ("w", floats(5, 4)), ("b", floats(5))]


@pytest.mark.parametrize(
    ("operator", "operands", "attributes"),
    [
        ("FusedConv", PIXELS, {"activation": "Relu", "pads": [1] * 4}),
        ("FusedConv", [*PIXELS, ("z", floats(2, 6, 3, 3))], {"activation": "Relu"}),
        ("FusedConv", PIXELS[:2], {"activation": "Clip", "activation_params": [0.0, 6.0]}),
        (
            "FusedMatMul",
            [("x", floats(2, 3, 4, 5)), ("y", floats(6, 2, 3, 5))],
            {"transBatchB": 1, "transB": 1},
        ),
        (
            "FusedMatMul",
            [("x", floats(5, 2, 4)), ("y", floats(2, 5, 6))],
            {"transBatchA": 1, "transA": 1, "alpha": 0.5},
        ),
        (
            "FusedMatMul",
            [("x", floats(4, 2, 5)), ("y", floats(5, 2, 6))],
            {"transBatchA": 1, "transBatchB": 1},
        ),
        ("FusedGemm", MATRICES, {"activation": "LeakyRelu", "activation_alpha": 0.1, "transB": 1}),
        ("DequantizeLinear", quantized_operand("a", 3, 4), {}),
        ("QuantizeLinear", [("a", floats(3, 4)), *result_scale()], {}),
    ],
)
def test_other_operators(
    operator: str, operands: list[Any], attributes: dict[str, Any], tmp_path: Path
) -> None:
    compare(tmp_path, operator, operands, "w b", **attributes)


@pytest.mark.parametrize(("last", "active"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("skip", ["", "whole", "one a sample", "flat"])
def test_group_normalization_against_numpy(
    last: int, active: int, skip: str, tmp_path: Path
) -> None:
    """ONNX Runtime has no CPU kernel for it."""
    x = floats(2, 8, 3, 5)
    gamma = floats(8)
    beta = floats(8)
    bias = floats(8)
    added = {
        "": 0.0,
        "whole": floats(2, 8, 3, 5),
        "one a sample": floats(2, 8, 1, 1),
        "flat": floats(2, 8),
    }[skip]
    shape = (
        added.reshape(2, 8, 1, 1) if isinstance(added, np.ndarray) and added.ndim == 2 else added
    )
    total = torch.from_numpy(x + shape + (bias.reshape(8, 1, 1) if skip else 0.0))
    exact = torch.nn.functional.group_norm(
        total, 4, torch.from_numpy(gamma), torch.from_numpy(beta), 1e-5
    )
    expected = [
        (torch.nn.functional.silu(exact) if active else exact).numpy(),
        *([total.numpy()] if skip else []),
    ]

    def placed(array: Any) -> Any:
        return (
            np.ascontiguousarray(np.moveaxis(array, 1, -1)) if last and array.ndim == 4 else array
        )

    operands: list[Any] = [("x", placed(x)), ("gamma", gamma), ("beta", beta)]
    operands += [("skip", placed(added)), ("bias", bias)] if skip else []
    settings = {"groups": 4, "channels_last": last, "activation": active, "epsilon": 1e-5}
    model = model_of(
        "SkipGroupNorm" if skip else "GroupNorm", operands, {}, len(expected), **settings
    )
    onnx.save(model, tmp_path / "model.onnx")
    for ours, theirs in zip(
        computed(tmp_path / "model.onnx", dict(operands)), expected, strict=True
    ):
        np.testing.assert_allclose(ours, placed(theirs), rtol=1e-4, atol=1e-5)


def test_fused_sums_and_convolutions_against_numpy(tmp_path: Path) -> None:
    """ONNX Runtime has no CPU kernels for these operators."""
    x = floats(2, 3, 8)
    bias = floats(8)
    skip = floats(2, 3, 8)
    image = floats(2, 5, 5, 4)
    weight = floats(6, 4, 3, 3)
    left, right = torch.from_numpy(x + bias).chunk(2, -1)
    rows = torch.from_numpy(image).permute(0, 3, 1, 2)
    convolved = torch.nn.functional.conv2d(rows, torch.from_numpy(weight), padding=1)
    cases: list[tuple[str, list[Any], Any, dict[str, Any]]] = [
        ("BiasSplitGelu", [("x", x), ("bias", bias)], left * torch.nn.functional.gelu(right), {}),
        (
            "BiasAdd",
            [("x", x), ("bias", bias), ("skip", skip)],
            torch.from_numpy(x + bias + skip),
            {},
        ),
        (
            "NhwcConv",
            [("x", image), ("w", weight)],
            convolved.permute(0, 2, 3, 1),
            {"pads": [1] * 4},
        ),
    ]
    for operator, operands, expected, attributes in cases:
        onnx.save(model_of(operator, operands, {}, **attributes), tmp_path / "model.onnx")
        (found,) = computed(tmp_path / "model.onnx", dict(operands))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("segments", [False, True])
def test_quantised_embeddings(segments: bool, tmp_path: Path) -> None:
    tables = {"words": (9, 8), "positions": (6, 8), "table": (2, 8), "gamma": (8,), "beta": (8,)}
    ids = RANDOM.integers(0, 2, (2, 2, 4)).astype(np.int32)
    operands: list[Any] = [("ids", ids[0]), ("segments", ids[1]) if segments else None]
    operands += [
        (name, integers_of(*shape)) if segments or name != "table" else None
        for name, shape in tables.items()
    ]
    operands.append(("mask", np.array([[1, 1, 0, 0], [1, 1, 1, 1]], np.int32)))
    for kind, made in (
        ("scale", lambda name: scale_of(name, 0.02)),
        ("point", lambda name: zero_point_of(name, 128)),
    ):
        operands += [
            made(f"{name}_{kind}") if segments or name != "table" else None for name in tables
        ]
    held = " ".join(
        each[0] for each in operands if each and each[0] not in ("ids", "segments", "mask")
    )
    compare(
        tmp_path, "QEmbedLayerNormalization", operands, held, 2, rtol=1e-3, atol=1e-4, epsilon=1e-5
    )


@pytest.mark.parametrize("kind", ["int4", "uint4"])
@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize(("gathered", "axis"), [(0, 1), (1, 0), (0, 2)])
def test_gather_of_4_bit_elements(
    gathered: int, axis: int, points: bool, kind: str, tmp_path: Path
) -> None:
    shape = [32, 32, 16][: 2 + (axis == 2)]
    blocks = [extent // 16 if place == axis else extent for place, extent in enumerate(shape)]
    dtype = getattr(ml_dtypes, kind)
    operands: list[Any] = [
        ("table", integers_of(*shape, dtype="int8").astype(dtype)),
        ("places", np.array([[3, 9], [0, 2]])),
    ]
    operands += [
        ("scales", floats(*blocks)),
        ("points", integers_of(*blocks, dtype="int8").astype(dtype)) if points else None,
    ]
    settings = {"block_size": 16, "gather_axis": gathered, "quantize_axis": axis}
    compare(tmp_path, "GatherBlockQuantized", operands, "table scales points", **settings)


def test_4_bit_types_in_a_file_of_an_older_opset(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 18, "com.microsoft": 1]>
    g (float[3, 4] x) => (float[3, 4] y) <float s = {0.25}>
    { n = com.microsoft.DequantizeLinear(w, s, z)  y = Mul(x, n) }
    """
    model = onnx.parser.parse_model(text)
    kind = onnx.TensorProto.INT4
    model.graph.initializer.append(oh.make_tensor("w", kind, [4], [-8, 7, 3, -1]))
    model.graph.initializer.append(oh.make_tensor("z", kind, [], [1]))
    onnx.save(model, tmp_path / "model.onnx")
    ours = computed(tmp_path / "model.onnx", {"x": np.ones((3, 4), np.float32)})
    np.testing.assert_array_equal(ours[0][0], [-2.25, 1.5, 0.5, -0.5])


def test_nchwc_operators(tmp_path: Path) -> None:
    """The file is a session's optimized model for this machine."""
    text = """<ir_version: 10, opset_import: ["": 20]>
    g (float[2, 3, 12, 12] x, float[20, 3, 3, 3] a, float[64, 20, 3, 3] b, float[64, 1, 3, 3] c, float[64] e,
       float[32, 32, 1, 1] d) => (float[2, 32, 10, 10] y, float[2, 96, 1, 1] z)
    {
      f = Conv <pads = [1, 1, 1, 1]> (x, a)
      h = Relu(f)
      i = Conv <strides = [2, 2]> (h, b, e)
      j = Conv <group = 64, pads = [1, 1, 1, 1]> (i, c)
      k = Add(j, i)
      l = Conv <group = 2> (k, d)
      m = MaxPool <kernel_shape = [2, 2], pads = [0, 0, 1, 1]> (l)
      n = Concat <axis = 1> (m, i)
      z = GlobalAveragePool(n)
      scales = Constant <value = float[4] {1.0, 1.0, 2.0, 2.0}> ()
      y = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"> (l, , scales)
    }
    """
    model = onnx.parser.parse_model(text)
    for each in list(model.graph.input)[1:]:
        shape = [extent.dim_value for extent in each.type.tensor_type.shape.dim]
        model.graph.initializer.append(onh.from_array(floats(*shape, scale=0.2), each.name))
        model.graph.input.remove(each)
    written = compare_optimized(model, {"x": floats(2, 3, 12, 12)}, tmp_path)
    assert {"ReorderOutput", "Conv", "MaxPool", "Upsample", "GlobalAveragePool"} <= written


def test_nchwc_operators_of_an_old_opset(tmp_path: Path) -> None:
    text = """<ir_version: 4, opset_import: ["": 9]>
    g (float[2, 3, 6, 6] x) => (float[2, 5, 4, 4] y)
    { c = Conv(x, a)  y = Clip <min = 0.0, max = 0.5> (c) }
    """
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onh.from_array(floats(5, 3, 3, 3), "a"))
    assert compare_optimized(model, {"x": floats(2, 3, 6, 6)}, tmp_path) == {
        "Conv",
        "ReorderOutput",
    }


@pytest.mark.parametrize(
    "activation",
    [
        "Relu", "Sigmoid", "Tanh", "LeakyRelu <alpha = 0.2>", "HardSigmoid <alpha = 0.3, beta = 0.4>", "HardSwish",
        "Elu <alpha = 0.5>", "Selu", "Softplus", "Softsign", "ThresholdedRelu <alpha = 0.1>",
    ],
)  # fmt: skip
def test_fused_activations(tmp_path: Path, activation: str) -> None:
    """The session fuses some of the activations into the operator before them."""
    text = f"""<ir_version: 8, opset_import: ["": 17]>
    g (float[2, 3, 6, 6] x, float[2, 4] v) => (float[2, 8, 4, 4] y, float[2, 5] z)
    {{ c = Conv(x, a)  y = {activation} (c)  p = Gemm(v, b)  z = {activation} (p) }}
    """
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(
        [onh.from_array(floats(8, 3, 3, 3), "a"), onh.from_array(floats(4, 5), "b")]
    )
    assert "Conv" in compare_optimized(
        model, {"x": floats(2, 3, 6, 6), "v": floats(2, 4)}, tmp_path
    )


@pytest.mark.parametrize(
    ("activation", "parameters"), [("HardSwish", []), ("Selu", [1.5, 1.1]), ("Softplus", [])]
)
@pytest.mark.parametrize("opset", [11, 17])
def test_fused_activations_of_old_files(
    tmp_path: Path, activation: str, parameters: list[float], opset: int
) -> None:
    """ONNX has HardSwish since opset 14."""
    x = floats(1, 3, 5, 5)
    weight = floats(4, 3, 3, 3)
    settings: dict[str, object] = {"activation": activation} | (
        {"activation_params": parameters} if parameters else {}
    )
    graph = oh.make_graph(
        [oh.make_node("FusedConv", ["x", "w"], ["y"], domain="com.microsoft", **settings)],
        "g",
        [oh.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape)],
        [oh.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 4, 3, 3])],
        [onh.from_array(weight, "w")],
    )
    imports = [oh.make_opsetid("", opset), oh.make_opsetid("com.microsoft", 1)]
    file = tmp_path / "model.onnx"
    onnx.save(oh.make_model(graph, opset_imports=imports, ir_version=8), file)
    (found,) = computed(file, {"x": x})
    plain = torch.nn.functional.conv2d(torch.from_numpy(x), torch.from_numpy(weight))
    if activation == "HardSwish":
        expected = torch.nn.functional.hardswish(plain)
    elif activation == "Softplus":
        expected = torch.nn.functional.softplus(plain)
    else:
        alpha, gamma = parameters
        expected = gamma * torch.nn.functional.elu(plain, alpha)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)


def compare_optimized(model: onnx.ModelProto, fed: Arrays, tmp_path: Path) -> set[str]:
    """Assert that the program of a session's optimized model computes what the session computes.
    Return the operators of the optimized model in the nchwc domain.
    """
    options = ort.SessionOptions()
    file = tmp_path / "model.onnx"
    options.optimized_model_filepath = str(file)
    options.log_severity_level = 4
    expected = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    ).run(None, fed)
    for ours, theirs in zip(computed(file, fed), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    return {
        each.op_type for each in onnx.load(file).graph.node if each.domain == "com.microsoft.nchwc"
    }


def test_classical_operators_of_skl2onnx(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 15, "ai.onnx.ml": 1]>
    g (double[4, 3] x) => (float[4, 2] t, int64[1, 4] y)
    <int64[3] labels = {7, 9, 4}>
    {
      s = ai.onnx.ml.Scaler <offset = [0.5, -1.0, 0.25], scale = [2.0, 0.5, 1.5]> (x)
      t = ai.onnx.ml.LinearRegressor
          <targets = 2, coefficients = [0.1, 0.2, 0.3, -0.4, 0.5, 0.6], intercepts = [1.0, -1.0]> (s)
      a = ArgMax <axis = 1, keepdims = 0> (s)
      y = ai.onnx.ml.ArrayFeatureExtractor(labels, a)
    }
    """
    file = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(text), file)
    fed = {"x": floats(4, 3).astype(np.float64)}
    expected = ort.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, fed)
    for ours, theirs in zip(computed(file, fed), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_dynamic_quantisation_is_exact(tmp_path: Path) -> None:
    """An error of one rounding in a scale would change some of the bytes in the middle of a graph
    by 1.
    """
    text = """<ir_version: 10, opset_import: ["": 20]>
    g (float[64] x) => (uint8[64] y, float s, uint8 z) { y, s, z = DynamicQuantizeLinear(x) }"""
    file = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(text), file)
    session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
    for seed in range(60):
        fed = {"x": floats(64, scale=0.1 * seed)}
        for ours, theirs in zip(computed(file, fed), session.run(None, fed), strict=True):
            np.testing.assert_array_equal(ours, theirs)
