"""The documentation's page of predicted and measured steps, and its picture."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from autopipe.backends.torch.runtime.host import processor_count
from autopipe.cli.bench.fidelity.outcome import Comparison
from autopipe.cli.bench.fidelity.rows import HEADINGS, cells, ordered
from autopipe.cli.bench.fidelity.subjects import BATCH
from autopipe.cli.drawing.svg import PointSeries, scatter_svg
from autopipe.cli.output import write_texts
from autopipe.cli.profile_session import processor

_TEXT = """# All plans that are weighed, predicted and run

Made by `{command}` on {day}: {cores} processors ({processor}), ranks of one
thread, over gloo.

Small models of the zoo train on {batch} samples a step. `auto` weighs plans for four and for eight ranks with what was
measured of this machine right before: operators on one processor beside busy others, messages and collectives between
ranks. Every plan that differs from the others in its program is then run, all in turns. Ranks outnumber processors, so
steps are simulated with processors shared ([how](profile.md#ranks-that-share-processors)).

{summary}

![predicted and measured steps]({picture})

*Measured* is the median step of the slowest rank, *processors* the processor time of a step on all of them: shared
evenly it is what the step takes at least. *Memory* is what the rank that is to need most is to hold at its
peak, *allocated* what torch's allocator gave it, its parameters included. *To move* and *moved* are the bytes of a
step's exchanges, predicted and counted. ← is the plan that is chosen where nothing is named.

{tables}
"""


def write_page(target: Path, command: str, comparisons: Sequence[Comparison]) -> None:
    """Write the page and, beside it, its picture, with what has been measured so far."""
    picture = target.with_suffix(".svg")
    text = _TEXT.format(
        command=command,
        day=datetime.datetime.now(datetime.UTC).date(),
        cores=processor_count(),
        processor=processor(),
        batch=BATCH,
        summary="\n".join(_summary(comparisons)),
        picture=picture.name,
        tables="\n\n".join(map(_table, comparisons)),
    )
    clouds = [
        PointSeries(each.name, tuple((one.predicted_s, step) for one, step in each.measured)) for each in comparisons
    ]
    drawn = scatter_svg("seconds of a step", ("predicted", "measured"), clouds)
    write_texts({target: text, picture: drawn})


def _summary(comparisons: Sequence[Comparison]) -> Iterator[str]:
    yield "| model and ranks | ran | Spearman | chosen over fastest | median off |"
    yield "|---|---:|---:|---:|---:|"
    for each in comparisons:
        offs = [one.predicted_s / step - 1 for one, step in each.measured]
        figures = (
            f"{len(each.measured)} of {len(each.outcomes)}",
            _figure(each.correlation, ".3f"),
            _figure(each.chosen_over_fastest, ".2f"),
            _figure(statistics.median(offs) if offs else None, "+.0%"),
        )
        yield f"| {each.name} | {' | '.join(figures)} |"


def _table(comparison: Comparison) -> str:
    lines = [f"## {comparison.model} on {comparison.ranks} ranks", ""]
    lines += [f"| {' | '.join(HEADINGS)} |", "|---" + "|---:" * (len(HEADINGS) - 1) + "|"]
    lines += [f"| {' | '.join(cells(each))} |" for each in ordered(comparison)]
    lines += ["", *(f"- {each.name}: {each.failed}" for each in comparison.outcomes if each.failed)]
    return "\n".join(lines).rstrip()


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
