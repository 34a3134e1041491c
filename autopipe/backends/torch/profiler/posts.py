"""What a message's ends take of a rank's own time in a pipeline, besides what can be measured of messages alone."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from autopipe.backends.torch.launcher import Gang, launch_program
from autopipe.backends.torch.runtime.data import save_samples
from autopipe.backends.torch.runtime.manifest import read_manifest

_STEPS = 24
_WARM_UP = 4
Spans = dict[str, tuple[float, float]]
"""When tasks of a step began and ended, in seconds."""


def measure_post(together: Path, apart: Path, device: str) -> float:
    """Seconds an end: how much longer it takes between the tasks of the second stage where the first is on another
    rank, with a message that the second gets and one that it sends for each micro-batch.

    Both programs have the same two stages, the second the slower one: `together` runs them on one rank, each
    micro-batch through both before the next, `apart` on two under 1F1B. Raises LaunchError where one fails.
    """
    alone = _median_of_steps(together, device, 0, _own)
    among_others = _median_of_steps(apart, device, 1, _cycle)
    return max(0.0, (among_others - alone) / 2)


def _own(spans: Spans, micro_batches: int) -> float:
    """Seconds around a forward and a backward of the second stage, until one of the first begins."""
    return statistics.median(_between(spans, index, f"0B{index}") for index in range(1, micro_batches))


def _cycle(spans: Spans, micro_batches: int) -> float:
    """The same until the second stage's next forward."""
    return statistics.median(_between(spans, index, f"1F{index + 1}") for index in range(1, micro_batches - 1))


def _between(spans: Spans, index: int, until: str) -> float:
    """Seconds from a micro-batch's forward in the second stage until a task, without those of its own two tasks."""
    forward, backward = spans[f"1F{index}"], spans[f"1B{index}"]
    return (spans[until][0] - backward[1]) + (backward[0] - forward[1])


def _median_of_steps(program: Path, device: str, rank: int, seconds: Callable[[Spans, int], float]) -> float:
    manifest = read_manifest(program)
    with tempfile.TemporaryDirectory(prefix="autopipe-profile-") as name:
        data, spans = Path(name) / "samples.npz", Path(name) / "spans"
        save_samples(manifest, data)
        words = ["--device", device, "--steps", str(_STEPS), "--data", str(data), "--trace", str(spans)]
        launch_program(manifest, words, Gang())
        steps = (spans / f"rank_{rank:03d}.jsonl").read_text(encoding="utf-8").splitlines()
    return statistics.median(seconds(_spans(line), manifest.micro_batches) for line in steps[_WARM_UP:])


def _spans(line: str) -> Spans:
    spans: Sequence[dict[str, float | str]] = json.loads(line)["spans"]
    return {str(span["task"]): (float(span["start"]), float(span["end"])) for span in spans}
