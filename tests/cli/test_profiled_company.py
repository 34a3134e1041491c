"""Who keeps other processors busy while a model is profiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.backends.torch.profiler.company import company
from autopipe.cli.profiling.whole import whole_program
from autopipe.configs.zoo import build, configure
from autopipe.passes.frontend import read_model

SETTINGS = {"hidden": "16", "vocabulary": "32", "sequence": "4", "loss": "true", "weights": "random"}


@pytest.mark.distributed
def test_other_processes_run_the_model(tmp_path: Path) -> None:
    build(configure("rnnlm", SETTINGS)).save(tmp_path / "rnnlm.onnx")
    program = whole_program(read_model(tmp_path / "rnnlm.onnx", batch=2), "fp32", tmp_path / "program", 2)
    assert program is not None
    with company(2, 1, program):
        assert len(list(tmp_path.glob("program.*.npz"))) == 2, "each has drawn its samples"


@pytest.mark.distributed
def test_a_model_that_does_not_run_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    with company(1, 1, tmp_path / "program"):
        assert not list(tmp_path.glob("program.*.npz"))
    with company(1, 1, None):
        pass
