"""What the profiler measures is what it is asked for; how long that took is nobody's matter
here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from autopipe.api.synthetic_programs import LONGER, write_overhead_stage, write_pair, write_rows
from autopipe.backends import onnxruntime as onnxruntime_profiler
from autopipe.backends.torch.profiler.communication import (
    fit_time_to_bytes,
    measure_exchanges,
    measure_post_overhead,
)
from autopipe.backends.torch.profiler.operators import (
    TaskStartOverhead,
    measure_operations,
    measure_task_start_overhead,
    measure_tasks,
)
from autopipe.backends.torch.profiler.timed_program import (
    Stopwatch,
    average_timings,
    measure_in_process,
    repeat_timed,
)
from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.ir.errors import LaunchError
from autopipe.ir.graph import Graph
from autopipe.ir.measured_costs import MEASURED_COMMUNICATION, AffineTime, OperationSample, Timing
from autopipe.passes.cost.measured import Operations
from autopipe.passes.cost.roofline import roofline_costs
from tests.passes.cost.graphs import Builder, perceptron

WATCH = Stopwatch(torch.device("cpu"))
GRAPH = perceptron([16, 8, 8])


def samples(graph: Graph) -> list[OperationSample]:
    """Of all nodes, in order."""
    operations = Operations(graph, "fp32")
    work = roofline_costs(graph)
    return [
        operations.sample(index, each)
        for index, each in enumerate(work)
        if index not in operations.absorbed
    ]


def test_every_operation_of_a_lap_is_measured_once(tmp_path: Path) -> None:
    lap = samples(GRAPH) * 3
    found, refused = measure_operations(lap, WATCH, tmp_path, train=True, seconds=0.01)
    assert refused == ()
    assert {each.operation for each in found} == {each.operation for each in lap}
    assert len(found) == 3, "both Relus are one operation"
    for each in found:
        assert each.forward.seconds > 0
        assert each.backward is not None
        assert each.backward.seconds > 0
        assert each.forward.repetitions >= 5


def test_without_training_there_is_no_backward(tmp_path: Path) -> None:
    found, _ = measure_operations(samples(GRAPH), WATCH, tmp_path, train=False, seconds=0.01)
    assert [each.backward for each in found] == [None] * 3


def test_no_gradients_no_backward(tmp_path: Path) -> None:
    builder = Builder(4, 8)
    graph = builder.finish(builder.relu("x"))
    (found,), _ = measure_operations(samples(graph), WATCH, tmp_path, train=True, seconds=0.01)
    assert found.backward is None


def test_a_product_and_its_bias_run_as_one(tmp_path: Path) -> None:
    builder = Builder(8, 16)
    graph = builder.finish(builder.add(builder.linear("x", 32), builder.parameter("bias", (32,))))
    (found,), _ = measure_operations(samples(graph), WATCH, tmp_path, train=True, seconds=0.01)
    assert found.operation.operator == "MatMul+Add"
    (generated,) = tmp_path.glob("operator_*.py")
    assert "F.linear" in generated.read_text(encoding="utf-8")


def test_shares_of_every_split_run_by_themselves(tmp_path: Path) -> None:
    operations = Operations(GRAPH, "fp32")
    work = roofline_costs(GRAPH)
    lap = [
        operations.sample(index, work[index], splits)
        for index in range(4)
        for splits in operations.measurable_splits(index, (2,))
    ]
    found, refused = measure_operations(lap, WATCH, tmp_path, train=True, seconds=0.01)
    assert refused == ()
    assert {each.operation for each in found} == {each.operation for each in lap}


def test_what_does_not_run_is_left_out_and_said(tmp_path: Path) -> None:
    product, *rest = samples(GRAPH)
    (signature,) = product.signatures
    factors = (signature.operand(0), replace(signature.operand(1), shape=(3, 3)))
    broken = replace(product, signatures=(replace(signature, operands=factors),))
    found, refused = measure_operations([broken, *rest], WATCH, tmp_path, train=True, seconds=0.01)
    assert len(found) == 2
    assert len(refused) == 1
    assert "MatMul cannot run in isolation: " in refused[0]


def test_onnxruntime_measures_forwards_of_the_same_operations(tmp_path: Path) -> None:
    builder = Builder(8, 16)
    graph = builder.finish(
        builder.relu(builder.add(builder.linear("x", 32), builder.parameter("bias", (32,))))
    )
    found, refused = onnxruntime_profiler.measure_operations(
        samples(graph), tmp_path, threads=1, seconds=0.01
    )
    assert refused == ()
    assert [each.operation.operator for each in found] == ["MatMul+Add", "Relu"]
    assert all(each.forward.seconds >= 0 and each.backward is None for each in found)
    assert list(tmp_path.iterdir()) == []


def test_medians_spreads_and_means() -> None:
    assert Timing.of([3.0, 1.0, 2.0]) == Timing(2.0, 1.0, 3)
    assert Timing.of([2.0]) == Timing(2.0, 0.0, 1)
    assert average_timings([Timing(1.0, 0.5, 7), Timing(3.0, 0.5, 7)]) == Timing(2.0, 0.5, 7)
    calls = []
    (found,) = repeat_timed(lambda: calls.append(0) or (float(len(calls)),), seconds=0.0)
    assert found == Timing(4.0, 0.75, 5), "the first run is warm-up"


def test_a_line_is_found_and_never_falls() -> None:
    line = AffineTime(1e-4, 1e-9)
    sizes = np.array([2**12, 2**16, 2**20, 2**24])
    found = fit_time_to_bytes([(int(size), Timing(line.seconds(size), 0.0, 5)) for size in sizes])
    assert found.fixed_s == pytest.approx(1e-4)
    assert found.per_byte_s == pytest.approx(1e-9)
    falling = fit_time_to_bytes([(1000, Timing(2.0, 0.0, 5)), (2000, Timing(1.0, 0.0, 5))])
    assert falling.per_byte_s == 0.0
    assert falling.fixed_s > 0
    steep = fit_time_to_bytes([(1000, Timing(1.0, 0.0, 5)), (2000, Timing(3.0, 0.0, 5))])
    assert steep.fixed_s == 0.0
    assert steep.per_byte_s > 0


@pytest.mark.distributed
def test_exchanges_of_two_ranks() -> None:
    found = measure_exchanges(2, "cpu", 0.1)
    assert [each.kind for each in found] == [
        kind for kind in MEASURED_COMMUNICATION if kind != "follow"
    ]
    assert {each.ranks for each in found} == {2}
    assert all(each.fit.fixed_s + each.fit.per_byte_s > 0 for each in found)


@pytest.mark.distributed
def test_what_tasks_take_besides_their_operators(tmp_path: Path) -> None:
    starts = measure_task_start_overhead(WATCH, *write_rows(tmp_path), LONGER, seconds=0.1)
    assert starts.forward_s >= 0
    assert starts.backward_s >= 0
    waiting = write_overhead_stage(tmp_path / "medley")
    assert waiting == 15
    plain = measure_tasks(WATCH, tmp_path / "medley", waiting, 0.1)
    assert 0 < plain.forward_s < 0.5
    assert 0 < plain.bucket.per_tensor_s < 0.5
    assert 0 < plain.bucket.per_byte_s < 1e-6
    started = TaskStartOverhead(1.0, 2.0).added_to(plain)
    assert started == replace(
        plain, forward_s=1.0 + plain.forward_s, backward_s=2.0 + plain.backward_s
    )


@pytest.mark.distributed
def test_ends_of_messages_in_a_pipeline(here: None, tmp_path: Path) -> None:
    folders = tmp_path / "together", tmp_path / "apart", tmp_path / "laden"
    for folder, ranks, messages in zip(folders, (1, 2, 2), (1, 1, 3), strict=True):
        write_pair(folder, ranks, messages)
    assert [len(read_manifest(folder).channels) for folder in folders] == [0, 1, 3]
    first, following = measure_post_overhead(*folders, 3, "cpu")
    assert 0 <= first < 0.5
    assert 0 <= following < 0.5


def test_a_program_that_fails_ends_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(
        LaunchError, match=r"the process that measures a program failed: .*rank_000\.py"
    ):
        measure_in_process("whole", tmp_path, "cpu", 0.1)
