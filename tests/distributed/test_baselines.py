"""Baselines of pase, expert strategies above all, for models of the zoo, from a command line to
four verified ranks.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure
from tests.distributed.test_verify import verified

pytestmark = pytest.mark.distributed

TINY = {"hidden": "16", "heads": "4", "vocabulary": "64"}
GPT = TINY | {"layers": "1", "sequence": "8"}
RNNLM = {"hidden": "8", "vocabulary": "64", "sequence": "4"}


@pytest.mark.parametrize(
    ("model", "settings", "strategy", "flags", "degrees"),
    [
        (
            "transformer",
            TINY | {"layers": "1", "sequence": "8"},
            "handcrafted",
            ("tensor=2",),
            {(2,), (2, 2)},
        ),
        ("gpt", GPT, "handcrafted", (), {(4,)}),
        ("bert", GPT, "handcrafted", ("tensor=2",), {(2,), (2, 2)}),
        ("alexnet", {"classes": "12"}, "one_weird_trick", (), {(4,)}),
        ("alexnet", {"hidden": "6"}, "handcrafted", (), {(4,), (2, 2)}),
        ("rnnlm", RNNLM, "handcrafted", (), {(2,)}),
        ("alexnet", {"classes": "12"}, "breadth_first", (), None),
        ("gpt", GPT, "mcmc", ("iterations=200", "temperature=5"), None),
        ("rnnlm", RNNLM, "mcmc", ("iterations=50", "temperature=5"), None),
    ],
)
def test_training_equals_one_device(
    here: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: str,
    settings: dict[str, str],
    strategy: str,
    flags: tuple[str, ...],
    degrees: set[tuple[int, ...]] | None,
) -> None:
    file = tmp_path / "model.onnx"
    plan = tmp_path / "plan"
    build(configure(model, settings | {"loss": "true"})).save(file)
    sizes = ("--gpus", "4", "--batch-size", "8", "--micro-batches", "2")
    options = [word for flag in flags for word in ("--set", f"strategy.{flag}")]
    assert (
        main(["plan", str(file), *sizes, "--strategy", strategy, *options, "-o", str(plan), "-q"])
        == 0
    )
    stages = json.loads((plan / "plan.json").read_text(encoding="utf-8"))["placement"]["stages"]
    found = {
        tuple(degree for _, degree in each["split"]) for stage in stages for each in stage["splits"]
    }
    assert degrees is None or found == degrees
    assert main(["codegen", str(plan), "-q"]) == 0
    code, checks = verified(plan / "program", capsys)
    assert code == 0
    assert float(str(checks["loss of the ranks"]["relative_difference"])) < 1e-5
    assert float(str(checks["gradients of the ranks"]["relative_difference"])) < 1e-5
