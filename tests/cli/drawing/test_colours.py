"""Colours of neighbouring stages differ for all eyes, and what is written on them can be read."""

from __future__ import annotations

import numpy as np
import pytest

from autopipe.api.timeline_figure import stage_colour, text_colour
from autopipe.ir.schedule import Phase

VISION = {
    "full": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}  # fmt: skip
"""Linear RGB as it is seen: Machado, Oliveira and Fernandes 2009, severity 1."""
XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.072175],
        [0.0193339, 0.119192, 0.9503041],
    ]
)
WHITE = np.array([0.95047, 1.0, 1.08883])
STAGES = 10


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear RGB."""
    ratios = XYZ @ np.clip(rgb, 0, 1) / WHITE
    x, y, z = np.where(ratios > 0.008856, np.cbrt(ratios), 7.787 * ratios + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def difference(one: str, other: str, vision: str) -> float:
    """Delta E (CIE 1976) of two colours as somebody sees them; 2 to 3 is just noticed."""
    return float(
        np.linalg.norm(lab(VISION[vision] @ linear(one)) - lab(VISION[vision] @ linear(other)))
    )


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("phase", Phase)
def test_neighbouring_stages_are_told_apart(vision: str, phase: Phase) -> None:
    colours = [stage_colour(stage, phase) for stage in range(STAGES + 1)]
    for stage in range(STAGES):
        assert difference(colours[stage], colours[stage + 1], vision) > 11, stage


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("phases", ["FB", "FI", "FW", "IW"])
def test_the_phases_of_a_stage_are_told_apart(vision: str, phases: str) -> None:
    for stage in range(STAGES):
        one, other = (stage_colour(stage, Phase(letter)) for letter in phases)
        assert difference(one, other, vision) > 11, stage


@pytest.mark.parametrize("phase", Phase)
def test_labels_can_be_read(phase: Phase) -> None:
    for stage in range(STAGES):
        low, high = sorted(
            float(XYZ[1] @ linear(each))
            for each in (stage_colour(stage, phase), text_colour(phase))
        )
        assert (high + 0.05) / (low + 0.05) > 3, stage
