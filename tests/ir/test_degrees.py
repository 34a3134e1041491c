"""Degrees in words, grids and what is none."""

from __future__ import annotations

import pytest

from autopipe.ir.degrees import PlanDegrees

ONE = (1, 1)


@pytest.mark.parametrize(
    ("degrees", "text"),
    [
        (PlanDegrees((8,) * 8, (2, 2), (4, 4), (2, 2), zero_stage=1, stages=16, recomputed_stages=13),
         "pipeline 8 (2 stages per rank) × data 4 × tensor 2, ZeRO-1, recompute 13 of 16 stages"),
        (PlanDegrees((1,), ONE, ONE, ONE), "pipeline 1 × data 1 × tensor 1"),
        (PlanDegrees((4, 4), ONE, (2, 2), (1, 2), stages=2, copies=(1, 2)),
         "pipeline 2 × data 2 × tensor 1–2 × copies 1–2"),
        (PlanDegrees((1, 2, 5), ONE, (1, 2), (1, 5), stages=3, recomputed_stages=3),
         "pipeline 3 stages of 1, 2 and 5 devices, data 1–2, tensor 1–5, recompute 3 of 3 stages"),
        (PlanDegrees((4, 1, 1), (1, 2), ONE, (1, 4), overlapping=True, stages=4),
         (
             "pipeline 3 groups of 4, 1 and 1 devices (1–2 stages per rank, groups share devices), data 1, "
             "tensor 1–4"
         )),
        (PlanDegrees((1,) * 7 + (2,), ONE, (1, 2), ONE, depth=3, stages=8),
         "pipeline 8 stages of 1 to 2 devices (branches, 3 stages deep), data 1–2, tensor 1"),
        (PlanDegrees((2, 2), ONE, ONE, ONE, (2, 2), pipelines=2, stages=4, recomputed_stages=1),
         "pipeline 2 (2 directions) × data 1 × sequence 2 × tensor 1, recompute 1 of 4 stages"),
    ],
    ids=["grid", "one device", "copies", "unequal", "overlapping", "branches", "sequence"],
)  # fmt: skip
def test_text(degrees: PlanDegrees, text: str) -> None:
    assert degrees.text == text


def test_options_that_were_open_have_the_values_of_the_plan() -> None:
    degrees = PlanDegrees((8,) * 4, ONE, (4, 4), (2, 2), settled=("pipeline", "tensor"), stages=4)
    assert degrees.options == {"pipeline": 4, "tensor": 2}
