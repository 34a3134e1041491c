"""Random graphs on random stages, groups, splits and schedules compute what torch computes, and
exchange the bytes that are predicted.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopipe.passes.lower.traffic import communication_bytes
from tests.distributed.support.builder import evaluate
from tests.distributed.support.drawing import ROWS, Case, cases
from tests.distributed.support.drawing_sizes import unequal_cases
from tests.distributed.support.pool import Pools
from tests.distributed.support.running import (
    assert_equal_steps,
    batch_of,
    drawn_parameters,
    expected_step,
    micro_batches_of,
    report_lines,
    run_forward,
    run_step,
    write,
)

pytestmark = pytest.mark.distributed

RANDOM = settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)

FEWER = settings(RANDOM, max_examples=25)

OPTIONS = st.sampled_from([(), ("--blocking",)])


@RANDOM
@given(case=cases(train=True), options=OPTIONS)
def test_training_computes_loss_and_gradients(
    pools: Pools, case: Case, options: tuple[str, ...]
) -> None:
    check_training(pools, case, options)


@FEWER
@given(case=unequal_cases(train=True), options=OPTIONS)
def test_training_on_micro_batches_of_different_sizes(
    pools: Pools, case: Case, options: tuple[str, ...]
) -> None:
    check_training(pools, case, options)


def check_training(pools: Pools, case: Case, options: tuple[str, ...]) -> None:
    assert case.loss is not None
    with TemporaryDirectory() as folder:
        program = Path(folder) / "program"
        write(case.graph, case.placement, case.schedule, case.loss, program)
        count = case.schedule.micro_batches
        batch = batch_of(case.graph, count, below=ROWS)
        expected = expected_step(case.graph, case.loss, program, batch, count)
        found = run_step(pools, program, batch, *options)
        assert_equal_steps(found, expected, 1e-9)
        assert found.moved == predicted_bytes(case)


@RANDOM
@given(case=cases(train=False), options=OPTIONS)
def test_inference_gives_every_output(pools: Pools, case: Case, options: tuple[str, ...]) -> None:
    check_inference(pools, case, options)


@FEWER
@given(case=unequal_cases(train=False), options=OPTIONS)
def test_inference_on_micro_batches_of_different_sizes(
    pools: Pools, case: Case, options: tuple[str, ...]
) -> None:
    check_inference(pools, case, options)


def check_inference(pools: Pools, case: Case, options: tuple[str, ...]) -> None:
    with TemporaryDirectory() as folder:
        program = Path(folder) / "program"
        write(case.graph, case.placement, case.schedule, None, program)
        batch = batch_of(case.graph, case.schedule.micro_batches, below=ROWS)
        report = Path(folder) / "report.jsonl"
        found = run_forward(pools, program, batch, "--report", report, *options)
        parameters = drawn_parameters(case.graph, program)
        parts = [
            evaluate(case.graph, parameters | inputs)
            for inputs in micro_batches_of(case.graph, batch, case.schedule.micro_batches)
        ]
        assert set(found) == set(case.graph.outputs)
        assert report_lines(report)[0]["communication_bytes"] == predicted_bytes(case)
        for name in case.graph.outputs:
            values = [part[name] for part in parts]
            # A parameter has no samples to join: it is given once a micro-batch, of whichever size.
            if name in parameters:
                values = [values[0][None]] * (len(found[name]) // len(values)) * len(values)
            expected = torch.cat(values).numpy()
            np.testing.assert_allclose(found[name], expected, rtol=1e-9, atol=1e-12)


def predicted_bytes(case: Case) -> dict[str, int]:
    """By kind, for one step of a case."""
    schedule = case.schedule
    return communication_bytes(
        case.graph, case.placement, schedule.micro_batches, schedule.devices, case.loss
    )
