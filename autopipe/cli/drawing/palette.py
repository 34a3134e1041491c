"""Colours of stages and of the phases of their tasks."""

from __future__ import annotations

import colorsys

from autopipe.ir.schedule import Phase

_HUES = (213, 29, 138, 316, 53, 246, 183, 4, 79, 30)
_SATURATIONS = (0.72, 0.82, 0.42, 0.58, 0.60, 0.62, 0.48, 0.70, 0.45, 0.28)
_LIGHTNESS = {
    Phase.FORWARD: 0.74,
    Phase.BACKWARD: 0.42,
    Phase.INPUT_GRADIENT: 0.57,
    Phase.WEIGHT_GRADIENT: 0.30,
}


def stage_colour(stage: int, phase: Phase) -> str:
    """A colour for a stage's tasks as `#rrggbb`; the hues repeat after ten stages.

    Forwards are light, backwards dark. Of the halves of a backward the input gradient is lighter than a whole one, the
    weight gradient darker and greyer.
    """
    saturation = _SATURATIONS[stage % len(_HUES)] * (0.45 if phase is Phase.WEIGHT_GRADIENT else 1.0)
    parts = colorsys.hls_to_rgb(_HUES[stage % len(_HUES)] / 360, _LIGHTNESS[phase], saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def text_colour(phase: Phase) -> str:
    """A colour that can be read on `stage_colour`."""
    return "#10131a" if phase in (Phase.FORWARD, Phase.INPUT_GRADIENT) else "#ffffff"
