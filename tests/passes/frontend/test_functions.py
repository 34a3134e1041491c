"""Functions of a file, whose attributes have defaults, as ONNX Runtime computes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from autopipe.ir.problem import Mode
from autopipe.passes.frontend import read_model
from tests.passes.frontend.building import floats
from tests.passes.frontend.evaluated import emitted
from tests.passes.frontend.reference import run

TEXT = """<ir_version: 9, opset_import: ["": 18, "local": 1]>
g (float[3, 4] x) => (float[3, 4] y) { y = CALL }
<opset_import: ["": 18], domain: "local">
inner <slope: float = 0.3> (z) => (w) { w = LeakyRelu <alpha: float = @slope> (z) }
<opset_import: ["": 18, "local": 1], domain: "local">
outer <s: float = 0.7> (z) => (w) { w = local.inner <slope: float = @s> (z) }
<opset_import: ["": 18, "local": 1], domain: "local">
plain (z) => (w) { w = local.inner(z) }
<opset_import: ["": 18], domain: "local">
several <least: float = -0.5, most: float = 0.25> (z) => (w) {
    a = Constant <value_float: float = @least> ()
    b = Constant <value_float: float = @most> ()
    w = Clip(z, a, b)
}
<opset_import: ["": 18], domain: "local">
whole <axis: int = 1> (z) => (w) { w = Softmax <axis: int = @axis> (z) }
<opset_import: ["": 18], domain: "local">
list <order: ints = [1, 0]> (z) => (w) { t = Transpose <perm: ints = @order> (z)  w = Transpose(t) }
<opset_import: ["": 18], domain: "local">
either <takes: int = 1> (z) => (w) {
    k = Constant <value_int: int = @takes> ()
    c = Cast <to: int = 9> (k)
    w = If (c) <
        then_branch = one () => (o) { o = LeakyRelu <alpha: float = 0.5> (z) },
        else_branch = other () => (o) { o = Neg(z) }
    >
}
<opset_import: ["": 18], domain: "local">
optional <alpha: float> (z) => (w) { w = LeakyRelu <alpha: float = @alpha> (z) }
"""
CALLS = [
    "local.inner(x)", "local.outer(x)", "local.plain(x)", "local.inner <slope: float = 0.5> (x)",
    "local.outer <s: float = 0.5> (x)", "local.several(x)", "local.several <most: float = 0.1> (x)", "local.whole(x)",
    "local.whole <axis: int = 0> (x)", "local.list(x)", "local.either(x)", "local.either <takes: int = 0> (x)",
    "local.optional(x)", "local.optional <alpha: float = 0.9> (x)",
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_attributes_that_a_call_leaves_out(tmp_path: Path, call: str) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(TEXT.replace("CALL", call)), path)
    x = floats(3, 4)
    found = emitted(read_model(path, mode=Mode.INFER), {"x": x})["y"]
    np.testing.assert_allclose(found, run(path, {"x": x})["y"], rtol=1e-5, atol=1e-6)
