"""ONNX's cases of operators that draw: their numbers are numpy's, so ours are held against what
numbers of their kind have in common, shape, type, values that may occur, and moments within five
standard deviations.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx.helper as oh
import pytest

from tests.conformance.adapter import EmissionBackend
from tests.conformance.cases import all_cases, data_of, model_of, skips

DRAWN = [key for key in all_cases() if skips().get(key[1], "").startswith("random numbers")]


@pytest.mark.conformance
@pytest.mark.parametrize(("kind", "name"), DRAWN)
def test_case(kind: str, name: str) -> None:
    case = all_cases()[kind, name]
    inputs, expected = next(data_of(case))
    found = EmissionBackend.prepare(model_of(case)).run(inputs)
    assert [(each.dtype, each.shape) for each in found] == [
        (each.dtype, each.shape) for each in expected
    ]
    if "bernoulli" in name:
        chances = inputs[0].astype(np.float64)
        assert set(np.unique(found[0])) <= {0, 1}
        assert abs(found[0].sum() - chances.sum()) < 5 * math.sqrt((chances * (1 - chances)).sum())
        return
    ratio = float(inputs[1]) if len(inputs) > 1 else 0.5
    kept = found[0] != 0
    np.testing.assert_allclose(found[0][kept], (inputs[0] / (1 - ratio))[kept], rtol=1e-5)
    assert abs(kept.sum() - kept.size * (1 - ratio)) <= 5 * math.sqrt(
        kept.size * ratio * (1 - ratio)
    )
    if len(found) > 1:
        assert (found[1] == kept)[inputs[0] != 0].all()


COUNT = 40_000
OF_UNIFORM = {"low": -1.0, "high": 3.0}
OF_NORMAL = {"mean": 2.0, "scale": 3.0}


@pytest.mark.parametrize(
    ("operator", "attributes", "mean", "deviation"),
    [
        ("RandomUniform", {"shape": [200, 200], **OF_UNIFORM}, 1.0, 4 / math.sqrt(12)),
        ("RandomUniformLike", OF_UNIFORM, 1.0, 4 / math.sqrt(12)),
        ("RandomNormal", {"shape": [200, 200], **OF_NORMAL}, 2.0, 3.0),
        ("RandomNormalLike", OF_NORMAL, 2.0, 3.0),
        ("Multinomial", {"sample_size": 200}, 1.75, math.sqrt(0.1875)),
    ],
)
def test_moments(
    operator: str, attributes: dict[str, float], mean: float, deviation: float
) -> None:
    float_ = onnx.TensorProto.FLOAT
    shape = [200, 3 if operator == "Multinomial" else 200]
    names = [] if "shape" in attributes else ["x"]
    node = oh.make_node(operator, names, ["y"], **attributes)
    inputs = [oh.make_tensor_value_info(name, float_, shape) for name in names]
    result = oh.make_tensor_value_info(
        "y", onnx.TensorProto.INT32 if operator == "Multinomial" else float_, [200, 200]
    )
    model = oh.make_model(
        oh.make_graph([node], "g", inputs, [result]), opset_imports=[oh.make_opsetid("", 17)]
    )
    # A quarter of ones, the rest twos.
    logarithms = np.log(np.array([[1e-30, 1.0, 3.0]], np.float32)).repeat(200, 0)
    (found,) = EmissionBackend.prepare(model).run(
        [logarithms if shape[1] == 3 else np.zeros(shape, np.float32)][: len(names)]
    )
    assert abs(found.mean() - mean) < 5 * deviation / math.sqrt(COUNT)
    assert abs(found.std() / deviation - 1) < 0.05
    half = found[:, :100], found[:, 100:]
    assert abs(np.corrcoef(half[0].ravel(), half[1].ravel())[0, 1]) < 5 / math.sqrt(COUNT / 2)
