"""The host's time per operator: a run's time over the operators that the cost model counts for its
layers.
"""

from __future__ import annotations

from itertools import count

import pytest
import torch

from autopipe.backends.torch.profiler import host
from autopipe.passes.cost.roofline import roofline_costs
from tests.passes.cost.graphs import Builder

LAYERS = 40


def test_a_runs_time_is_divided_by_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes 72 seconds from one reading to the next: so long takes each run of 40
    layers.
    """
    builder = Builder(8, 8)
    weight = builder.parameter("w", (8, 8))
    bias = builder.parameter("b", (8,))
    data = "x"
    for _ in range(LAYERS):
        added = builder.add(
            builder.node("Gelu", (builder.add(builder.matmul(data, weight), bias),), (8, 8)), data
        )
        columns = builder.node("Transpose", (added,), (8, 8), perm=(1, 0))
        normalized = builder.node("LayerNormalization", (columns, bias, bias), (8, 8), axis=-1)
        data = builder.node("Flatten", (normalized,), (8, 8), axis=1)
    work = roofline_costs(builder.finish(data))
    operators = sum(each.operators + each.backward_operators for each in work)
    ticks = count(0.0, 72.0)
    monkeypatch.setattr(host.time, "perf_counter", lambda: next(ticks))
    assert host.measure_host_launch(torch.device("cpu"), "fp32") == pytest.approx(72.0 / operators)
    assert operators == LAYERS * 6 * 3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_is_measured_in_the_programs_precision(precision: str) -> None:
    assert 0 < host.measure_host_launch(torch.device("cpu"), precision) < 1
