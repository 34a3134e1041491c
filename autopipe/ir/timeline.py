"""The timeline of a simulated or measured step, and the predicted times of stages and messages."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Annotated

from autopipe.ir.codec import Amount, AsList, Index, Inline, OmitDefault
from autopipe.ir.schedule import EVERY_MICRO_BATCH, DeviceGroups, MicroBatchSlice, Phase, Task


@dataclass(frozen=True, slots=True)
class Span:
    """Start and end of a task on a device, in seconds from the start of the step."""

    device: int
    task: Task
    start: float
    end: float


class StepEndKind(enum.Enum):
    """Kind of work that a device does after its last task of a training step."""

    GRADIENT_SUM = "gradient sum"
    """All-reduce of the gradients of a stage."""
    UPDATE = "update"
    """Optimizer update of all parameters of the device."""


@dataclass(frozen=True, slots=True)
class StepEndSpan:
    """Start and end of work of a device after its last task, in seconds from the start of the
    step.
    """

    device: int
    kind: StepEndKind
    stage: int | None
    """Stage whose gradients are reduced; None for an optimizer update."""
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """A P2P message between devices of two stages for one micro-batch, with its start and end in
    seconds from the start of the step. `task` is the task that sends: a forward sends activations,
    a backward sends gradients.
    """

    source: int
    target: int
    task: Task
    bytes: int
    start: float
    end: float


Links = tuple[tuple[tuple[int, int], ...], ...]
"""Groups of device pairs. All pairs of a group exchange messages of equal sizes at equal times."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The tasks, messages and memory of one step. Times are in seconds from the start of the step.

    A step of thousands of devices has millions of spans and transfers. Therefore, spans are stored
    for only one of several devices with equal spans (a lane), and transfers for only one of several
    pairs with equal transfers.
    """

    own_spans: tuple[Span, ...]
    """Tasks of the first device of each lane (group of devices with equal tasks at equal times),
    sorted by device and start.
    """
    own_transfers: tuple[Transfer, ...]
    """Messages between the first device pair of each group of `links`, in both directions. The
    other pairs of a group have equal messages.
    """
    memory: tuple[tuple[tuple[float, int], ...], ...]
    """For each device, pairs (time, bytes in use from this time on), sorted by time. The first time
    is 0.
    """
    static_memory: tuple[int, ...]
    """For each device, the bytes that are in use during the whole step: parameters, gradients,
    optimizer state.
    """
    end: float
    """End of the step, including gradient all-reduces and updates."""
    lanes: DeviceGroups = ()
    """Groups of devices with equal spans; () if `own_spans` has the spans of all devices."""
    links: Links = ()
    """Groups of pairs with equal transfers; () if `own_transfers` has all transfers."""
    own_ends: tuple[StepEndSpan, ...] = ()
    """Gradient all-reduces and updates of the first device of each lane (group of devices with
    equal tasks at equal times), sorted by device and start.
    """

    @property
    def spans(self) -> tuple[Span, ...]:
        """Tasks of all devices, sorted by device and start."""
        if len(self.lanes) in (0, len(self.memory)):
            return self.own_spans
        of_lane: dict[int, list[Span]] = {}
        for span in self.own_spans:
            of_lane.setdefault(span.device, []).append(span)
        firsts = self._first_device_of_group
        return tuple(
            span if span.device == device else Span(device, span.task, span.start, span.end)
            for device in sorted(firsts)
            for span in of_lane.get(firsts[device], ())
        )

    @property
    def ends(self) -> tuple[StepEndSpan, ...]:
        """Gradient all-reduces and updates of all devices, sorted by device and start."""
        if len(self.lanes) in (0, len(self.memory)):
            return self.own_ends
        of_lane: dict[int, list[StepEndSpan]] = {}
        for span in self.own_ends:
            of_lane.setdefault(span.device, []).append(span)
        firsts = self._first_device_of_group
        return tuple(
            replace(span, device=device)
            for device in sorted(firsts)
            for span in of_lane.get(firsts[device], ())
        )

    @property
    def _first_device_of_group(self) -> dict[int, int]:
        """By device, the first device of its lane (group of devices with equal tasks at equal
        times).
        """
        return {device: devices[0] for devices in self.lanes for device in devices}

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Messages between all pairs of devices. Messages of pairs with equal transfers (a group of
        `links`) are consecutive.
        """
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
        """For each device, the maximum number of bytes in use."""
        # Devices with equal memory refer to one object of `memory`. The maximum of each object is
        # computed only a single time.
        curves = {id(curve): curve for curve in self.memory}
        peaks = {key: max((used for _, used in curve), default=0) for key, curve in curves.items()}
        return tuple(peaks[id(curve)] for curve in self.memory)

    @property
    def bubble_rate(self) -> float:
        """Fraction of the step in which a device runs no task, averaged over the devices."""
        count = {devices[0]: len(devices) for devices in self.lanes}
        busy = sum((span.end - span.start) * count.get(span.device, 1) for span in self.own_spans)
        return 1.0 - busy / (len(self.memory) * self.end) if self.end else 0.0


