"""The measurements that want a GPU: with the smallest sizes they run on the CPU, so that they are in order when one is
at hand; on a GPU (`./test -m cuda`) their figures are as they must be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import PROGRAM, benchmarks
from benchmarks.one_gpu import CALLS, idle_share
from tests.cli.command_line import main

WITHIN = {"roofline": 0.10, "profiled": 0.05}
"""How far a predicted step and peak may be from what is measured."""
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def rows_of(name: str, folder: Path, *flags: str) -> dict[str, dict[str, Any]]:
    """The rows of a call by their names, from the file that it writes."""
    file = folder / "cuda.json"
    file.write_text('{"another call": {}}', encoding="utf-8")
    assert main(["cuda", "--only", name, "--write", str(file), *flags, "-q"], benchmarks, PROGRAM) == 0
    calls = json.loads(file.read_text(encoding="utf-8"))
    assert calls.keys() == {"another call", name} and calls[name]["card"] and calls[name]["torch"]
    return {row["row"]: row for row in calls[name]["rows"]}


def test_a_device_is_idle_while_nothing_runs_on_any_of_its_streams() -> None:
    assert idle_share([(0, 2), (1, 5), (2, 3), (6, 7), (9, 10)]) == 0.3


@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.sweep  # Four ranks on two cores take minutes.
@pytest.mark.parametrize("name", CALLS)
def test_all_rows_run_on_the_cpu(tmp_path: Path, name: str) -> None:
    rows = rows_of(name, tmp_path, "--tiny", "--device", "cpu")
    assert not {row: found for row, found in rows.items() if "error" in found or "left_out" in found}


@pytest.mark.cuda
@pytest.mark.timeout(700)
@on_a_gpu
@pytest.mark.parametrize("name", CALLS)
def test_figures_of_a_gpu(tmp_path: Path, name: str) -> None:
    rows = rows_of(name, tmp_path)
    assert not {row: found for row, found in rows.items() if "error" in found or not found.get("equal", True)}
    for row, found in rows.items():
        for figure in ("predicted_over_step", "predicted_over_peak"):
            if figure in found:
                assert found[figure] == pytest.approx(1, abs=WITHIN[row.rpartition(" ")[2]]), (row, found)
