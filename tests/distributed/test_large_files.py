"""A model of 3 GiB with its weights in three files goes to ranks while no process may hold all of
it.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.passes.frontend.building import node

WIDTH = 8192
LAYERS = 12
FILES = ("model.onnx_data", "weights/second.bin", "weights/third.bin")
LAYER_BYTES = 4 * WIDTH * WIDTH
LIMIT = LAYERS * LAYER_BYTES * 3 // 4
"""Bytes of memory of its own that a process may have; a rank holds a quarter of the weights, beside
torch.
"""


def _large_model(folder: Path) -> Path:
    """Layers of x W + x; the files have blocks on disk for one row of each weight alone."""
    graph = onnx.GraphProto(name="large")
    row = np.random.default_rng(0).standard_normal(WIDTH, dtype=np.float32).tobytes()
    (folder / "weights").mkdir()
    for layer in range(LAYERS):
        location = FILES[layer % len(FILES)]
        offset = layer // len(FILES) * LAYER_BYTES
        with (folder / location).open("ab") as file:
            file.truncate(offset)
            file.seek(offset)
            file.write(row)
            file.truncate(offset + LAYER_BYTES)
        tensor = graph.initializer.add(
            name=f"w{layer}", data_type=onnx.TensorProto.FLOAT, dims=[WIDTH, WIDTH]
        )
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (
            ("location", location),
            ("offset", str(offset)),
            ("length", str(LAYER_BYTES)),
        ):
            tensor.external_data.add(key=key, value=value)
        graph.node.append(node("MatMul", f"x{layer} w{layer}", f"m{layer}"))
        graph.node.append(node("Add", f"x{layer} m{layer}", f"x{layer + 1}"))
    for name, values in (("x0", graph.input), (f"x{LAYERS}", graph.output)):
        values.append(
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", WIDTH])
        )
    path = folder / "model.onnx"
    path.write_bytes(
        onnx.helper.make_model(
            graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 20)]
        ).SerializeToString()
    )
    return path


def _limited() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))


@pytest.mark.sweep
def test_no_process_holds_all_weights(tmp_path: Path) -> None:
    model = _large_model(tmp_path)
    plan = tmp_path / "plan"
    batch = ("--batch-size", "4", "--micro-batches", "2")
    for command in (
        ("inspect", model),
        ("plan", model, "--gpus", "4", "--cluster", "cpu-local", *batch, "-o", plan),
        ("codegen", plan),
        ("launch", plan / "program", "--device", "cpu"),
    ):
        words = [sys.executable, "-m", "autopipe", *map(str, command)]
        done = subprocess.run(
            words, preexec_fn=_limited, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
