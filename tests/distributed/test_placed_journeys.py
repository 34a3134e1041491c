"""Placements by hand that some schedules ask for, from a configuration to verified ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure
from tests.distributed.support.pool import Pools
from tests.distributed.test_verify import SETTINGS, verified

pytestmark = pytest.mark.distributed


def constraints(devices: list[int], pipeline: int = 0) -> str:
    """A stage for each layer of a GPT, on these devices; embeddings join the first, the head the
    last.
    """
    lines = [f"  - {{match: 'token_embedding/*', stage: 0, pipeline: {pipeline}}}\n"]
    lines += [
        (
            f"  - {{match: 'layers.{layer}/*', stage: {layer}, devices: [{device}], pipeline: "
            f"{pipeline}}}\n"
        )
        for layer, device in enumerate(devices)
    ]
    return "".join(lines)


JOURNEYS = {
    "chimera": [[0, 1, 2, 3], [3, 2, 1, 0]],
    "zb_v": [[0, 1, 2, 3, 3, 2, 1, 0]],
}
"""For each schedule the devices of each pipeline's stages."""


@pytest.mark.parametrize("schedule", JOURNEYS)
def test_from_a_configuration_to_verified_ranks(
    here: None, pools: Pools, tmp_path: Path, capsys: pytest.CaptureFixture[str], schedule: str
) -> None:
    ways = JOURNEYS[schedule]
    settings = SETTINGS | {"layers": str(len(ways[0])), "loss": "true"}
    model = tmp_path / "gpt.onnx"
    folder = tmp_path / "plan"
    build(configure("gpt", settings)).save(model)
    config = tmp_path / "placed.yaml"
    text = "".join(constraints(devices, pipeline) for pipeline, devices in enumerate(ways))
    config.write_text(f"strategy: {{name: manual}}\nconstraints:\n{text}", encoding="utf-8")
    flags = ["--config", str(config), "--gpus", "4", "--batch-size", "16", "--micro-batches", "8"]
    assert main(["plan", str(model), *flags, "--schedule", schedule, "-o", str(folder), "-q"]) == 0
    assert main(["show", str(folder)]) == 0
    assert main(["codegen", str(folder), "-q"]) == 0
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    assert [stage["pipeline"] for stage in plan["placement"]["stages"]] == [
        pipeline for pipeline, devices in enumerate(ways) for _ in devices
    ]
    code, checks = verified(folder / "program", capsys)
    assert code == 0
    assert float(str(checks["gradients of the ranks"]["relative_difference"])) < 1e-5
