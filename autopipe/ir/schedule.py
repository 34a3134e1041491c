"""When each device runs which stage on which micro-batch: the decision a scheduler makes."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopipe.ir.errors import ConfigurationError, InfeasibleError

if TYPE_CHECKING:
    from autopipe.ir.stage_graph import StageGraph


class Phase(enum.Enum):
    """Phase of a task: a forward, a whole backward, or the two halves of a split backward."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"

    # Members are equal only to themselves. Tasks are hashed by the million, and Enum's own hash is written in Python.
    __hash__ = object.__hash__


_TASK = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True, slots=True, order=False)
class Task:
    """One phase of one stage on one of the stage's micro-batches, printed and parsed as `2F0`."""

    stage: int
    phase: Phase
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase.value}{self.micro_batch}"

    @staticmethod
    def parse(text: str) -> Task:
        """The task that `text` spells. Raises ConfigurationError."""
        match = _TASK.fullmatch(text)
        if match is None:
            raise ConfigurationError(
                f"{text!r} is not a task", hint="tasks are written like 2F0: stage, phase, micro-batch"
            )
        return Task(int(match[1]), Phase(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Repetend:
    """The part of a device's list that repeats, each time with all micro-batch indices one `stride` further."""

    start: int
    """Index of its first task in the device's list."""
    length: int
    """Tasks of one repetition; 0 where the device has none."""
    count: int
    """How often it stands in the list."""
    stride: int = 1
    """Micro-batches, of the stages' own, that one repetition advances by."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Quality of a schedule for its placement, as its search proved it."""

    order: str
    """Name of the schedule whose order it is: the searched one's own, or a published one that was no worse."""
    lower_bound: float
    """No period is shorter, in the period's own units (no step, where the schedule has no period)."""
    optimal: bool
    """True if the period (the step, where there is none) is proven to be the least, but for `rounding`."""
    rounding: float = 0.0
    """Share of the period by which the search may have overstated it, by rounding times to whole numbers."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """For each device the tasks it runs, in order. A task of a stage on several devices is in each one's list.

    `micro_batches` are the step's: of these a stage may run several of its own for one (`StageGraph.turns`).

    `repetends`, where known, marks the steady state of each device's list. `period` is the simulated length of one
    repetition in seconds or in the scheduler's own units, and `proof` what a search proved of it.
    """

    micro_batches: int
    tasks: tuple[tuple[Task, ...], ...]
    repetends: tuple[Repetend, ...] | None = None
    period: float | None = None
    proof: Proof | None = None

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.tasks)

    def has_orders_of(self, other: Schedule) -> bool:
        """True if each device runs the same tasks in the same order."""
        # Devices of a group mostly have one list.
        pairs = {(id(own), id(its)): (own, its) for own, its in zip(self.tasks, other.tasks, strict=False)}
        same = (self.micro_batches, self.devices) == (other.micro_batches, other.devices)
        return same and all(own == its for own, its in pairs.values())

    def grid(self) -> str:
        """The order as text, one line a device."""
        orders = {id(order): order for order in self.tasks}  # Devices of a group mostly have one.
        texts = {number: " ".join(map(str, order)) for number, order in orders.items()}
        return "\n".join(f"{device}: {texts[id(order)]}" for device, order in enumerate(self.tasks))

    def verify(self, graph: StageGraph, train: bool) -> None:
        """Raise InfeasibleError, with the grid and the offending cell marked, unless the schedule can run.

        Every stage runs each phase of each of its pipeline's micro-batches once on each of its devices; and some
        execution respects every device's order, F before F along the graph's edges, backwards against them, and F
        before B (I before W) of a stage: between stages of tasks that have samples in common.
        """
        from autopipe.ir.ordering import check_order

        check_order(self, graph, train)


def marked_grid(schedule: Schedule, device: int, position: int) -> str:
    """The grid with one cell in brackets."""
    lines = []
    for index, order in enumerate(schedule.tasks):
        cells = [f"[{task}]" if (index, place) == (device, position) else str(task) for place, task in enumerate(order)]
        lines.append(f"{index}: {' '.join(cells)}")
    return "\n".join(lines)


class WrongScheduleError(InfeasibleError):
    """A schedule that cannot run, with the cell that shows it; the message is the reason and the grid."""

    def __init__(self, schedule: Schedule, device: int, position: int, reason: str) -> None:
        super().__init__(f"{reason}\n{marked_grid(schedule, device, position)}", where=f"device {device}")
        self.device, self.position, self.reason = device, position, reason
