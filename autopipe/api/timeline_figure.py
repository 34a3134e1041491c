"""`Picture`: the data of a timeline figure. It has the tasks of a step, or of a schedule of blocks,
as bars on devices over time, with memory, steady state and colours.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

import numpy as np

from autopipe.ir.block_schedule import Block, BlockSchedule
from autopipe.ir.plan import Plan
from autopipe.ir.schedule import Phase, Repetend, Schedule, micro_batch_ratios
from autopipe.ir.timeline import Span, StepEndKind, StepEndSpan, Timeline, Transfer
from autopipe.ir.words import bytes_text, count_text, plural, seconds_text

Curve = tuple[tuple[float, int], ...]
"""Memory of a device over time: pairs (time, memory in use from this time on), ascending by time.
The first time is 0.
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """A task on one of its devices."""

    device: int
    start: float
    end: float
    name: str
    """Full name of the task, for example 2F3."""
    stage: int
    """Stage that determines the colour. Tasks of one stage have one hue."""
    phase: Phase
    unit: int
    """Micro-batch of the task. In a schedule of blocks whose blocks process a group of several
    micro-batches: index of the group.
    """
    letter: str
    """Letter of the phase, as in the name of the task."""

    @property
    def label(self) -> str:
        return f"{self.letter}{self.unit}"


@dataclass(frozen=True, slots=True)
class SteadyState:
    """The time from `start` to `end`, in which every device repeats its tasks `count` times."""

    start: float
    end: float
    count: int
    period: float | None = None
    """Length of one repetition; None if the repetitions take different times."""


@dataclass(frozen=True, slots=True)
class Picture:
    """The data of a figure of a step or of a schedule of blocks. The drawing code treats both
    equally.
    """

    title: str
    bars: tuple[Bar, ...]
    """Sorted by device, then by start."""
    memory: tuple[Curve, ...]
    """One curve per device."""
    limits: tuple[int | None, ...]
    """Memory capacity of each device, or None if it is unknown."""
    end: float
    physical: bool
    """True if times are in seconds and memory is in bytes. Otherwise both are plain numbers in
    units of the user's choice.
    """
    steady: SteadyState | None = None
    transfers: tuple[Transfer, ...] = ()
    devices: tuple[int, ...] = ()
    """The device of each row. Empty if row i shows device i."""
    ends: tuple[StepEndSpan, ...] = ()
    """Gradient sums and updates, sorted by row, then by start."""
    stage_labels: tuple[str, ...] = ()
    """The parts of the model that each stage holds, such as `layers 0–7`; () if they are
    unknown.
    """

    @property
    def peaks(self) -> tuple[int, ...]:
        """Maximum memory in use per device."""
        return tuple(max((used for _, used in curve), default=0) for curve in self.memory)

    @property
    def rows(self) -> list[list[Bar]]:
        found: list[list[Bar]] = [[] for _ in self.memory]
        for bar in self.bars:
            found[bar.device].append(bar)
        return found

    @property
    def end_rows(self) -> list[list[StepEndSpan]]:
        found: list[list[StepEndSpan]] = [[] for _ in self.memory]
        for span in self.ends:
            found[span.device].append(span)
        return found

    @property
    def end_kinds(self) -> tuple[StepEndKind, ...]:
        """The kinds of work at the end of the step (gradient sums, updates) that occur in the
        figure.
        """
        return tuple(kind for kind in StepEndKind if any(span.kind is kind for span in self.ends))

    def device_of(self, row: int) -> int:
        return self.devices[row] if self.devices else row

    def time_text(self, time: float) -> str:
        return seconds_text(time) if self.physical else f"{time:g}"

    def memory_text(self, used: float) -> str:
        return bytes_text(used) if self.physical else f"{used:g}"


def plan_picture(plan: Plan, timeline: Timeline) -> Picture:
    summary = plan.summary
    title = (
        f"{summary.strategy} with {summary.schedule}: {summary.stages} "
        f"{plural(summary.stages, 'stage')} "
        f"on {len(timeline.memory)} {plural(len(timeline.memory), 'device')}, "
        f"{summary.micro_batches} {plural(summary.micro_batches, 'micro-batch')}, "
        f"step {seconds_text(summary.step_time_s)}, "
        f"bubble {summary.bubble_rate:.1%}"
    )
    limits = plan.memory_limits or (None,) * len(timeline.memory)
    turns = micro_batch_ratios(plan.placement, summary.micro_batch_size)
    picture = step_picture(title, plan.schedule, timeline, limits, turns)
    return replace(picture, stage_labels=plan.stage_labels)


