"""Figure 5: samples that the first of three stages keeps, by the micro-batches of the stages."""

from __future__ import annotations

from collections.abc import Iterator

from autopipe.cli.bench.graphpipe.published import IN_FLIGHT
from autopipe.cli.bench.row import Case, Row
from autopipe.passes.cost.memory import stages_in_flight


def in_flight() -> list[Case]:
    """One case."""
    return [Case("three-stages/in-flight", "Figure 5", _rows)]


def _rows() -> Iterator[Row]:
    for sizes, theirs in IN_FLIGHT.items():
        ours = stages_in_flight((1, 1, 1), sizes, ((0, 1), (1, 2)))[0]
        variant = "micro-batches of " + ", ".join(map(str, sizes))
        yield Row("three-stages/in-flight", "in_flight", theirs, ours, "samples", variant, "by Table 2, 1F1B")
