"""Table 1: how long the searches of the three strategies take, and GraphPipe's on larger clusters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from autopipe.cli.bench.graphpipe.planned import answer_of
from autopipe.cli.bench.graphpipe.published import BATCH, DEVICES, MODELS, SEARCH_S
from autopipe.cli.bench.row import Case, Row

_STRATEGIES = ("graphpipe", "pipedream", "piper")

LARGE = (256, 1024)
"""Devices beyond the paper's, for MMT; 16 samples a device as there."""

_NOTE = "measured here, once, all sizes of micro-batches; theirs on an Apple M1 Max"


def search_times() -> list[Case]:
    """One case a model and number of devices, then MMT on more of them."""
    cases = [
        Case(f"{model}/p={devices}", "Table 1", partial(_rows, model, devices, batch))
        for model in MODELS
        for devices, batch in zip(DEVICES, BATCH[model], strict=True)
    ]
    return [*cases, *(Case(f"mmt/p={devices}", "Table 1", partial(_large, devices)) for devices in LARGE)]


def _rows(model: str, devices: int, batch: int) -> Iterator[Row]:
    answer_of("graphpipe", "two-branch", 2, 4, ())  # What loads on first use is not counted.
    for strategy in _STRATEGIES:
        answer = answer_of(strategy, model, devices, batch)
        published = SEARCH_S[model].get(strategy)
        theirs = published[DEVICES.index(devices)] if published else None
        ours = None if answer.refusal else answer.seconds
        note = answer.refusal or _NOTE
        yield Row(f"{model}/p={devices}", "search_time_s", theirs, ours, "s", strategy, note)


def _large(devices: int) -> Iterator[Row]:
    answer = answer_of("graphpipe", "mmt", devices, 16 * devices)
    ours = None if answer.refusal else answer.seconds
    yield Row(f"mmt/p={devices}", "search_time_s", None, ours, "s", "graphpipe", answer.refusal or _NOTE)
