"""Plans side by side: their figures, and what of a step goes where."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopipe.cli.figures import bytes_text, seconds_text
from autopipe.cli.plan_folder import open_prediction
from autopipe.ir.plan import Breakdown, Plan
from autopipe.ir.timeline import Timeline


@dataclass(frozen=True, slots=True)
class ComparedPlan:
    """A plan, the folder it is in and the step that its predictions make."""

    folder: Path
    plan: Plan
    timeline: Timeline

    @staticmethod
    def open(folder: Path) -> ComparedPlan:
        """The plan in `folder`; its model is not read. Raises as `open_prediction` does."""
        return ComparedPlan(folder, *open_prediction(folder))


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """A figure of each plan, and which plans' are the best, where they differ and one is better than another."""

    name: str
    texts: tuple[str, ...]
    best: frozenset[int] = frozenset()


def speedup(first: Plan, plan: Plan) -> float | None:
    """How many samples a plan takes while the first takes one."""
    return plan.summary.samples_per_s / first.summary.samples_per_s if first.summary.samples_per_s else None


def figure_rows(plans: Sequence[Plan]) -> Iterator[ComparisonRow]:
    """Decisions and predictions of the plans, a row each; per device too where numbers of devices differ."""
    summaries = [plan.summary for plan in plans]
    yield ComparisonRow("strategy", tuple(each.strategy for each in summaries))
    yield ComparisonRow("schedule", tuple(each.schedule for each in summaries))
    yield ComparisonRow("devices", tuple(str(each.devices) for each in summaries))
    yield ComparisonRow("stages", tuple(str(each.stages) for each in summaries))
    yield ComparisonRow("depth", tuple(str(each.depth) for each in summaries))
    yield ComparisonRow(
        "micro-batches", tuple(f"{each.micro_batches} of {each.micro_batch_size}" for each in summaries)
    )
    times = [each.step_time_s for each in summaries]
    equal = len({plan.batch_size for plan in plans}) == 1
    yield _row("step", times, seconds_text, times if equal else None)
    ratios = [speedup(plans[0], plan) for plan in plans]
    yield ComparisonRow("speed-up", tuple("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios))
    rates = [each.samples_per_s for each in summaries]
    yield _row("samples/s", rates, "{:,.1f}".format, [-rate for rate in rates])
    if len({each.devices for each in summaries}) > 1:
        shares = [each.samples_per_s / each.devices for each in summaries]
        yield _row("samples/s a device", shares, "{:,.1f}".format, [-share for share in shares])
    bubbles = [each.bubble_rate for each in summaries]
    yield _row("bubble", bubbles, "{:.1%}".format, bubbles)
    peaks = [float(max(each.peak_memory_bytes)) for each in summaries]
    yield _row("peak memory", peaks, bytes_text, peaks)
    yield ComparisonRow("exchanged", tuple(_exchanged(plan) for plan in plans))
    yield ComparisonRow("at best", tuple(seconds_text(each.lower_bound_s) for each in summaries))
    searches = [sum(seconds for _, seconds in each.search_time_s) for each in summaries]
    yield ComparisonRow("search", tuple(map(seconds_text, searches)))


def breakdown_rows(plans: Sequence[Plan]) -> Iterator[ComparisonRow]:
    """Seconds of a step by what they go to, on average over the devices; nothing where no plan says."""
    parts = [None if plan.breakdown is None else dict(parts_of(plan.breakdown)) for plan in plans]
    if not any(parts):
        return
    for name in PARTS:
        values = [None if each is None else each[name] for each in parts]
        if any(value is not None and abs(value) >= _LEAST_S for value in values):
            yield ComparisonRow(name, tuple(map(_part_text, values)))


_LEAST_S = 5e-10
"""Less than this is what rounding leaves."""

PARTS = tuple(field.name.removesuffix("_s") for field in dataclasses.fields(Breakdown))
"""Parts of a step's seconds, the ideal first."""


def parts_of(breakdown: Breakdown) -> tuple[tuple[str, float], ...]:
    """Seconds by name, in the order of `PARTS`; their sum is the step."""
    return tuple((name, getattr(breakdown, f"{name}_s")) for name in PARTS)


def _part_text(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return seconds_text(seconds) if abs(seconds) >= _LEAST_S else "0"


def _row(
    name: str, values: Sequence[float], text: Callable[[float], str], order: Sequence[float] | None
) -> ComparisonRow:
    """A row whose best is the least by `order`, and all that read the same."""
    texts = tuple(map(text, values))
    if order is None or len(set(texts)) == 1:
        return ComparisonRow(name, texts)
    least = texts[min(range(len(order)), key=order.__getitem__)]
    return ComparisonRow(name, texts, frozenset(place for place, each in enumerate(texts) if each == least))


def _exchanged(plan: Plan) -> str:
    moved = plan.summary.communication_bytes
    return "unknown" if moved is None else bytes_text(sum(size for _, size in moved))
