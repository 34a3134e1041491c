"""Weights of 4 bits are 4 bits in plans, and on ranks that have parts of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from autopipe.cli.main import main
from autopipe.passes.frontend.read import read_model
from tests.exports.packed_llama import LLAMA_7B, SMALL, Builder


def test_seven_billion_parameters_take_four_bits_each_and_their_scales(tmp_path: Path) -> None:
    onnx.save(Builder(LLAMA_7B, numbers=False).model(), tmp_path / "model.onnx")
    graph = read_model(tmp_path / "model.onnx", batch=1).graph
    held = {each.value.dtype.value: 0 for each in graph.parameters}
    for each in graph.parameters:
        held[each.value.dtype.value] += each.value.bytes
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 2 * 32000 * 4096
    assert held["uint8"] == matrices // 2 + matrices // 64  # and their zero points
    assert 3.5 * 2**30 < sum(held.values()) < 4.2 * 2**30


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy", ["handcrafted", pytest.param("pipedream", marks=pytest.mark.sweep)]
)
def test_a_64th_of_it_equals_onnxruntime_on_four_ranks(
    here: None, strategy: str, tmp_path: Path
) -> None:
    onnx.save(Builder(SMALL, numbers=True).model(), tmp_path / "model.onnx")
    plan = str(tmp_path / "plan")
    program = str(tmp_path / "program")
    for words in (
        [
            "plan",
            str(tmp_path / "model.onnx"),
            "--gpus",
            "4",
            "--batch-size",
            "4",
            "--strategy",
            strategy,
            "-o",
            plan,
        ],
        ["codegen", plan, "-o", program],
        ["launch", program, "--device", "cpu"],
        ["verify", program],
    ):
        assert main(words) == 0, words


@pytest.mark.distributed
def test_what_rounding_to_16_bits_may_change_is_measured_by_moving_scales(
    here: None, tmp_path: Path
) -> None:
    """All weights are whole numbers: inputs and weights have nothing else to move."""
    layer = """
      n{0} = com.microsoft.DequantizeLinear(w, s, z)   m{0} = MatMul(q{0}, n{0})   g{0} = Tanh(m{0})
      u{0} = com.microsoft.QuantizeLinear(g{0}, t, o)  q{1} = com.microsoft.DequantizeLinear(u{0}, t, o)
    """
    text = f"""<ir_version: 10, opset_import: ["": 18, "com.microsoft": 1]>
    g (int64[2, 8] ids) => (float[2, 8, 64] q4)
    <float s = {{0.003}}, int8 z = {{1}}, float t = {{0.00004}}, int16 o = {{7}}>
    {{ d = com.microsoft.DequantizeLinear(w, s, z)  q0 = Gather(d, ids)
      {"".join(layer.format(each, each + 1) for each in range(4))} }}
    """
    model = onnx.parser.parse_model(text)
    numbers = np.random.default_rng(0).integers(-128, 128, (64, 64))
    model.graph.initializer.append(onnx.numpy_helper.from_array(numbers.astype(np.int8), "w"))
    onnx.save(model, tmp_path / "model.onnx")
    plan = str(tmp_path / "plan")
    program = str(tmp_path / "program")
    size = ["--gpus", "2", "--batch-size", "4", "--micro-batches", "2", "--cluster", "cpu-local"]
    assert main(["plan", str(tmp_path / "model.onnx"), *size, "-o", plan]) == 0
    assert main(["codegen", plan, "-o", program]) == 0
    assert main(["verify", program, "--device", "cpu"]) == 0
