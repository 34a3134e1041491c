"""Orders of published schedules against torch.distributed.pipelining, if it has the same
schedule.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as theirs

from autopipe.ir.schedule import Phase, Schedule, Task
from autopipe.passes.registry import scheduler_class
from tests.passes.schedule.published.layouts import chain_on, down, suited
from tests.passes.schedule.published.measuring import measure

DEVICES = pytest.mark.parametrize("devices", [1, 2, 3, 4, 6])


def orders_of(kind, devices, chunks, micro_batches):
    """Return the orders that torch makes for all ranks, as tasks, without communication and idle
    slots.
    """
    rounds = max(1, micro_batches // devices)
    settings = SimpleNamespace(
        pp_group_size=devices,
        n_local_stages=chunks,
        num_stages=devices * chunks,
        _stages=[None] * chunks,
        _n_microbatches=micro_batches,
        number_of_rounds=rounds,
        microbatches_per_round=micro_batches // rounds,
    )
    actions = (kind._calculate_single_rank_operations(settings, rank) for rank in range(devices))
    return tuple(
        tuple(
            Task.parse(str(part))
            for action in order
            if action
            for part in action.sub_actions or [action]
        )
        for order in actions
    )


def orders_of_autopipe(name, graph, micro_batches):
    return scheduler_class(name)().order(graph, micro_batches).tasks


def without_weights(orders):
    """Return the orders without weight gradients."""
    return tuple(
        tuple(task for task in order if task.phase is not Phase.WEIGHT_GRADIENT) for order in orders
    )


@pytest.mark.parametrize("devices", [2, 3, 4, 6])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_interleaved_1f1b_equals_torchs(devices, chunks, groups):
    found = orders_of_autopipe(
        "interleaved_1f1b", chain_on(down(devices, chunks)), groups * devices
    )
    assert found == orders_of(theirs.ScheduleInterleaved1F1B, devices, chunks, groups * devices)


@DEVICES
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 4, 9])
def test_looped_bfs_equals_torchs_except_for_the_order_of_backwards(devices, chunks, micro_batches):
    # Torch runs the backwards of a stage from the last micro-batch to the first. Autopipe starts
    # with the first, as in GPipe.
    turned = tuple(
        tuple(
            Task(task.stage, task.phase, micro_batches - 1 - task.micro_batch)
            if task.phase is Phase.BACKWARD
            else task
            for task in order
        )
        for order in orders_of(theirs.ScheduleLoopedBFS, devices, chunks, micro_batches)
    )
    assert (
        orders_of_autopipe("looped_bfs", chain_on(down(devices, chunks)), micro_batches) == turned
    )


@DEVICES
@pytest.mark.parametrize("more", [0, 3, 12])
def test_dualpipe_v_equals_torchs(devices, more):
    micro_batches = 2 * devices + more
    found = orders_of_autopipe("dualpipe_v", suited("dualpipe_v", devices), micro_batches)
    assert found == orders_of(theirs.ScheduleDualPipeV, devices, 2, micro_batches)


@DEVICES
@pytest.mark.parametrize("more", [0, 3, 12])
def test_zb_h1_equals_torchs_interleaved_zero_bubble_with_one_stage(devices, more):
    micro_batches = devices + more
    found = orders_of_autopipe("zb_h1", suited("zb_h1", devices), micro_batches)
    assert found == orders_of(theirs.ScheduleInterleavedZeroBubble, devices, 1, micro_batches)


@DEVICES
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 11, 24])
def test_zb_v_equals_torchs_except_for_weight_gradients_at_the_end(devices, micro_batches):
    graph = suited("zb_v", devices)
    mine = orders_of_autopipe("zb_v", graph, micro_batches)
    orders = orders_of(theirs.ScheduleZBVZeroBubble, devices, 2, micro_batches)
    assert without_weights(mine) == without_weights(orders)
    # Torch runs each weight gradient at a fixed position. Autopipe runs weight gradients in idle
    # slots, which is never slower, and faster for few micro-batches.
    steps = [
        measure(Schedule(micro_batches, each), graph, {"F": 1, "I": 1, "W": 1}).makespan
        for each in (mine, orders)
    ]
    assert steps[0] <= steps[1]
    if devices <= micro_batches < 2 * devices - 1:
        assert steps[0] < steps[1]
