"""How far a step is from the ideal, in words."""

from __future__ import annotations

from collections.abc import Iterator

from autopipe.cli.figures import seconds_text
from autopipe.ir.plan import Breakdown

_LEAST = 5e-4
"""Share of a step that is worth a word."""
_EXCHANGES = ("messages", "collectives", "gradients")


def distance_lines(breakdown: Breakdown, devices: int, kinds: int = 1) -> Iterator[str]:
    """The ideal of the devices, by kind, and the parts of the step on top of it, the largest first."""
    ideal_s, step_s = breakdown.ideal_s, breakdown.step_s
    times = f"the step takes {step_s / ideal_s:.2f} times that" if ideal_s else "the step takes that and more"
    shared = f"one device's work at the roofline / {devices}" if devices > 1 else "the device's work at the roofline"
    if kinds > 1:
        shared = f"the work at the roofline of {devices} devices, each as fast as it is"
    yield f"ideal {seconds_text(ideal_s)} ({shared}), {times}"
    parts = [part for name, seconds, note in _grouped(breakdown) if (part := _part(name, seconds, step_s, note))]
    if parts:
        yield f"of the step: ideal {ideal_s / step_s:.1%}, {', '.join(parts)}"


def _grouped(breakdown: Breakdown) -> list[tuple[str, float, str]]:
    """The losses, the largest first, with communication as one that is told by its parts."""
    losses = [(name, seconds) for name, seconds in breakdown.losses if name not in _EXCHANGES]
    inside = [_part(name, seconds, breakdown.step_s) for name, seconds in breakdown.losses if name in _EXCHANGES]
    exchanges = ("communication", breakdown.communication_s, ", ".join(filter(None, inside)))
    return sorted([*((*each, "") for each in losses), exchanges], key=lambda each: -each[1])


def _part(name: str, seconds: float, step_s: float, note: str = "") -> str:
    """A part of the step; nothing where it is too small."""
    if abs(seconds) < _LEAST * step_s or not step_s:
        return ""
    return f"{name} {seconds / step_s:.1%}" + (f" ({note})" if note else "")
