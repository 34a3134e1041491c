"""Measured spans of all ranks as one Chrome trace, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def chrome_trace(folder: Path) -> dict[str, Any]:
    """The trace of the span files that ranks wrote into `folder`: one row a rank, times in microseconds."""
    ranks = {int(path.stem.removeprefix("rank_")): _steps(path) for path in sorted(folder.glob("rank_*.jsonl"))}
    origin = min((step["began"] for steps in ranks.values() for step in steps), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, steps in ranks.items():
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        for step in steps:
            for span in step["spans"]:
                events.append(
                    {
                        "name": span["task"],
                        "cat": "measured",
                        "ph": "X",
                        "pid": 0,
                        "tid": rank,
                        "ts": (step["began"] - origin + span["start"]) * 1e6,
                        "dur": (span["end"] - span["start"]) * 1e6,
                        "args": {"step": step["step"]},
                    }
                )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _steps(path: Path) -> list[dict[str, Any]]:
    """A rank's steps; of a step done again after a restart, the last."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return [step for _, step in sorted({int(line["step"]): line for line in lines}.items())]
