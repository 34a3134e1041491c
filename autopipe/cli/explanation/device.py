"""Report of a device's step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table

from autopipe.cli.figures import bytes_text, seconds_text
from autopipe.ir.plan import Plan
from autopipe.passes.explain import DeviceReport

_MOST_WAITS = 8
_LEAST_S = 1e-12
"""Less is rounding of floats."""


@dataclass(frozen=True, slots=True)
class DeviceExplanation:
    """The explanation of a device's step."""

    plan: Plan
    kind: str
    """The product that it is."""
    report: DeviceReport

    def screen(self) -> Iterator[RenderableType]:
        """Lines for the terminal."""
        report, step_s = self.report, self.plan.summary.step_time_s
        stages = f"stage{'s' if len(report.stages) > 1 else ''} {', '.join(map(str, report.stages))}"
        yield f"device {report.device}, {self.kind}: {stages if report.stages else 'no stage'}"
        limit = self.plan.memory_limits[report.device]
        yield (
            f"memory: at most {bytes_text(report.peak_bytes)} of {bytes_text(limit)},"
            f" {bytes_text(report.static_bytes)} of it all through the step"
        )
        yield f"busy {report.busy_s / step_s if step_s else 0.0:.1%} of the step of {seconds_text(step_s)}:"
        table = Table("does", "tasks", "seconds", "of the step", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for name, count, seconds in self._rows():
            if seconds > _LEAST_S:
                table.add_row(name, count, seconds_text(seconds), f"{seconds / step_s:.1%}" if step_s else "-")
        yield table

    def data(self) -> dict[str, object]:
        """The same for a program."""
        return {
            "device": self.report,
            "kind": self.kind,
            "busy_s": self.report.busy_s,
            "step_time_s": self.plan.summary.step_time_s,
            "memory_limit_bytes": self.plan.memory_limits[self.report.device],
        }

    def _rows(self) -> Iterator[tuple[str, str, float]]:
        """(what, how often, seconds), all of which add up to the step."""
        report = self.report
        words = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
        for task, count, seconds in report.tasks:
            yield f"{words[task[-1]]} of stage {task[:-1]}", str(count), seconds
        yield "sums gradients", "", report.gradients_s
        yield "updates parameters", "", report.update_s
        for device, seconds in report.waits[:_MOST_WAITS]:
            yield f"waits for device {device}", "", seconds
        if report.waits[_MOST_WAITS:]:
            yield "waits for other devices", "", sum(seconds for _, seconds in report.waits[_MOST_WAITS:])
        yield "waits for messages on their way", "", report.messages_s
        yield "waits at the end", "", report.end_s
