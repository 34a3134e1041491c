"""Operators between others: each tells its results' types by itself, and takes operands of several
floating types.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper

from autopipe.backends.onnxruntime import ReferenceModel
from autopipe.backends.torch.codegen.stage import emit_forward
from autopipe.ir.graph import DType
from autopipe.ir.ops import OPERATORS
from autopipe.passes.frontend.inference import RULES
from autopipe.passes.frontend.read import read_model
from tests.conformance.adapter import forward_of, stage_of, to_array, to_tensor
from tests.conformance.cases import all_cases, data_of, model_of
from tests.conformance.frontend_cases import READ, data_inputs, with_known_inputs
from tests.passes.frontend.reference import parameter_array

UNTOLD = {"Compress"}
"""The extent of their results is in numbers that no file holds."""


def test_types_are_told_where_the_file_states_none(tmp_path: Path) -> None:
    """A case of each operator, with Identity before and behind it."""
    cases = {model_of(all_cases()[each]).graph.node[0].op_type: each for each in reversed(READ)}
    assert len(cases) > 150
    for kind, name in (
        case for operator, case in cases.items() if operator in OPERATORS.keys() - UNTOLD
    ):
        case = all_cases()[kind, name]
        path = tmp_path / "model.onnx"
        held = {each.name for each in model_of(case).graph.initializer}
        names = (each.name for each in model_of(case).graph.input if each.name not in held)
        model = with_known_inputs(
            model_of(case), dict(zip(names, next(data_of(case))[0], strict=False))
        )
        del model.graph.value_info[:]
        for output in [each for each in model.graph.output if each.type.HasField("tensor_type")]:
            inner = output.name
            output.name = f"{output.name} of the model"
            model.graph.node.append(helper.make_node("Identity", [inner], [output.name]))
            output.type.tensor_type.ClearField("shape")
        onnx.save(model, path)
        assert read_model(path, batch_axes=dict.fromkeys(data_inputs(path, held))).graph.outputs


def test_operators_of_other_domains_have_a_rule() -> None:
    theirs = {name for name in OPERATORS if name.startswith("com.microsoft.")}
    assert theirs <= {f"{domain}.{name}" for domain, name in RULES}


SINGLE = np.float32
HALF = np.float16
DOUBLE = np.float64
_MAP = (2, 6, 4, 4)
_ROWS = (3, 6)
_HEADS = (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("operator", "shapes", "types", "weights", "opset"),
    [
        ("LayerNormalization", [_ROWS, (6,), (6,)], [SINGLE, SINGLE, SINGLE], 2, 12),
        ("SimplifiedLayerNormalization", [_ROWS, (6,)], [SINGLE, HALF], 1, 17),
        ("SimplifiedLayerNormalization", [_ROWS, (6,)], [HALF, SINGLE], 1, 17),
        ("BatchNormalization", [_MAP, *[(6,)] * 4], [HALF, *[SINGLE] * 4], 4, 17),
        ("BatchNormalization", [_MAP, *[(6,)] * 4], [SINGLE, HALF, HALF, SINGLE, SINGLE], 4, 17),
        ("GridSample", [_MAP, (2, 3, 3, 2)], [SINGLE, HALF], 0, 20),
        ("Attention", [_HEADS, _HEADS, _HEADS, (3, 3)], [SINGLE, SINGLE, SINGLE, DOUBLE], 0, 23),
        ("Pow", [_ROWS, (6,)], [SINGLE, DOUBLE], 0, 17),
    ],
)
def test_operands_of_several_types(
    operator: str,
    shapes: list[tuple[int, ...]],
    types: list[type],
    weights: int,
    opset: int,
    tmp_path: Path,
) -> None:
    arrays = _drawn(shapes, types)
    path = _model(tmp_path, operator, arrays, weights, opset)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options)
    (expected,) = session.run(
        None, {each.name: arrays[int(each.name[1:])] for each in session.get_inputs()}
    )
    found = _run(path, arrays)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(
        found, expected, rtol=2 * _coarsest(types), atol=2 * _coarsest(types)
    )


@pytest.mark.parametrize(
    ("operator", "opset"), [("LayerNormalization", 17), ("RMSNormalization", 23)]
)
def test_normalisation_in_half_precision_with_a_scale_in_single(
    operator: str, opset: int, tmp_path: Path
) -> None:
    """As torch's exporters write `model.half()` with norms left in single precision, which ONNX
    Runtime refuses.
    """
    x, scale = _drawn([_ROWS, (6,)], [HALF, SINGLE])
    found = _run(_model(tmp_path, operator, [x, scale], 1, opset), [x, scale])
    centred = x.astype(DOUBLE) - (
        x.astype(DOUBLE).mean(-1, keepdims=True) if operator[0] == "L" else 0
    )
    expected = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5) * scale
    assert found.dtype == (HALF if operator[0] == "L" else SINGLE)
    np.testing.assert_allclose(
        found, expected, rtol=_coarsest([HALF]) if operator[0] == "L" else 1e-5, atol=1e-4
    )


@pytest.mark.parametrize(
    ("operator", "operands", "opset", "settings"),
    [
        ("BatchNormalization", 5, 13, {}),
        ("GroupNormalization", 3, 21, {"num_groups": 2}),
        ("InstanceNormalization", 3, 13, {}),
        ("InstanceNormalization", 3, 17, {}),
    ],
)
def test_normalisation_of_channels_in_half_precision(
    operator: str, operands: int, opset: int, settings: dict[str, int], tmp_path: Path
) -> None:
    arrays = _drawn([_MAP, *[(6,)] * (operands - 1)], [HALF, *[SINGLE] * (operands - 1)])
    path = _model(tmp_path, operator, arrays, operands - 1, opset, **settings)
    (expected,) = ReferenceModel(path, {}).run({"x0": arrays[0]}).values()
    found = _run(path, arrays)
    assert found.dtype == expected.dtype == HALF
    np.testing.assert_allclose(
        found, expected, rtol=4 * _coarsest([HALF]), atol=4 * _coarsest([HALF])
    )


def test_a_root_mean_square_has_the_type_that_the_file_states(tmp_path: Path) -> None:
    """torch's exporter states that of the operand, ONNX says that of the scale."""
    path = _model(tmp_path, "RMSNormalization", _drawn([_ROWS, (6,)], [HALF, SINGLE]), 1, 23)
    assert read_model(path).graph.type_of("y").dtype is DType.FLOAT32
    proto = onnx.load(path)
    proto.graph.output[0].CopyFrom(
        helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT16, _ROWS)
    )
    onnx.save(proto, path)
    assert read_model(path).graph.type_of("y").dtype is DType.FLOAT16


