"""Modules that are exported, trained and loaded again have the loss of modules that torch
trained.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exports.round_trip_modules import ROUND_TRIPS
from tests.exports.round_trips import taken

TOLERANCE = 1e-5
CHOSEN = (
    "tied GPT", "frozen ResNet", "teacher and student", "straight-through", "weight norm", "padded BERT", "ViT",
    "saved state", "momentum encoder", "named as operators", "stacked projections", "sparse table",
    "repeated block", "detached in place", "probabilities for labels",
)  # fmt: skip
"""Modules of the default run; `./test -m sweep` takes the others."""


def _check(name: str, folder: Path) -> None:
    found = taken(name, folder)
    assert found.loss <= TOLERANCE
    assert found.parameters <= TOLERANCE, found.worst


@pytest.mark.distributed
@pytest.mark.parametrize("name", CHOSEN)
def test_a_module_comes_back_trained(name: str, here: None, tmp_path: Path) -> None:
    _check(name, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(ROUND_TRIPS.keys() - set(CHOSEN)))
def test_every_module_comes_back_trained(name: str, here: None, tmp_path: Path) -> None:
    _check(name, tmp_path)
