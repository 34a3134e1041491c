"""Models of the zoo in the shapes M, NN and K, from a command line to four verified ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure
from tests.distributed.test_verify import verified

pytestmark = pytest.mark.distributed

SMALL = {"hidden": "16", "heads": "4"}
GPT = {**SMALL, "layers": "4", "sequence": "8", "vocabulary": "512"}
MT5 = {**SMALL, "layers": "2", "source": "8", "target": "8", "vocabulary": "512"}
FLAVA = {**SMALL, "image": "16", "sequence": "8", "cross_layers": "1"}
ALL = [0, 1, 2, 3]
M = [ALL, [0], [1], [2], [3], ALL]
NN = [ALL, [0], [1], ALL, [2], [3], ALL]
K = [[0], [1], [2], [3], ALL]


@pytest.mark.parametrize(
    ("model", "settings", "shape", "groups", "flags"),
    [
        ("gpt", GPT, "m", M, ("--schedule", "tessel", "--set", "recompute=full")),
        ("mt5", MT5, "nn", NN, ("--schedule", "1f1b_plus")),
        ("mt5", {**MT5, "tied": "false"}, "m", M, ("--schedule", "1f1b")),
        ("flava", FLAVA, "k", K, ("--schedule", "tessel")),
    ],
)
def test_training_equals_one_device(
    here: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: str,
    settings: dict[str, str],
    shape: str,
    groups: list[list[int]],
    flags: tuple[str, ...],
) -> None:
    program = generated(tmp_path, model, settings | {"loss": "true"}, shape, groups, *flags)
    code, checks = verified(program, capsys)
    assert code == 0
    assert float(str(checks["loss of the ranks"]["relative_difference"])) < 1e-6
    assert float(str(checks["gradients of the ranks"]["relative_difference"])) < 1e-5


@pytest.mark.parametrize(
    ("model", "settings", "shape", "groups"), [("gpt", GPT, "m", M), ("flava", FLAVA, "k", K)]
)
def test_inference_equals_one_device(
    here: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: str,
    settings: dict[str, str],
    shape: str,
    groups: list[list[int]],
) -> None:
    code, checks = verified(
        generated(tmp_path, model, settings, shape, groups, "--schedule", "1f1b"), capsys
    )
    assert code == 0
    assert float(str(checks["outputs of the ranks"]["relative_difference"])) < 1e-5


def generated(
    folder: Path,
    name: str,
    settings: dict[str, str],
    shape: str,
    groups: list[list[int]],
    *flags: str,
) -> Path:
    """The program of a model of the zoo on four devices, eight micro-batches of two."""
    model = folder / "model.onnx"
    plan = folder / "plan"
    build(configure(name, settings)).save(model)
    sizes = ("--gpus", "4", "--batch-size", "16", "--micro-batches", "8")
    strategy = ("--strategy", "tessel_shapes", "--set", f"strategy.shape={shape}")
    assert main(["plan", str(model), *sizes, *strategy, *flags, "-o", str(plan), "-q"]) == 0
    document = json.loads((plan / "plan.json").read_text(encoding="utf-8"))
    assert [stage["devices"] for stage in document["placement"]["stages"]] == groups
    assert main(["codegen", str(plan), "-q"]) == 0
    return plan / "program"
