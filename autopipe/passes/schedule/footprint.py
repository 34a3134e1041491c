"""Memory over time on every device, from the spans of a step."""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.ir.schedule import Phase
from autopipe.ir.timeline import Span, StagePrediction

Curve = tuple[tuple[float, int], ...]


def static_memory(
    devices: int, stage_devices: Sequence[Sequence[int]], costs: Sequence[StagePrediction]
) -> tuple[int, ...]:
    """Bytes in use all through a step, a device each: parameters, gradients, optimizer state, message buffers."""
    static = [0] * devices
    for stage, cost in enumerate(costs):
        for device in stage_devices[stage]:
            static[device] += cost.static_bytes
    return tuple(static)


def memory_curves(
    static: Sequence[int], costs: Sequence[StagePrediction], spans: Sequence[Span], train: bool
) -> tuple[Curve, ...]:
    """(time, bytes in use from then on), a device each.

    What a forward keeps is held from its start to the end of its backward; where that is split, to the end of its first
    half, and what the second half needs from there to the end of that one. What comes and goes within a task is held
    while a backward (of a split one the first half) runs or, without training, a forward.
    """
    changes: list[list[tuple[float, int]]] = [[] for _ in static]
    for span in spans:
        cost = costs[span.task.stage]
        start, end = _changes(cost, span.task.phase, train)
        changes[span.device] += [(span.start, start), (span.end, end)]
    return tuple(_accumulate(base, each) for base, each in zip(static, changes, strict=True))


def _changes(cost: StagePrediction, phase: Phase, train: bool) -> tuple[int, int]:
    """Bytes that a task allocates as it starts and frees as it ends."""
    match phase:
        case Phase.FORWARD:
            return (cost.kept_bytes, 0) if train else (cost.transient_bytes, -cost.transient_bytes)
        case Phase.BACKWARD:
            return cost.transient_bytes, -cost.transient_bytes - cost.kept_bytes
        case Phase.INPUT_GRADIENT:
            return cost.transient_bytes, cost.weight_kept_bytes - cost.transient_bytes - cost.kept_bytes
        case Phase.WEIGHT_GRADIENT:
            return 0, -cost.weight_kept_bytes


def _accumulate(base: int, changes: list[tuple[float, int]]) -> Curve:
    """The sum of changes over time; what is freed at an instant is free for what is taken at that instant."""
    curve = [(0.0, base)]
    used = base
    for time, change in sorted(changes):
        used += change
        if curve[-1][0] == time:
            curve[-1] = (time, used)
        elif curve[-1][1] != used:
            curve.append((time, used))
    return tuple(curve)
