"""Whether memory can decide anything."""

from __future__ import annotations

import dataclasses

import pytest

from autopipe.passes.auto.choose import may_exceed_memory, problem_with_largest_micro_batches
from autopipe.passes.pipeline import Request, Runner
from tests.passes.auto.models import cluster, layers


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    path = layers(tmp_path_factory.mktemp("models") / "layers.onnx")
    return problem_with_largest_micro_batches(Request(path, cluster(4), None, None), Runner())


def test_a_small_model_fits_wherever_it_is_put(problem):
    assert not may_exceed_memory(problem)


def test_a_limit_below_the_parameters_is_short(problem):
    assert may_exceed_memory(dataclasses.replace(problem, memory_limit=3 * 64 * 64 * 4))


def test_what_a_batch_keeps_counts(problem):
    static = 2 * 3 * 64 * 64 * 4
    assert may_exceed_memory(dataclasses.replace(problem, memory_limit=2 * static + 1))
