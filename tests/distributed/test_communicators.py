"""What ranks ask NCCL for: communicators for members only, all before the first step and in one
order; messages in the order in which the other end posts them.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Optimizer
from autopipe.ir.schedule import Schedule
from tests.distributed.support.builder import Builder, mlp
from tests.distributed.support.pool import Pools
from tests.distributed.support.portions import random_order
from tests.distributed.support.recorded_nccl import Record, read_record, record_ranks
from tests.distributed.support.running import (
    assert_equal_steps,
    batch_of,
    expected_step,
    run_step,
    schedule_of,
    stage_graph,
    write,
)
from tests.distributed.support.shapes import problem_of, scheduled, tied_chain
from tests.distributed.test_steps import tied
from tests.distributed.test_unequal_micro_batches import PARTS, stage_of

pytestmark = pytest.mark.distributed

TIMEOUTS = ("--start-timeout", "50", "--step-timeout", "70")


def check(
    pools: Pools,
    folder: Path,
    placed: tuple[Graph, str, Placement],
    schedule: Schedule,
    optimizer: Optimizer,
) -> list[Record]:
    """A step as torch computes it, and what each rank asked for in it."""
    graph, loss, placement = placed
    ranks = placement.devices
    write(graph, placement, schedule, loss, folder, optimizer=optimizer)
    record_ranks(folder, ranks)
    batch = batch_of(graph, schedule.micro_batches)
    found = run_step(pools, folder, batch, *TIMEOUTS)
    assert_equal_steps(
        found, expected_step(graph, loss, folder, batch, schedule.micro_batches), 1e-9
    )
    records = [read_record(folder, rank) for rank in range(ranks)]
    for rank, record in enumerate(records):
        assert [each.ranks for each in record.made] == [each.ranks for each in records[0].made], (
            "one order on all"
        )
        own = {number for number, each in enumerate(record.made) if rank in each.ranks}
        assert [each.communicator for each in record.warm_up] == sorted(own), (
            "each is used once as soon as it is made"
        )
        assert {each.communicator for each in record.step} <= own
        for number, each in enumerate(record.made):
            assert each.timeout_s == 120
            assert each.device == "cpu"
            if number not in own:
                assert each.blocking is None
                continue
            assert each.blocking == 1
            carries = {
                use.messages > 0
                for use in (*record.warm_up, *record.step)
                if use.communicator == number
            }
            assert carries == {each.high_priority}, (
                "messages and collectives have communicators apart"
            )
            assert each.max_ctas == (4 if each.high_priority else None)
    return records


def messages(record: Record) -> list[int]:
    """How many go together, in order."""
    return [each.messages for each in record.step if each.messages]


@pytest.mark.parametrize("name", ["1f1b", "1f1b_plus", "chimera", "v_half", "zb_h1"])
def test_named_schedules(pools: Pools, tmp_path: Path, name: str) -> None:
    graph, loss = tied_chain(16)
    found = scheduled(name, problem_of(graph, loss, 8, 4))
    assert found is not None
    placement, schedule = found
    records = check(pools, tmp_path / "program", (graph, loss, placement), schedule, Optimizer())
    for rank, record in enumerate(records):
        paths = [each for each in record.made if each.high_priority and rank in each.ranks]
        assert len(paths) <= 2 * 3, "one for each direction and other rank"
        assert len(messages(record)) > len(paths)


@pytest.mark.parametrize("shard", [False, True])
def test_groups_inside_a_stage_and_sums_of_gradients(
    pools: Pools, tmp_path: Path, shard: bool
) -> None:
    """A table in the first and the last stage, and two ranks that share the batch of the stage
    between.
    """
    graph, loss, placement = tied()
    schedule = schedule_of(graph, placement, 3)
    records = check(
        pools, tmp_path / "program", (graph, loss, placement), schedule, Optimizer(shard=shard)
    )
    groups = [each.ranks for each in records[0].made if each.ranks in ([0, 3], [1, 2])]
    assert groups == [[0, 3], [1, 2]]
    assert [0, 1, 2, 3] not in [each.ranks for each in records[0].made], "no group has all ranks"


@pytest.mark.parametrize("sizes", [(1, 2, 4), (4, 1, 4), (2, 4, 2)])
def test_unequal_micro_batches(pools: Pools, tmp_path: Path, sizes: tuple[int, int, int]) -> None:
    """Parts of micro-batches travel alone."""
    graph, loss = mlp(3)
    stages = (
        stage_of(graph, nodes, (rank,), size)
        for rank, (nodes, size) in enumerate(zip(PARTS, sizes, strict=True))
    )
    placement = Placement(tuple(stages))
    schedule = random_order(Random(repr(placement)), stage_graph(graph, placement), 2)
    records = check(pools, tmp_path / "program", (graph, loss, placement), schedule, Optimizer())
    assert {each for record in records for each in messages(record)} == {1}


def test_what_a_task_sends_to_a_stage_goes_together(pools: Pools, tmp_path: Path) -> None:
    builder = Builder()
    left = builder.node("MatMul", builder.input((4, 4)), builder.parameter((4, 4)))
    right = builder.node("Tanh", left)
    loss = builder.mean_square(
        builder.node("MatMul", builder.node("Mul", left, right), builder.parameter((4, 4)))
    )
    graph = builder.graph(loss)
    placement = Placement(
        (Stage((0, 1), (0,), 4), Stage(tuple(range(2, len(graph.nodes))), (1,), 4))
    )
    schedule = schedule_of(graph, placement, 3)
    records = check(pools, tmp_path / "program", (graph, loss, placement), schedule, Optimizer())
    assert [messages(record) for record in records] == [[2] * 6] * 2, (
        "two values there and two gradients back"
    )