def test_a_convolution_in_bfloat16_below_the_opset_that_allows_it(tmp_path: Path) -> None:
    path = _model(tmp_path, "Conv", _drawn([_MAP, (3, 6, 1, 1)], [SINGLE, SINGLE]), 1, 18)
    proto = onnx.load(path)
    for kind in (proto.graph.input[0].type.tensor_type, proto.graph.output[0].type.tensor_type):
        kind.elem_type = onnx.TensorProto.BFLOAT16
    (weight,) = proto.graph.initializer
    weight.CopyFrom(
        helper.make_tensor(weight.name, onnx.TensorProto.BFLOAT16, weight.dims, bytes(36), raw=True)
    )
    onnx.save(proto, path)
    value = read_model(path).graph.type_of("y")
    assert (value.dtype, value.shape) == (DType.BFLOAT16, (2, 3, 4, 4))


def _coarsest(types: list[type]) -> float:
    return max(float(np.finfo(each).eps) for each in types)


def _drawn(shapes: list[tuple[int, ...]], types: list[type]) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [
        (generator.random(shape) + 0.1).astype(dtype)
        for shape, dtype in zip(shapes, types, strict=True)
    ]


def _model(
    folder: Path, operator: str, arrays: list[np.ndarray], weights: int, opset: int, **settings: int
) -> Path:
    """One node whose last operands are weights; nothing is said of its result."""
    names = [f"x{place}" for place in range(len(arrays))]
    given = len(arrays) - weights
    held = dict(zip(names, arrays, strict=True))
    graph = helper.make_graph(
        [helper.make_node(operator, names, ["y"], **settings)],
        "graph",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(held[name].dtype), held[name].shape
            )
            for name in names[:given]
        ],
        [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(held[name], name) for name in names[given:]],
    )
    path = folder / "model.onnx"
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9), path
    )
    return path


def _run(path: Path, arrays: list[np.ndarray]) -> np.ndarray:
    inputs = [each.name for each in onnx.load(path).graph.input]
    graph = read_model(path, batch_axes=dict.fromkeys(inputs)).graph
    place = SimpleNamespace(
        device=torch.device("cpu"),
        **{
            f"w{index}": to_tensor(parameter_array(each, path))
            for index, each in enumerate(graph.parameters)
        },
        **{f"c{index}": to_tensor(each.array) for index, each in enumerate(graph.constants)},
    )
    forward = forward_of(emit_forward(stage_of(graph)).text)
    (result,) = forward(place, *(to_tensor(arrays[int(each.name[1:])]) for each in graph.inputs))
    return to_array(result)
