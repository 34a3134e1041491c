"""CPU time of posting sends and receives in a pipeline, which messages alone do not show.

Times of messages and collectives between ranks of this machine by size, and the lines fitted through them.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autopipe.backends.torch.launcher import LaunchConfig, launch_program, rank_environment
from autopipe.backends.torch.runtime.data import save_samples
from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.ir.measured_costs import Affine, ExchangeCost, TimedBytes, Timing


def measure_exchanges(ranks: int, device: str, seconds: float) -> tuple[ExchangeCost, ...]:
    """Messages between two of `ranks`, and collectives of groups of up to all of them, for about `seconds`.

    Raises LaunchError where a rank fails.
    """
    from autopipe.backends.torch.elastic_agent import run_agent
    from autopipe.backends.torch.rendezvous import Place

    worker = "autopipe.backends.torch.profiler.exchange_worker"
    with tempfile.TemporaryDirectory(prefix="autopipe-profile-") as name, rank_environment():
        found, logs = Path(name) / "exchanges.json", Path(name) / "logs"
        logs.mkdir()
        command = (worker, str(found), device, str(seconds))
        failure = run_agent(command, ranks, Place(), 0, None, logs, False, _silent)
        if failure is not None:
            raise failure.error()
        rows = json.loads(found.read_text(encoding="utf-8"))
    samples: dict[tuple[str, int], list[tuple[int, Timing]]] = {}
    for row in rows:
        timing = Timing(row["seconds"], row["spread"], row["repetitions"])
        samples.setdefault((row["kind"], row["ranks"]), []).append((row["bytes"], timing))
    return tuple(
        ExchangeCost(kind, size, fit_line(each), tuple(TimedBytes(*one) for one in each))
        for (kind, size), each in samples.items()
    )


def fit_line(samples: Sequence[tuple[int, Timing]]) -> Affine:
    """The line of least relative squared error through times by bytes, neither coefficient below 0."""
    sizes = np.array([size for size, _ in samples], dtype=float)
    weights = 1 / np.array([timing.seconds for _, timing in samples])
    columns = np.stack([weights, sizes * weights], axis=1)
    fixed, per_byte = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)[0]
    if fixed < 0:
        return Affine(0.0, float((sizes * weights).sum() / ((sizes * weights) ** 2).sum()))
    if per_byte < 0:
        return Affine(float(weights.sum() / (weights**2).sum()), 0.0)
    return Affine(float(fixed), float(per_byte))


def _silent(_: str) -> None:
    """No restarts to tell of."""


_STEPS = 32
_WARM_UP = 4
Spans = dict[str, tuple[float, float]]
"""When tasks of a step began and ended, in seconds."""


@dataclass(frozen=True, slots=True)
class StagePairs:
    """Folders of programs of two same stages, the second the slower one."""

    together: Path
    """On one rank, each micro-batch through both stages before the next."""
    apart: Path
    """On two ranks under 1F1B, with one message there and one back for each micro-batch."""
    laden: Path
    """The same with `messages` there and as many back, all at once."""
    messages: int


@dataclass(frozen=True, slots=True)
class PostOverhead:
    """Seconds that ends of messages take of a rank's own time."""

    first: float
    """Of a task's messages."""
    following: float
    """Each other."""


def measure_post_overhead(pairs: StagePairs, device: str) -> PostOverhead:
    """How much longer it takes between the tasks of the second stage where the first is on another rank, by the message
    that the second gets or sends.

    Raises LaunchError where a program fails.
    """
    own = _of_steps(pairs.together, device, 0, _own)
    with_one, with_all = (_of_steps(each, device, 1, _cycle) for each in (pairs.apart, pairs.laden))
    return PostOverhead(max(0.0, (with_one - own) / 2), max(0.0, (with_all - with_one) / (2 * (pairs.messages - 1))))


def measure_period(program: Path, device: str) -> float:
    """Seconds from one micro-batch to the next in the second of two stages on two ranks under 1F1B, at least four
    micro-batches a step: that of the slower stage, whichever it is.

    Raises LaunchError where the program fails.
    """
    return _of_steps(program, device, 1, _period)


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


def _period(spans: Spans, micro_batches: int) -> float:
    return period_of([spans[f"1F{index}"][0] for index in range(micro_batches)])


def period_of(starts: Sequence[float]) -> float:
    """The median from one to the next of when a stage's forwards begin, after the first: a pipeline fills meanwhile."""
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(starts[1:]))


def _of_steps(program: Path, device: str, rank: int, seconds: Callable[[Spans, int], float]) -> float:
    """The median over steps of what `seconds` says of one."""
    manifest = read_manifest(program)
    with tempfile.TemporaryDirectory(prefix="autopipe-profile-") as name:
        data, spans = Path(name) / "samples.npz", Path(name) / "spans"
        save_samples(manifest, data)
        words = ["--device", device, "--steps", str(_STEPS), "--data", str(data), "--trace", str(spans)]
        launch_program(manifest, words, LaunchConfig())
        steps = (spans / f"rank_{rank:03d}.jsonl").read_text(encoding="utf-8").splitlines()
    return statistics.median(seconds(_spans(line), manifest.micro_batches) for line in steps[_WARM_UP:])


def _spans(line: str) -> Spans:
    spans: Sequence[dict[str, float | str]] = json.loads(line)["spans"]
    return {str(span["task"]): (float(span["start"]), float(span["end"])) for span in spans}
