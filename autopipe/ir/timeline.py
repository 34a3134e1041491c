"""A simulated or measured step over time, and the predicted times of stages and messages that it is
simulated from.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Annotated

from autopipe.ir.codec import Amount, Index, Inline, OmitDefault, Row
from autopipe.ir.schedule import EVERY, Lanes, MicroBatchSlice, Phase, Task


@dataclass(frozen=True, slots=True)
class Span:
    """A task on a device, in seconds from the start of the step."""

    device: int
    task: Task
    start: float
    end: float


class EndKind(enum.Enum):
    """Work at the end of a step that trains."""

    GRADIENT_SUM = "gradient sum"
    """Gradients of a stage are summed over its devices."""
    UPDATE = "update"
    """The optimizer updates the parameters of all stages of a device."""


@dataclass(frozen=True, slots=True)
class EndSpan:
    """Work of a device after its last task, in seconds from the start of the step."""

    device: int
    kind: EndKind
    stage: int | None
    """None for an update, which is of all stages of the device."""
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
"""Pairs of devices by what they exchange: all pairs of one entry exchange the same at the same
time.
"""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step. `memory[d]` holds (time, bytes in use from then on) for device d, ascending, the
    first at 0.

    `static_memory[d]` is the part of it that never changes: parameters, gradients, optimizer state.
    `end` counts the gradient all-reduce and the update.

    Of devices that do the same at the same time only the first one's spans are held, and of links
    between them only the first one's transfers: a step of thousands of devices has millions.
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
    own_ends: tuple[EndSpan, ...] = ()
    """Gradient sums and updates of the first device of each lane, by device, then by start."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """The tasks of all devices, by device, then by start."""
        if len(self.lanes) in (0, len(self.memory)):
            return self.own_spans
        of_lane: dict[int, list[Span]] = {}
        for span in self.own_spans:
            of_lane.setdefault(span.device, []).append(span)
        firsts = self._firsts
        return tuple(
            span if span.device == device else Span(device, span.task, span.start, span.end)
            for device in sorted(firsts)
            for span in of_lane.get(firsts[device], ())
        )

    @property
    def ends(self) -> tuple[EndSpan, ...]:
        """Return the gradient sums and updates of all devices, by device, then by start."""
        if len(self.lanes) in (0, len(self.memory)):
            return self.own_ends
        of_lane: dict[int, list[EndSpan]] = {}
        for span in self.own_ends:
            of_lane.setdefault(span.device, []).append(span)
        firsts = self._firsts
        return tuple(
            replace(span, device=device)
            for device in sorted(firsts)
            for span in of_lane.get(firsts[device], ())
        )

    @property
    def _firsts(self) -> dict[int, int]:
        """The first device of each device's lane."""
        return {device: devices[0] for devices in self.lanes for device in devices}

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The messages between all pairs of devices; those that go at once stand together."""
        if not self.links:
            return self.own_transfers
        pairs = {ends: equal for equal in self.links for ends in (equal[0], equal[0][::-1])}
        found = []
        for each in self.own_transfers:
            equal = pairs[each.source, each.target]
            turned = (each.source, each.target) != equal[0]
            for first, second in equal:
                source, target = (second, first) if turned else (first, second)
                found.append(Transfer(source, target, each.task, each.bytes, each.start, each.end))
        return tuple(found)

    @property
    def peak_memory(self) -> tuple[int, ...]:
        # Devices that do the same share a curve.
        curves = {id(curve): curve for curve in self.memory}
        peaks = {key: max((used for _, used in curve), default=0) for key, curve in curves.items()}
        return tuple(peaks[id(curve)] for curve in self.memory)

    @property
    def bubble_rate(self) -> float:
        """Share of the devices' time in which they compute nothing."""
        count = {devices[0]: len(devices) for devices in self.lanes}
        busy = sum((span.end - span.start) * count.get(span.device, 1) for span in self.own_spans)
        return 1.0 - busy / (len(self.memory) * self.end) if self.end else 0.0


