"""Settings of a launch that are given by name, as `Plan.launch` does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autopipe.api.launch_settings import LaunchSettings, launch_settings
from autopipe.ir.errors import ConfigurationError


def test_values_have_the_types_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "runs")
    values = {
        "steps": 4,
        "seed": "7",
        "checkpoint": "saved",
        "checkpoint_every": "30m",
        "start_timeout": 20,
        "shuffle": False,
        "trace": None,
    }
    assert launch_settings(values) == LaunchSettings(
        steps=4,
        seed=7,
        checkpoint=Path("saved"),
        checkpoint_every=(0, 30.0),
        start_timeout=20.0,
        shuffle=False,
        wandb="runs",
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step": 4}, "there is no setting 'step' (did you mean 'steps'?)"),
        ({"steps": 0}, "--steps: 0 is not at least 1"),
        ({"steps": "many"}, "--steps: 'many' is not a number"),
        ({"step_timeout": 0}, "--step-timeout: 0 is not above 0"),
        ({"device": "tpu"}, "--device: 'tpu' is not one of auto, cuda, cpu, meta"),
        ({"resume": 1}, "--resume: 1 is neither True nor False"),
        (
            {"checkpoint_every": "-1m"},
            "--checkpoint-every: '-1m' is neither a number of steps nor minutes as 30m",
        ),
    ],
)
def test_invalid_values_are_rejected(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        launch_settings(values)
