"""The tutorial's example does what the tutorial says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autopipe.cli.main import main

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "export_gpt2.py"


def test_the_tutorial_shows_the_script() -> None:
    tutorial = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    assert f"```python\n{SCRIPT.read_text(encoding='utf-8')}```\n" in tutorial


@pytest.mark.timeout(900)  # torch exports slowly where other work has the cores
def test_the_exported_model_keeps_its_parameters_apart_and_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run([sys.executable, str(SCRIPT)], cwd=tmp_path, check=True, capture_output=True)
    model = str(tmp_path / "gpt2.onnx")
    assert main(["inspect", model, "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert (seen["parameters"], seen["parameter_tensors"], seen["loss"]) == (1_263_616, 76, "loss")
    assert not seen["unsupported"]
    folder = tmp_path / "gpt2.plan"
    flags = ["--gpus", "4", "--cluster", "cpu-local", "--batch-size", "16", "--micro-batches", "8"]
    assert main(["plan", model, *flags, "-o", str(folder)]) == 0
    assert main(["codegen", str(folder)]) == 0
    assert len(list((folder / "program").glob("rank_*.py"))) == 4
