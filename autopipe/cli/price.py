"""Comparison of a plan with the one that it was made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table

from autopipe.cli.figures import bytes_text, seconds_text
from autopipe.cli.former import BasePlan
from autopipe.ir.plan import Plan
from autopipe.ir.plan_file import plan_digest, summary_form

_SAME = 5e-4
"""Relative changes below this are none to a reader."""


@dataclass(frozen=True, slots=True)
class PlanDelta:
    """A plan, and the one that its folder held before."""

    former: BasePlan
    now: Plan

    @property
    def same(self) -> bool:
        """True if the decisions and their predictions are equal."""
        return plan_digest(self.former.plan) == plan_digest(self.now)

    @property
    def slowdown(self) -> float:
        """How many samples the former plan takes while this one takes one: above 1 where this one is worse."""
        before, now = self.former.plan.summary.samples_per_s, self.now.summary.samples_per_s
        return before / now if now else 1.0

    def lines(self) -> Iterator[RenderableType]:
        """The figures before and after, and whether that is worse."""
        if self.same:
            yield f"the same plan as {self.former.folder} held"
            return
        before, now = self.former.plan.summary, self.now.summary
        table = Table("", "before", "now", "change", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        times, rates = (before.step_time_s, now.step_time_s), (before.samples_per_s, now.samples_per_s)
        peaks, bubbles = (before.peak_memory_bytes, now.peak_memory_bytes), (before.bubble_rate, now.bubble_rate)
        table.add_row("step", *map(seconds_text, times), _share(*times))
        table.add_row("samples/s", *(f"{rate:,.1f}" for rate in rates), _share(*rates))
        table.add_row("bubble", *(f"{rate:.1%}" for rate in bubbles), f"{100 * (bubbles[1] - bubbles[0]):+.1f} points")
        table.add_row("peak memory", *map(bytes_text, map(max, peaks)), _share(*map(max, peaks)))
        yield table
        yield f"{self._verdict()} what {self.former.folder} held"

    def form(self) -> dict[str, object]:
        """The same for a program."""
        before = summary_form(self.former.plan.summary)
        return {"plan": self.former.folder, "same": self.same, "worse": self.slowdown > 1, "before": before}

    def _verdict(self) -> str:
        ratio = self.slowdown
        if abs(ratio - 1) < _SAME:
            return "neither better nor worse than"
        if self.former.plan.batch_size != self.now.batch_size:
            how = f"{1 - 1 / ratio:.1%} fewer" if ratio > 1 else f"{1 / ratio - 1:.1%} more"
            return f"{'worse' if ratio > 1 else 'better'}: {how} samples a second than"
        if ratio > 1:
            return f"worse: a step takes {ratio - 1:.1%} longer than"
        return f"better: a step takes {1 - ratio:.1%} less than"


def _share(before: float, now: float) -> str:
    return f"{now / before - 1:+.1%}" if before else "-"
