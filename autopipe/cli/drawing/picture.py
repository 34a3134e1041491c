"""A picture: bars on devices over time, and the memory below them."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.cli.drawing.steady import SteadyState, steady_state
from autopipe.cli.figures import bytes_text, seconds_text
from autopipe.ir.plan import Plan
from autopipe.ir.schedule import Phase, Schedule, micro_batch_ratios
from autopipe.ir.timeline import Span, Timeline, Transfer

Curve = tuple[tuple[float, int], ...]
"""(time, memory in use from then on), ascending, the first at 0."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One task on one of its devices."""

    device: int
    start: float
    end: float
    name: str
    """The task in full, such as 2F3."""
    stage: int
    """Stage that sets its colour: tasks of one stage share a hue."""
    phase: Phase
    unit: int
    """Its micro-batch, or its unit of several."""
    letter: str
    """The phase as the task's name spells it."""

    @property
    def label(self) -> str:
        """Phase and micro-batch, for where the stage is plain or there is no room."""
        return f"{self.letter}{self.unit}"


@dataclass(frozen=True, slots=True)
class Picture:
    """A step, or a schedule of blocks, ready to be drawn: both look the same from here on."""

    title: str
    bars: tuple[Bar, ...]
    """By device, then by start."""
    memory: tuple[Curve, ...]
    """One curve a device."""
    limits: tuple[int | None, ...]
    """Room on each device, where it is known."""
    end: float
    physical: bool
    """True if times are seconds and memory bytes; else both are plain numbers in units of the user's choice."""
    steady: SteadyState | None = None
    transfers: tuple[Transfer, ...] = ()
    devices: tuple[int, ...] = ()
    """The device of each row, where rows are not all devices in order."""

    @property
    def peaks(self) -> tuple[int, ...]:
        """Most memory in use, a device each."""
        return tuple(max((used for _, used in curve), default=0) for curve in self.memory)

    @property
    def rows(self) -> list[list[Bar]]:
        """Each device's bars in order of time."""
        found: list[list[Bar]] = [[] for _ in self.memory]
        for bar in self.bars:
            found[bar.device].append(bar)
        return found

    def device_of(self, row: int) -> int:
        """The device that a row is."""
        return self.devices[row] if self.devices else row

    def time_text(self, time: float) -> str:
        """A time as a person reads it."""
        return seconds_text(time) if self.physical else f"{time:g}"

    def memory_text(self, used: float) -> str:
        """Memory as a person reads it."""
        return bytes_text(used) if self.physical else f"{used:g}"


def plan_picture(plan: Plan, timeline: Timeline) -> Picture:
    """The picture of a plan's simulated step."""
    summary = plan.summary
    title = (
        f"{summary.strategy} with {summary.schedule}: {summary.stages} stages on {len(timeline.memory)} devices, "
        f"{summary.micro_batches} micro-batches, step {seconds_text(summary.step_time_s)}, "
        f"bubble {summary.bubble_rate:.1%}"
    )
    limits = plan.memory_limits or (None,) * len(timeline.memory)
    return step_picture(
        title, plan.schedule, timeline, limits, micro_batch_ratios(plan.placement, summary.micro_batch_size)
    )


def step_picture(
    title: str, schedule: Schedule, timeline: Timeline, limits: tuple[int | None, ...], turns: tuple[int, ...] = ()
) -> Picture:
    """The picture of a simulated step; `turns` as `StageGraph` has them."""
    return Picture(
        title=title,
        bars=tuple(sorted(map(_bar, timeline.spans), key=lambda bar: (bar.device, bar.start, bar.end))),
        memory=timeline.memory,
        limits=limits,
        end=timeline.end,
        physical=True,
        steady=steady_state(schedule, timeline, turns),
        transfers=timeline.transfers,
    )


def _bar(span: Span) -> Bar:
    task, letter = span.task, span.task.phase.value
    return Bar(span.device, span.start, span.end, str(task), task.stage, task.phase, task.micro_batch, letter)
