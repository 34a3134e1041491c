"""What was predicted and measured, as rows of a benchmark and as a table for a person."""

from __future__ import annotations

from collections.abc import Iterator

from autopipe.cli.bench.fidelity.outcome import Comparison, Outcome
from autopipe.cli.bench.row import Row
from autopipe.cli.output import bytes_text, seconds_text

_PREDICTED = "simulated with costs measured in this run"
_RECORDED = "allocated by torch at most, on the rank that is to need most, parameters included"

_ALL_RANKS = "of a step, all ranks together, counted by the kernel"

HEADINGS = ("candidate", "predicted", "measured", "off", "processors", "memory", "allocated", "to move", "moved")
"""Of `cells`."""


def rows(comparison: Comparison) -> Iterator[Row]:
    """Two figures of each kind for every candidate, then those of all."""
    for each in comparison.outcomes:
        for metric, predicted, measured, unit, note in _figures(each):
            yield Row(comparison.name, f"predicted_{metric}", None, predicted, unit, each.name, _PREDICTED)
            yield Row(comparison.name, metric, None, measured, unit, each.name, each.failed or note)
        yield Row(
            comparison.name, "processor_time_s", None, each.processor_s, "s", each.name, each.failed or _ALL_RANKS
        )
    note = f"{len(comparison.measured)} of {len(comparison.outcomes)} candidates ran"
    yield Row(comparison.name, "spearman", None, comparison.correlation, "", "predicted and measured steps", note)
    over = comparison.chosen_over_fastest
    yield Row(comparison.name, "chosen_over_fastest", None, over, "times", "the plan that is chosen", note)


def _figures(outcome: Outcome) -> Iterator[tuple[str, float | None, float | None, str, str]]:
    steps = f"median of {len(outcome.steps_s)} steps, measured here"
    yield "step_time_s", outcome.predicted_s, outcome.measured_s, "s", steps
    yield "peak_memory_bytes", outcome.predicted_memory, outcome.measured_memory, "bytes", _RECORDED
    yield "communication_bytes", outcome.predicted_bytes, outcome.measured_bytes, "bytes", "counted by the ranks"


def cells(outcome: Outcome) -> tuple[str, ...]:
    """An outcome as texts below `HEADINGS`; the chosen plan has a mark."""
    measured = outcome.measured_s
    return (
        f"{outcome.name} ←" if outcome.chosen else outcome.name,
        seconds_text(outcome.predicted_s),
        "failed" if measured is None else seconds_text(measured),
        "–" if measured is None else f"{outcome.predicted_s / measured - 1:+.0%}",
        "–" if outcome.processor_s is None else seconds_text(outcome.processor_s),
        bytes_text(outcome.predicted_memory),
        _bytes(outcome.measured_memory),
        _bytes(outcome.predicted_bytes),
        _bytes(outcome.measured_bytes),
    )


def ordered(comparison: Comparison) -> Iterator[Outcome]:
    """The outcomes, the fastest first, those that failed last."""
    yield from (each for each, _ in comparison.measured)
    yield from (each for each in comparison.outcomes if each.measured_s is None)


def verdict(comparison: Comparison) -> str:
    """The figures of all candidates in one line."""
    correlation, over = comparison.correlation, comparison.chosen_over_fastest
    parts = [
        f"{len(comparison.measured)} of {len(comparison.outcomes)} candidates ran",
        "Spearman –" if correlation is None else f"Spearman {correlation:.3f}",
        "the chosen plan did not run"
        if over is None
        else f"the chosen plan takes {over:.2f} of the fastest one's step",
    ]
    return ", ".join(parts)


def table(comparison: Comparison) -> Iterator[str]:
    """A title, a line a candidate, and what failed."""
    lines = [HEADINGS, *map(cells, ordered(comparison))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    yield f"{comparison.model} on {comparison.ranks} ranks: {verdict(comparison)}"
    for first, *others in lines:
        figures = (text.rjust(width) for text, width in zip(others, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *figures])
    yield from (f"  {each.name}: {each.failed}" for each in comparison.outcomes if each.failed)
    yield ""


def _bytes(size: int | None) -> str:
    return "–" if size is None else bytes_text(size)
