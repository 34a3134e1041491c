"""Learning rates by step are those of transformers, and with a decay ratio torchtitan's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from autopipe.ir.training import LRScheduler

STEPS = 40


def torchtitan(step: int, warmup: int, ratio: float, kind: str, least: float) -> float:
    """`linear_warmup_stable_decay` of torchtitan's components/lr_scheduler.py, with what it is
    called with.
    """
    decay = round(STEPS * ratio)
    if warmup + decay > STEPS:
        decay = STEPS - warmup
    stable = warmup + STEPS + 1 - warmup - decay
    if step < warmup:
        return (step + 1) / warmup
    if step < stable:
        return 1.0
    progress = (step + 1 - stable) / decay
    shape: dict[str, Callable[[float], float]] = {
        "linear": lambda p: 1 - p,
        "sqrt": lambda p: 1 - math.sqrt(p),
        "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
    }
    return least + (1 - least) * shape[kind](progress)


@pytest.mark.parametrize("kind", ["linear", "cosine", "sqrt"])
@pytest.mark.parametrize(("warmup", "ratio"), [(0, 0.3), (7, 0.25), (10, 1.0), (1, 0.01)])
def test_with_a_decay_ratio_rates_are_torchtitans(kind: str, warmup: int, ratio: float) -> None:
    found = LRScheduler(warmup, kind, ratio, min_lr_factor=0.1)  # type: ignore[arg-type]
    expected = [
        torchtitan(step, warmup, ratio, kind, 0.1) if ratio >= 0.02 else 1.0
        for step in range(STEPS)
    ]
    assert [found.factor(step, STEPS) for step in range(STEPS)] == pytest.approx(
        expected, abs=1e-15
    )


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
def test_otherwise_they_are_transformers(kind: str, warmup: int) -> None:
    from transformers import optimization

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    if kind == "constant":
        theirs = optimization.get_constant_schedule_with_warmup(optimizer, warmup)
    else:
        theirs = getattr(optimization, f"get_{kind}_schedule_with_warmup")(optimizer, warmup, STEPS)
    found = LRScheduler(warmup, kind)  # type: ignore[arg-type]
    for step in range(STEPS + 1):
        assert found.factor(step, STEPS) == pytest.approx(theirs.get_last_lr()[0], abs=1e-15)
        optimizer.step()
        theirs.step()


def test_a_floor_and_a_length_of_their_own() -> None:
    from transformers import optimization

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs = optimization.get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, 4, STEPS, min_lr_rate=0.2
    )
    found = LRScheduler(4, "cosine", min_lr_factor=0.2, total_steps=STEPS)
    for step in range(STEPS):
        assert found.factor(step, 10) == pytest.approx(theirs.get_last_lr()[0], abs=1e-15)
        optimizer.step()
        theirs.step()
    assert found.factor(10 * STEPS, 10) == 0.2
