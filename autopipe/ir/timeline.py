"""A simulated or measured step over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autopipe.ir.lanes import Lanes
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


Links = tuple[tuple[tuple[int, int], ...], ...]
"""Pairs of devices by what they exchange: all pairs of one entry exchange the same at the same time."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step. `memory[d]` holds (time, bytes in use from then on) for device d, ascending, the first at 0.

    `static_memory[d]` is the part of it that never changes: parameters, gradients, optimizer state. `end` counts the
    gradient all-reduce and the update.

    Of devices that do the same at the same time only the first one's spans are held, and of links between them only the
    first one's transfers: a step of thousands of devices has millions.
    """

    own_spans: tuple[Span, ...]
    """The spans of the first device of each lane, by device, then by start."""
    own_transfers: tuple[Transfer, ...]
    """The transfers of the first pair of each of `links`, in either direction."""
    memory: tuple[tuple[tuple[float, int], ...], ...]
    static_memory: tuple[int, ...]
    end: float
    lanes: Lanes = ()
    """Devices that do the same; () where each is held for itself."""
    links: Links = ()
    """Pairs that exchange the same; () where each is held for itself."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """The tasks of all devices, by device, then by start."""
        if len(self.lanes) in (0, len(self.memory)):
            return self.own_spans
        of_lane: dict[int, list[Span]] = {}
        for span in self.own_spans:
            of_lane.setdefault(span.device, []).append(span)
        firsts = {device: devices[0] for devices in self.lanes for device in devices}
        return tuple(
            span if span.device == device else Span(device, span.task, span.start, span.end)
            for device in sorted(firsts)
            for span in of_lane.get(firsts[device], ())
        )

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The messages between all pairs of devices; those that go at once stand together."""
        return tuple(self._all_transfers()) if self.links else self.own_transfers

    def _all_transfers(self) -> Iterator[Transfer]:
        pairs = {ends: alike for alike in self.links for ends in (alike[0], alike[0][::-1])}
        for each in self.own_transfers:
            alike = pairs[each.source, each.target]
            for ends in alike:
                source, target = ends if (each.source, each.target) == alike[0] else ends[::-1]
                yield Transfer(source, target, each.task, each.bytes, each.start, each.end)

    @property
    def peak_memory(self) -> tuple[int, ...]:
        """Most bytes in use, a device each."""
        # Devices that do the same share a curve.
        peaks = {id(curve): max((used for _, used in curve), default=0) for curve in self._curves()}
        return tuple(peaks[id(curve)] for curve in self.memory)

    def _curves(self) -> Iterable[tuple[tuple[float, int], ...]]:
        """The curves of memory, each once."""
        return {id(curve): curve for curve in self.memory}.values()

    @property
    def bubble_rate(self) -> float:
        """Share of the devices' time in which they compute nothing."""
        count = {devices[0]: len(devices) for devices in self.lanes}
        busy = sum((span.end - span.start) * count.get(span.device, 1) for span in self.own_spans)
        return 1.0 - busy / (len(self.memory) * self.end) if self.end else 0.0