@dataclass(frozen=True, slots=True)
class TaskSeconds:
    """Seconds that a stage's tasks take for one micro-batch, on the host alone or on the device
    alone.
    """

    forward_s: Amount
    backward_s: Amount = 0.0
    """Seconds of a backward, with the forward that recomputation runs again."""
    weight_gradient_s: Amount = 0.0
    """Seconds of the second half of a split backward, a part of `backward_s`."""

    def of(self, phase: Phase) -> float:
        """Return the seconds of one task."""
        return {
            Phase.FORWARD: self.forward_s,
            Phase.BACKWARD: self.backward_s,
            Phase.INPUT_GRADIENT: self.backward_s - self.weight_gradient_s,
            Phase.WEIGHT_GRADIENT: self.weight_gradient_s,
        }[phase]


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """Predicted seconds and bytes of a stage on each of its devices, for one micro-batch where
    nothing else is said.
    """

    forward_s: Amount
    backward_s: Amount = 0.0
    """Seconds of a backward, with the forward that recomputation runs again."""
    input_gradient_s: Amount = 0.0
    weight_gradient_s: Amount = 0.0
    split_s: Amount = 0.0
    """Seconds more that a micro-batch takes because its backward is split, most of them in the
    forward and in the first half: they count with the first half.
    """
    gradient_s: Amount = 0.0
    """Seconds, once a step, in which gradients are summed over devices."""
    update_s: Amount = 0.0
    parameter_bytes: Index = 0
    static_bytes: Index = 0
    """Bytes there all through a step: parameters, gradients, optimizer state, message buffers."""
    kept_bytes: Index = 0
    """Bytes held from the start of a forward to the end of its backward."""
    weight_kept_bytes: Index = 0
    """Bytes that a split backward's second half needs: held from the end of the first to its own
    end.
    """
    transient_bytes: Index = 0
    """Bytes that come and go within a backward or, without training, a forward."""
    on_host: Annotated[TaskSeconds | None, OmitDefault()] = None
    """Seconds in which the host starts each task's operators; None if the host's time does not
    count.
    """
    on_device: Annotated[TaskSeconds | None, OmitDefault()] = None
    """Seconds in which the device computes and exchanges; None if the host's time does not count.
    """

    @property
    def host_bound(self) -> bool:
        """True if a micro-batch takes the host longer than the device."""
        if self.on_host is None or self.on_device is None:
            return False
        host_s = self.on_host.forward_s + self.on_host.backward_s
        return host_s > self.on_device.forward_s + self.on_device.backward_s

    def host_wait_s(self, phase: Phase) -> float:
        """Return how much longer a task takes because the device waits for the host."""
        if self.on_host is None or self.on_device is None:
            return 0.0
        return max(0.0, self.on_host.of(phase) - self.on_device.of(phase))

    def seconds(self, phase: Phase) -> float:
        return {
            Phase.FORWARD: self.forward_s,
            Phase.BACKWARD: self.backward_s,
            Phase.INPUT_GRADIENT: self.input_gradient_s + self.split_s,
            Phase.WEIGHT_GRADIENT: self.weight_gradient_s,
        }[phase]

    def added_bytes(self, phase: Phase) -> int:
        """Bytes that a task of a step that trains adds to those in use, less than nothing where it
        frees.
        """
        return {
            Phase.FORWARD: self.kept_bytes,
            Phase.BACKWARD: -self.kept_bytes,
            Phase.INPUT_GRADIENT: self.weight_kept_bytes - self.kept_bytes,
            Phase.WEIGHT_GRADIENT: -self.weight_kept_bytes,
        }[phase]


@dataclass(frozen=True, slots=True)
class Message:
    """Message from a device of one stage to a device of a later one after a forward; its gradient
    comes back after the backward. Where the stages have micro-batches of different sizes it is for
    the samples that those of one slice of the source and those of one slice of the target have in
    common: the number of the message is the same for both.
    """

    source_stage: Index
    target_stage: Index
    source: Index
    target: Index
    forward_bytes: Index
    backward_bytes: Index
    forward_s: Amount
    backward_s: Amount
    source_slice: Annotated[MicroBatchSlice, Inline()] = EVERY
    target_slice: Annotated[MicroBatchSlice, Inline()] = EVERY


@dataclass(frozen=True, slots=True)
class Prediction:
    """Stages in order, and the messages of one micro-batch: of the largest, where stages have
    different ones.
    """

    stages: tuple[StagePrediction, ...] = ()
    messages: tuple[Annotated[Message, Row()], ...] = ()

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        return tuple(sorted({(each.source_stage, each.target_stage) for each in self.messages}))
