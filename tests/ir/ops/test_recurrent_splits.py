"""Recurrent layers in parts: by sample, and by hidden unit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.ops import OPERATORS, signature_of
from tests.ir.ops.splitting import check, check_pairs, divisible_axes
from tests.ir.ops.uses import use_of

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
STEPS = 3
BATCH = 2
WIDTH = 3
UNITS = 4
BOOLEANS = st.booleans()


def operands(
    op: str, directions: int, first: bool, given: dict[str, bool]
) -> list[np.ndarray | None]:
    draw = np.random.default_rng(sum(given.values()))
    rows = GATES[op] * UNITS
    state = (BATCH, directions, UNITS) if first else (directions, BATCH, UNITS)
    shapes = {
        "bias": (directions, 2 * rows),
        "lengths": (BATCH,),
        "hidden": state,
        "cell": state,
        "peepholes": (directions, 3 * UNITS),
    }
    arrays: list[np.ndarray | None] = [
        draw.standard_normal((BATCH, STEPS, WIDTH) if first else (STEPS, BATCH, WIDTH))
    ]
    arrays += [draw.standard_normal((directions, rows, extent)) for extent in (WIDTH, UNITS)]
    for name in list(shapes)[: 5 if op == "LSTM" else 3]:
        array = draw.integers(1, STEPS + 1, BATCH).astype(np.int32) if name == "lengths" else None
        array = draw.standard_normal(shapes[name]) if array is None else array
        arrays.append(array if given[name] else None)
    while arrays[-1] is None:
        arrays.pop()
    return arrays


@given(
    st.sampled_from(tuple(GATES)),
    st.sampled_from(("forward", "reverse", "bidirectional")),
    BOOLEANS,
    BOOLEANS,
    st.fixed_dictionaries(
        dict.fromkeys(("bias", "lengths", "hidden", "cell", "peepholes"), BOOLEANS)
    ),
)
@settings(max_examples=40, deadline=None)
def test_by_sample_and_by_hidden_unit(
    op: str, direction: str, first: bool, flag: bool, optional: dict[str, bool]
) -> None:
    attributes: dict[str, Any] = {
        "direction": direction,
        "hidden_size": UNITS,
        "layout": int(first),
    }
    if op == "GRU":
        attributes["linear_before_reset"] = int(flag)
    if op == "LSTM":
        attributes["input_forget"] = int(flag)
    arrays = operands(op, 2 if direction == "bidirectional" else 1, first, optional)
    use = use_of(op, arrays, results=3 if op == "LSTM" else 2, **attributes)
    assert {axis.name for axis in divisible_axes(use.space)} == {"b", "h"}
    check(use)


@pytest.mark.parametrize("op", GATES)
def test_by_both_at_once(op: str) -> None:
    optional = {"bias": True, "lengths": False, "hidden": True, "cell": True, "peepholes": False}
    use = use_of(op, operands(op, 1, False, optional), hidden_size=UNITS, clip=0.8)
    assert check_pairs(use) == 2


def test_a_single_step_tells_nothing() -> None:
    optional = dict.fromkeys(("bias", "lengths", "hidden", "cell", "peepholes"), False)
    x, *weights = operands("LSTM", 1, False, optional)
    assert x is not None
    use = use_of("LSTM", [x[:1], *weights], hidden_size=UNITS)
    row = OPERATORS["LSTM"]
    signature = signature_of(use.graph, use.node)
    assert {told.times for told in row.statistics(signature, use.space, {"h": 2})} == {0}
    assert check(use) == 2
