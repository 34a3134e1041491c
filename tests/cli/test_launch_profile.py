"""The table of the worst bubbles, and which steps are profiled."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from autopipe.api.launch_profile import ProfiledSteps
from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.cli.launch_display import show_profile
from autopipe.cli.output import Output
from autopipe.ir.plan import plan_digest, read_plan, write_plan
from autopipe.ir.program import COMMUNICATION_KINDS
from tests.cli.drawing.examples import chain_plan
from tests.cli.drawing.test_bubbles import times
from tests.distributed.support.launching import write_chain


def test_a_step_and_steps(tmp_path: Path) -> None:
    assert ProfiledSteps.of("3", tmp_path) == ProfiledSteps(3, 3, tmp_path)
    assert ProfiledSteps.of("3-5", tmp_path) == ProfiledSteps(3, 5, tmp_path)


@pytest.mark.parametrize("with_plan", [True, False])
def test_the_worst_bubbles_are_named_with_what_was_predicted_of_them(
    tmp_path: Path, with_plan: bool
) -> None:
    manifest = read_manifest(write_chain(tmp_path / "plan" / "program"))
    if with_plan:
        plan, timeline = chain_plan(2, 1)
        moved = tuple((kind, 0) for kind in COMMUNICATION_KINDS)
        write_plan(
            tmp_path / "plan",
            replace(plan, summary=replace(plan.summary, communication_bytes=moved)),
            timeline,
        )
        manifest = replace(manifest, plan=plan_digest(read_plan(tmp_path / "plan")))
    (tmp_path / "times").mkdir()
    for rank, steps in times().items():
        (tmp_path / "times" / f"rank_{rank:03d}.jsonl").write_text(
            "".join(json.dumps(each) + "\n" for each in steps)
        )
    output = Output(
        stdout=Console(file=io.StringIO(), width=80, markup=False),
        stderr=Console(file=io.StringIO(), markup=False),
    )
    profiled = ProfiledSteps(3, 3, tmp_path / "log" / "profile")
    profile = profiled.finish(tmp_path / "times", manifest, output)
    assert profile is not None
    show_profile(profile, output)
    assert isinstance(output.stdout.file, io.StringIO) and isinstance(
        output.stderr.file, io.StringIO
    )
    title, _, *rows = output.stdout.file.getvalue().splitlines()
    assert title == "bubbles of step 3: a step's, by rank, and the largest"
    assert all(len(row) <= 80 for row in rows)
    assert rows[0].split()[:3] == ["1", "6.00", "s"]
    late, end = (row.split("  ") for row in rows[2:4])
    assert (
        late[0] == "1"
        and "1F0" in rows[2]
        and "4.00 s" in rows[2]
        and rows[2].rstrip().endswith("rank 0, channel 5: 3.00 s")
    )
    assert end[0] == "1" and "the end" in rows[3] and "2.00 s" in rows[3]
    notes = output.stderr.file.getvalue()
    assert ("no predicted timeline" in notes) is not with_plan
    events = json.loads((tmp_path / "log" / "profile" / "timeline.json").read_text())["traceEvents"]
    assert any(each["pid"] == 1 for each in events) is with_plan
    (tmp_path / "times" / "rank_000.jsonl").unlink()
    ProfiledSteps(3, 3, tmp_path / "node").finish(tmp_path / "times", manifest, output)
    assert [path.name for path in (tmp_path / "node").iterdir()] == ["timeline_001-001.json"], (
        "a node's own ranks"
    )