def step_picture(
    title: str,
    schedule: Schedule,
    timeline: Timeline,
    limits: tuple[int | None, ...],
    turns: tuple[int, ...] = (),
) -> Picture:
    """Return the figure of a simulated step. `turns` has the number of micro-batches that each
    stage processes per micro-batch of the step, as `micro_batch_ratios` returns it; () stands for 1
    per stage.
    """
    bars = (
        Bar(
            span.device,
            span.start,
            span.end,
            str(task),
            task.stage,
            task.phase,
            task.micro_batch,
            task.phase.value,
        )
        for span in timeline.spans
        for task in (span.task,)
    )
    return Picture(
        title=title,
        bars=tuple(sorted(bars, key=_sort_key_by_device)),
        memory=timeline.memory,
        limits=limits,
        end=timeline.end,
        physical=True,
        steady=steady_state(schedule, timeline, turns),
        transfers=timeline.transfers,
        ends=timeline.ends,
    )


_sort_key_by_device = attrgetter("device", "start", "end")
_REPETITION_TOLERANCE = 1e-2
"""Fraction of a period by which repetitions may differ and still count as equal."""


def steady_state(
    schedule: Schedule, timeline: Timeline, turns: tuple[int, ...] = ()
) -> SteadyState | None:
    """Return the time in which the repetitions of all devices overlap, or None if they do not
    overlap.

    `turns` contains the number of micro-batches of each stage per micro-batch of the step; () if it
    is 1 for all stages. If there is a time of at least two repetitions in which all devices advance
    at the same pace, the result has its period. A short step may have no such time. The result is
    then the time in which each device runs the repeated part of its order, at varying intervals,
    and its period is None.
    """
    devices: list[list[Span]] = [[] for _ in timeline.memory]
    for span in sorted(timeline.spans, key=lambda span: (span.start, span.end)):
        devices[span.device].append(span)
    repeating = [pair for pair in zip(schedule.repetends or (), devices, strict=False) if pair[1]]
    if not repeating or any(repetend.count < 2 for repetend, _ in repeating):
        return None
    starts, ends, periods, paces = zip(
        *(_regular_repetitions(*each, turns) for each in repeating), strict=True
    )
    if max(paces) > 0 and max(paces) - min(paces) <= _REPETITION_TOLERANCE * max(paces):
        start = max(starts)
        period = max(periods)
        count = int((min(ends) - start) / period + _REPETITION_TOLERANCE)
        if count >= 2:
            return SteadyState(start, start + count * period, count, period)
    start = max(spans[repetend.start].start for repetend, spans in repeating)
    end = min(
        spans[repetend.start + repetend.length * repetend.count - 1].end
        for repetend, spans in repeating
    )
    return (
        SteadyState(start, end, min(repetend.count for repetend, _ in repeating))
        if start < end
        else None
    )


def _regular_repetitions(
    repetend: Repetend, spans: list[Span], turns: tuple[int, ...]
) -> tuple[float, float, float, float]:
    """Return (start, end, period, pace) of the longest time in which the repetitions of one device
    start at equal intervals.

    The pace is the period divided by the number of micro-batches of the step that a repetition
    advances. `turns` contains the number of micro-batches of each stage per micro-batch of the
    step; () if it is 1 for all stages.
    """
    body = spans[repetend.start : repetend.start + repetend.length * repetend.count]
    starts = np.array([span.start for span in body]).reshape(repetend.count, repetend.length)
    steps = np.diff(starts, axis=0)
    best = (0, 0)
    first = 0
    for row in range(len(steps)):
        around = steps[first : row + 1]
        if np.ptp(around) > _REPETITION_TOLERANCE * max(float(around.max()), 0.0):
            first = row
        if row + 1 - first > best[1] - best[0]:
            best = (first, row + 1)
    period = float(steps[best[0] : best[1]].mean())
    start = float(starts[best[0], 0])
    stride = repetend.stride / (turns[body[0].task.stage] if turns else 1)
    return start, start + period * (best[1] - best[0] + 1), period, period / stride


def block_picture(schedule: BlockSchedule, title: str) -> Picture:
    """Return the figure of a schedule of blocks. A block on several devices has a bar in the row of
    each device. The name of a block determines its colour: F0 and B0 are two phases of one stage,
    as are TPf and TPb.
    """
    kinds = block_kinds(schedule.graph.blocks)
    bars = (
        Bar(
            device,
            start,
            start + block.time,
            f"{block.name}·{unit}",
            *kinds[index][:2],
            unit,
            kinds[index][2],
        )
        for unit, starts in enumerate(schedule.starts)
        for index, (start, block) in enumerate(zip(starts, schedule.graph.blocks, strict=True))
        for device in block.devices
    )
    return Picture(
        title=title,
        bars=tuple(sorted(bars, key=_sort_key_by_device)),
        memory=_memory_curves(schedule),
        limits=schedule.graph.memory,
        end=schedule.makespan,
        physical=False,
        steady=_steady_state_of_blocks(schedule),
    )


