"""Under autocast the copies of weights that are made once a step change no number of any step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopipe.ir.problem import Optimizer
from tests.distributed.support.pool import Pools
from tests.distributed.support.running import batch_of, report_lines, schedule_of, write
from tests.distributed.test_loss_scaling import MICRO_BATCHES, layered, placed

pytestmark = pytest.mark.distributed

STEPS = 5


@pytest.mark.parametrize("recompute", ["no", "yes", "holding copies"])
@pytest.mark.parametrize("shard", [False, True])
def test_losses_are_those_of_casts_in_every_forward(
    pools: Pools, tmp_path: Path, recompute: str, shard: bool
) -> None:
    """Also in a run that goes on from a checkpoint."""
    graph, loss = layered()
    placement = placed(graph, recompute != "no")
    folder = tmp_path / "program"
    holding = tuple(
        replace(each, holds_copies=recompute == "holding copies") for each in placement.stages
    )
    placement = replace(placement, stages=holding)
    schedule = schedule_of(graph, placement, MICRO_BATCHES)
    write(graph, placement, schedule, loss, folder, "bf16", Optimizer("adamw", lr=0.1, shard=shard))
    np.savez(tmp_path / "batch.npz", **batch_of(graph, MICRO_BATCHES))  # type: ignore[arg-type]

    def losses(steps: int, *flags: object) -> list[object]:
        report = tmp_path / "report.jsonl"
        report.unlink(missing_ok=True)
        arguments = (
            "--device",
            "cpu",
            "--steps",
            steps,
            "--report",
            report,
            "--data",
            tmp_path / "batch.npz",
        )
        pools.of(placement.devices).run(folder, *arguments, *flags)
        return [line["loss"] for line in report_lines(report)]

    found = losses(STEPS)
    saved = ("--checkpoint", tmp_path / "saved")
    assert losses(2, *saved) + losses(STEPS, *saved, "--resume") == found
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert len(manifest.pop("low_precision", [])) == (0 if recompute == "yes" else 3)
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert losses(STEPS) == found and len(set(found)) == STEPS
