"""Colours of stages."""

from __future__ import annotations

from autopipe.ir.schedule import Phase

_FORWARD = (
    "#8ab6f0",
    "#f4b77a",
    "#8fd3a4",
    "#e79ad0",
    "#d9cf72",
    "#a9a3ec",
    "#79cfd3",
    "#ee9c95",
    "#b8cf85",
    "#c9b29b",
)
_BACKWARD = (
    "#3d78c4",
    "#c9771f",
    "#3c9a5c",
    "#b4489a",
    "#998b16",
    "#6a60c8",
    "#24888d",
    "#c14f45",
    "#718c33",
    "#8a6d50",
)


def stage_colour(stage: int, phase: Phase) -> str:
    """A colour for a stage's tasks as `#rrggbb`: light for forwards, dark for backwards; they repeat after ten."""
    shades = _FORWARD if phase is Phase.FORWARD else _BACKWARD
    return shades[stage % len(shades)]


def text_colour(phase: Phase) -> str:
    """A colour that can be read on `stage_colour`."""
    return "#10131a" if phase is Phase.FORWARD else "#ffffff"
