"""Appendix A.3: on a model with one branch nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from autopipe.cli.bench.graphpipe.planned import AS_PUBLISHED, decision, step_of
from autopipe.cli.bench.graphpipe.published import BATCH, DEVICES, SEQUENTIAL_THROUGHPUT
from autopipe.cli.bench.row import Case, Row
from autopipe.cli.bench.zoo_graph import Settings

_SETTINGS: Settings = (("size", "sequential"),)
_STRATEGIES = ("graphpipe", "pipedream", "piper", "pipedream" + AS_PUBLISHED)


def sequential_model() -> list[Case]:
    """One case a number of devices."""
    pairs = zip(DEVICES, BATCH["mmt"], strict=True)
    return [Case(f"sequential/p={each}", "A.3", partial(_rows, each, batch)) for each, batch in pairs]


def _rows(devices: int, batch: int) -> Iterator[Row]:
    case = f"sequential/p={devices}"
    for strategy in _STRATEGIES:
        published = SEQUENTIAL_THROUGHPUT.get(strategy)
        theirs = published[DEVICES.index(devices)] if published else None
        step = step_of(strategy, "mmt", devices, batch, _SETTINGS)
        if isinstance(step, str):
            yield Row(case, "throughput", theirs, None, "samples/s", strategy, step)
        else:
            yield Row(case, "throughput", theirs, step.throughput, "samples/s", strategy, decision(step))
