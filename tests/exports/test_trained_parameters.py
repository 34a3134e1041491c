"""A plan of an exported model trains what torch trains: the module's own parameters, each once, and
nothing else.

`./test -m sweep tests/exports` compares every model, exporter and kind of numbers;
`scripts/trained_parameters.py` writes the table in docs.
"""

from __future__ import annotations

import pytest

from tests.exports.traced import Traced, all_traced
from tests.exports.trained_parameters import NOT_EXPORTED, compared, unexplained

FAST = (
    *(Traced(model, "dynamo") for model in ("qwen3_moe", "mamba", "dinov2", "gru")),
    *(Traced(model, "torchscript") for model in ("albert", "beit", "lstm", "dit", "gru", "swin")),
)
"""A few of each exporter; the rest is slow."""
REST = [each for fresh in (False, True) for each in all_traced(fresh) if each not in FAST]


@pytest.mark.parametrize("traced", FAST, ids=lambda each: each.name)
def test_what_is_trained_is_what_torch_trains(traced: Traced) -> None:
    check(traced)


@pytest.mark.sweep
@pytest.mark.parametrize("traced", REST, ids=lambda each: each.name)
def test_what_every_export_trains_is_what_torch_trains(traced: Traced) -> None:
    check(traced)


def check(traced: Traced) -> None:
    reason = NOT_EXPORTED.get((traced.model, traced.exporter))
    if reason:
        pytest.skip(reason)
    wrong, _ = unexplained(traced, compared(traced).differences)
    assert not wrong