def block_kinds(blocks: tuple[Block, ...]) -> tuple[tuple[int, Phase, str], ...]:
    """Return (stage, phase, letter of the phase) per block, derived from the names of the blocks.

    Two blocks belong to one stage if the name of one becomes the name of the other when its B, I or
    W (or b, i or w) is replaced
    with F (or f). A block whose name has an F (or f) is a forward. Any other block is a stage of
    its own: a backward if it frees memory, otherwise a forward.
    """
    names = {block.name for block in blocks}
    stages: dict[str, int] = {}
    found = []
    for block in blocks:
        stem = block.name
        phase = Phase.BACKWARD if block.memory < 0 else Phase.FORWARD
        letter = phase.value
        for place, each in enumerate(block.name):
            forward = (
                block.name[:place] + ("F" if each.isupper() else "f") + block.name[place + 1 :]
            )
            if each in "FBIWfbiw" and forward in names:
                stem = forward
                phase = Phase(each.upper())
                letter = each
                break
        found.append((stages.setdefault(stem, len(stages)), phase, letter))
    return tuple(found)


def _memory_curves(schedule: BlockSchedule) -> tuple[Curve, ...]:
    """Return the memory of each device over time. A block changes the memory at its start. Blocks
    of a device that start at one time are added up in their order.
    """
    curves = []
    for tasks in schedule.tasks:
        curve: list[tuple[float, int]] = [(0, 0)]
        for start, _, index in tasks:
            used = curve[-1][1] + schedule.graph.blocks[index].memory
            if curve[-1][0] == start:
                curve[-1] = (start, used)
            elif curve[-1][1] != used:
                curve.append((start, used))
        curves.append(tuple(curve))
    return tuple(curves)


def _steady_state_of_blocks(schedule: BlockSchedule) -> SteadyState | None:
    """Return the longest sequence of repetitions that equal the repetend, the repeated part of the
    schedule. Repetition r contains block i of the micro-batch r + offset of i. The first and the
    last repetitions may differ from the repetend, because their blocks start as early as possible.
    None if there is no such sequence.
    """
    repetend = schedule.repetend
    period = schedule.period
    if repetend is None or period is None:
        return None
    offsets = np.array(repetend.offsets) - min(repetend.offsets)
    count = schedule.units - int(offsets.max())
    if count < 1:
        return None
    units = np.arange(count)[:, None] + offsets
    begins = np.array(schedule.starts)[units, np.arange(len(offsets))] - np.array(repetend.starts)
    regular = (begins == begins[:, :1]).all(axis=1)
    # Consecutive repetitions that start exactly one period apart have equal delays. So a run of
    # equal delays is a steady state.
    delays = begins[:, 0] - period * np.arange(count)
    runs = groupby(range(count), key=lambda row: (regular[row], delays[row]))
    longest = max((list(rows) for (whole, _), rows in runs if whole), key=len, default=[])
    if not longest:
        return None
    start = int(begins[longest[0], 0]) + min(repetend.starts)
    return SteadyState(start, start + len(longest) * period, len(longest), period)


MOST_DEVICES = 16
"""Maximum number of devices per step that are all drawn if several steps are drawn."""


def one_device_per_group(picture: Picture) -> Picture:
    """Return a figure with one device of each group of devices that run the same tasks in the same
    order. A figure of at most `MOST_DEVICES` devices is returned unchanged. Only messages between
    the drawn devices are kept.
    """
    if len(picture.memory) <= MOST_DEVICES:
        return picture
    first: dict[tuple[str, ...], int] = {}
    for device, bars in enumerate(picture.rows):
        first.setdefault(tuple(bar.name for bar in bars), device)
    row = {device: index for index, device in enumerate(first.values())}
    return replace(
        picture,
        bars=tuple(
            replace(bar, device=row[bar.device]) for bar in picture.bars if bar.device in row
        ),
        memory=tuple(picture.memory[device] for device in row),
        limits=tuple(picture.limits[device] for device in row),
        transfers=tuple(
            replace(each, source=row[each.source], target=row[each.target])
            for each in picture.transfers
            if each.source in row and each.target in row
        ),
        devices=tuple(row),
        ends=tuple(
            replace(span, device=row[span.device]) for span in picture.ends if span.device in row
        ),
    )


