"""Modules that a launch imports before its first step has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopipe.backends.torch.fork_server import SWITCH_VARIABLE
from autopipe.ir.problem import Optimizer
from tests.distributed.support.launching import (
    PATIENCE_S,
    ROOT,
    finish,
    spell_data,
    start,
    write_chain,
)

pytestmark = pytest.mark.distributed

HEAVY_IN_LAUNCHER = {
    "onnx",
    "onnxruntime",
    "ortools",
    "scipy",
    "pulp",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
}
HEAVY_IN_RANK = HEAVY_IN_LAUNCHER | {
    "click",
    "rich",
    "torch.onnx",
    "autopipe.passes",
    "autopipe.cli",
}


@pytest.mark.parametrize("fork_server", ["0", "1"])
def test_a_rank_imports_nothing_heavy_for_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server: str
) -> None:
    monkeypatch.setenv(SWITCH_VARIABLE, fork_server)
    program = write_chain(tmp_path / "program", Optimizer("adamw", lr=0.05), groups=((0,),))
    body = "if step == 1: (here / 'imported').write_text('\\n'.join(__import__('sys').modules))"
    ended = finish(start(program, "--steps", 2, "--data", spell_data(tmp_path, body)))
    assert ended.code == 0, ended.stderr
    imported = set((tmp_path / "imported").read_text().split())
    assert "torch" in imported
    assert imported.isdisjoint(HEAVY_IN_RANK), imported & HEAVY_IN_RANK


def test_the_launcher_imports_nothing_heavy(tmp_path: Path) -> None:
    program = write_chain(tmp_path / "program", Optimizer("adamw", lr=0.05), groups=((0,),))
    text = "import sys\nfrom autopipe.cli.main import main\n"
    text += (
        f"code = main(['launch', {str(program)!r}, '--device', 'cpu', '--steps', '1', '--json'])\n"
    )
    text += "print(*sys.modules, sep='\\n', file=sys.stderr)\nsys.exit(code)\n"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", text],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    imported = set(done.stderr.split())
    assert "torch" in imported
    assert imported.isdisjoint(HEAVY_IN_LAUNCHER), imported & HEAVY_IN_LAUNCHER
