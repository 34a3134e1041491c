"""What a simulated or measured step looks like over time."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.ir.schedule import Task


@dataclass(frozen=True, slots=True)
class Span:
    """A task on a device, in seconds from the start of the step."""

    device: int
    task: Task
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message between two devices: the values that a stage sends to another for one micro-batch.

    `task` is the one that sends: a forward sends activations, a backward gradients.
    """

    source: int
    target: int
    task: Task
    bytes: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step. `memory[d]` holds (time, bytes in use from then on) for device d, ascending, the first at 0.

    `static_memory[d]` is the part of it that never changes: parameters, gradients, optimizer state. `end` counts the
    gradient all-reduce and the update.
    """

    spans: tuple[Span, ...]
    transfers: tuple[Transfer, ...]
    memory: tuple[tuple[tuple[float, int], ...], ...]
    static_memory: tuple[int, ...]
    end: float

    @property
    def peak_memory(self) -> tuple[int, ...]:
        """Most bytes in use, a device each."""
        return tuple(max((used for _, used in curve), default=0) for curve in self.memory)

    @property
    def bubble_rate(self) -> float:
        """Share of the devices' time in which they compute nothing."""
        busy = sum(span.end - span.start for span in self.spans)
        return 1.0 - busy / (len(self.memory) * self.end) if self.end else 0.0
