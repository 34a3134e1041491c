"""`autopipe verify`, and small models of the zoo planned and generated for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure
from tests.distributed.support.zoo import SIZES

CLUSTER = """
name: toy
device:
  {name: toy, memory: 100GB, peak: {fp32: 10TFLOP/s}, bandwidth: 1000GB/s, launch_latency: 0us,
   efficiency: {matmul: 1, convolution: 1, elementwise: 1, normalization: 1, reduction: 1, memory: 1, recurrent: 1}}
levels:
  - {name: node, size: 4, latency: 0us, bandwidth: 10GB/s}
  - {name: cluster, latency: 0us, bandwidth: 1GB/s}
"""
"""Without latencies: with them, splits of so small a model in more than one way are never worth it.
"""


def generated(name: str, folder: Path, *flags: str) -> Path:
    """The program of training a small model of the zoo on four devices, two micro-batches of twelve
    samples a step.
    """
    model = folder / "model.onnx"
    cluster = folder / "toy.yaml"
    plan = folder / "plan"
    build(configure(name, {**SIZES[name], "loss": "true", "weights": "none"})).save(model)
    cluster.write_text(CLUSTER)
    sizes = ("--gpus", "4", "--batch-size", "24", "--micro-batches", "2", "--cluster", str(cluster))
    assert main(["plan", str(model), *sizes, *flags, "-o", str(plan), "-q"]) == 0
    assert main(["codegen", str(plan), "-q"]) == 0
    return plan / "program"


def verified(
    program: Path, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and the checks by what was compared."""
    capsys.readouterr()
    code = main(["verify", str(program), "--device", "cpu", "--json", "-q", *flags])
    document = json.loads(capsys.readouterr().out.splitlines()[0])
    assert "checks" in document, document
    return code, {check["compared"]: check for check in document["checks"]}
