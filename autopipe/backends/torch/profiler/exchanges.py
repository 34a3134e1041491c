"""Times of messages and collectives between ranks of this machine by size, and the lines fitted through them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from autopipe.backends.torch.launcher import rank_environment
from autopipe.ir.measured_costs import Affine, ExchangeCost, Timing


def measure_exchanges(ranks: int, device: str, seconds: float) -> tuple[ExchangeCost, ...]:
    """Messages between two of `ranks`, and collectives of groups of up to all of them, for about `seconds`.

    Raises LaunchError where a rank fails.
    """
    from autopipe.backends.torch.agent import run_agent
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
    return tuple(ExchangeCost(kind, size, fit_line(each), tuple(each)) for (kind, size), each in samples.items())


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