_HUES = (213, 79, 183, 53, 246, 138, 316, 4, 29, 30)
_SATURATIONS = (0.72, 0.45, 0.48, 0.60, 0.62, 0.42, 0.58, 0.70, 0.82, 0.28)
"""Saturations by stage. Their order lets neighbouring stages differ for people with red-green
colour blindness, too.
"""
_LIGHTNESS = {
    Phase.FORWARD: 0.76,
    Phase.BACKWARD: 0.40,
    Phase.INPUT_GRADIENT: 0.56,
    Phase.WEIGHT_GRADIENT: 0.30,
}
_LIGHTER = 0.03
"""Amount by which the tasks of a stage differ from the lightness of their phase (`_LIGHTNESS`):
even stages are lighter, odd stages darker.
"""


def stage_colour(stage: int, phase: Phase) -> str:
    """Return the colour of a stage's tasks as `#rrggbb`. The hues repeat after ten stages.

    Forwards are light and backwards dark. If a backward is split, its input gradient is lighter
    than a full backward, and its weight gradient is darker and greyer.
    """
    saturation = _SATURATIONS[stage % len(_HUES)] * (0.6 if phase is Phase.WEIGHT_GRADIENT else 1.0)
    lightness = _LIGHTNESS[phase] + (-_LIGHTER if stage % 2 else _LIGHTER)
    parts = colorsys.hls_to_rgb(_HUES[stage % len(_HUES)] / 360, lightness, saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


@dataclass(frozen=True, slots=True)
class EndStyle:
    """Style of the work at the end of a step. Its colours are greys, which no stage has."""

    letter: str
    fill: str
    ink: str
    """Text colour on `fill`."""


END_STYLES = {
    StepEndKind.GRADIENT_SUM: EndStyle("G", "#aab2bd", "#10131a"),
    StepEndKind.UPDATE: EndStyle("U", "#59636e", "#ffffff"),
}
PHASE_NAMES = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.INPUT_GRADIENT: "gradients of inputs",
    Phase.WEIGHT_GRADIENT: "gradients of weights",
}
"""Names of the phases in the legend."""
MOST_STAGES = 32
"""Maximum number of stages in a legend. The hues repeat after fewer stages."""


@dataclass(frozen=True, slots=True)
class Legend:
    """The phases, kinds of work and stages that occur in some figures."""

    phases: tuple[tuple[str, Phase], ...]
    """Pairs of a letter and its phase."""
    ends: tuple[StepEndKind, ...]
    stages: tuple[int, ...]
    stage_labels: tuple[str, ...] = ()
    """The parts of the model that each stage holds; () if they are unknown or differ between the
    figures.
    """

    @property
    def entries(self) -> list[tuple[str, str]]:
        """(colour, text) of each phase, of the work at the end of the step, and of at most
        `MOST_STAGES` stages. The phases have the colours of the first stage.
        """
        first = self.stages[0] if self.stages else 0
        phases = [
            (stage_colour(first, phase), f"{letter} {PHASE_NAMES[phase]}")
            for letter, phase in self.phases
        ]
        ends = [
            (END_STYLES[kind].fill, f"{END_STYLES[kind].letter} {kind.value}") for kind in self.ends
        ]
        shown = self.stages[:MOST_STAGES]
        return [
            *phases,
            *ends,
            *((stage_colour(stage, Phase.FORWARD), self._stage_text(stage)) for stage in shown),
        ]

    def _stage_text(self, stage: int) -> str:
        """Return the text of a stage, with the parts of the model that it holds if they are
        known.
        """
        label = self.stage_labels[stage] if self.stage_labels else ""
        return f"stage {stage}: {label}" if label else f"stage {stage}"

    @property
    def more(self) -> str:
        """Text with the number of omitted stages, or "" if there are none."""
        left_out = len(self.stages) - MOST_STAGES
        return f"and {count_text(left_out, 'more stage')}" if left_out > 0 else ""


def legend_of(pictures: Sequence[Picture]) -> Legend:
    """Return the legend of the phases, kinds of work and stages in the figures."""
    bars = [bar for picture in pictures for bar in picture.bars]
    letters = {bar.phase: bar.letter for bar in reversed(bars)}
    kinds = {kind for picture in pictures for kind in picture.end_kinds}
    return Legend(
        tuple((letters[phase], phase) for phase in PHASE_NAMES if phase in letters),
        tuple(kind for kind in StepEndKind if kind in kinds),
        tuple(sorted({bar.stage for bar in bars})),
        pictures[0].stage_labels if len({each.stage_labels for each in pictures}) == 1 else (),
    )


def text_colour(phase: Phase) -> str:
    """Return a text colour that is legible on the `stage_colour` of the phase."""
    return "#10131a" if phase in (Phase.FORWARD, Phase.INPUT_GRADIENT) else "#ffffff"