@dataclass(frozen=True, slots=True)
class TaskSeconds:
    """Seconds per task of a stage for one micro-batch, either of the host or of the device."""

    forward_s: Amount
    backward_s: Amount = 0.0
    """Seconds of a backward, including the forward that it recomputes."""
    weight_gradient_s: Amount = 0.0
    """Seconds of the second half of a split backward. They are part of `backward_s`."""

    def of(self, phase: Phase) -> float:
        """Return the seconds of a task with the phase `phase`."""
        return {
            Phase.FORWARD: self.forward_s,
            Phase.BACKWARD: self.backward_s,
            Phase.INPUT_GRADIENT: self.backward_s - self.weight_gradient_s,
            Phase.WEIGHT_GRADIENT: self.weight_gradient_s,
        }[phase]


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """Predicted times and memory of a stage on each of its devices, per micro-batch unless stated
    otherwise.
    """

    forward_s: Amount
    backward_s: Amount = 0.0
    """Seconds of a backward, including the forward that it recomputes."""
    input_gradient_s: Amount = 0.0
    weight_gradient_s: Amount = 0.0
    split_s: Amount = 0.0
    """Additional seconds per micro-batch if its backward is split; they belong to the first half.
    """
    gradient_s: Amount = 0.0
    """Seconds of the all-reduce of the stage's gradients, once per step."""
    update_s: Amount = 0.0
    parameter_bytes: Index = 0
    static_bytes: Index = 0
    """Bytes that are in use during the whole step: parameters, gradients, optimizer state, message
    buffers.
    """
    kept_bytes: Index = 0
    """Bytes that a forward saves. They are in use from the start of the forward to the end of its
    backward.
    """
    weight_kept_bytes: Index = 0
    """Bytes that are in use from the end of the first half of a split backward to the end of the
    second half.
    """
    transient_bytes: Index = 0
    """Maximum bytes that a backward (in inference, a forward) uses temporarily."""
    on_host: Annotated[TaskSeconds | None, OmitDefault()] = None
    """Seconds that the host needs to launch the operators of each task; None if host time is not
    modelled.
    """
    on_device: Annotated[TaskSeconds | None, OmitDefault()] = None
    """Seconds that the device needs to compute and communicate in each task; None if host time is
    not modelled.
    """

    @property
    def host_bound(self) -> bool:
        """True if forward and backward of a micro-batch take more time on the host than on the
        device.
        """
        if self.on_host is None or self.on_device is None:
            return False
        host_s = self.on_host.forward_s + self.on_host.backward_s
        return host_s > self.on_device.forward_s + self.on_device.backward_s

    def host_wait_s(self, phase: Phase) -> float:
        """Return the seconds of a task with the phase `phase` in which the device waits for the
        host.
        """
        if self.on_host is None or self.on_device is None:
            return 0.0
        return max(0.0, self.on_host.of(phase) - self.on_device.of(phase))

    def seconds(self, phase: Phase) -> float:
        """Return the seconds of a task with the phase `phase`."""
        return {
            Phase.FORWARD: self.forward_s,
            Phase.BACKWARD: self.backward_s,
            Phase.INPUT_GRADIENT: self.input_gradient_s + self.split_s,
            Phase.WEIGHT_GRADIENT: self.weight_gradient_s,
        }[phase]

    def added_bytes(self, phase: Phase) -> int:
        """Return the change of the bytes in use by a task with the phase `phase` of a training
        step. It is negative if the task frees memory.
        """
        return {
            Phase.FORWARD: self.kept_bytes,
            Phase.BACKWARD: -self.kept_bytes,
            Phase.INPUT_GRADIENT: self.weight_kept_bytes - self.kept_bytes,
            Phase.WEIGHT_GRADIENT: -self.weight_kept_bytes,
        }[phase]


@dataclass(frozen=True, slots=True)
class Message:
    """A P2P message from a device of one stage to a device of a later stage after a forward, and
    the message with its gradient after the backward. If the micro-batch sizes of the stages differ,
    a message contains the samples that a micro-batch of `source_slice` and one of `target_slice`
    have in common.
    """

    source_stage: Index
    target_stage: Index
    source: Index
    target: Index
    forward_bytes: Index
    backward_bytes: Index
    forward_s: Amount
    backward_s: Amount
    source_slice: Annotated[MicroBatchSlice, Inline()] = EVERY_MICRO_BATCH
    target_slice: Annotated[MicroBatchSlice, Inline()] = EVERY_MICRO_BATCH


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predictions for the stages, in order, and the messages of one micro-batch (of the largest one
    if the stages have different sizes).
    """

    stages: tuple[StagePrediction, ...] = ()
    messages: tuple[Annotated[Message, AsList()], ...] = ()

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Distinct pairs (source stage, target stage) between which messages are sent, sorted."""
        return tuple(sorted({(each.source_stage, each.target_stage) for each in self.messages}))
