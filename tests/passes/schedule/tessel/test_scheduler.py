"""The scheduler `tessel` on real models: never worse than published schedules, within memory
limits, with correct proofs.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from autopipe.configs.configuration import load_configuration, resolve_cluster
from autopipe.configs.zoo import build, configure
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.plan import read_plan, write_plan
from autopipe.ir.problem import Mode
from autopipe.ir.schedule import Phase, Schedule, StageGraph, Task
from autopipe.passes.pipeline import Request, make_plan
from autopipe.passes.placement.pipedream import PipeDream
from autopipe.passes.schedule.limits import lower_bound
from autopipe.passes.schedule.published.base import GPipe
from autopipe.passes.schedule.published.one_f_one_b import OneForwardOneBackward
from autopipe.passes.schedule.simulate import simulate
from autopipe.passes.schedule.tessel.scheduler import Tessel, repeated_schedule

TESSEL = Tessel()


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "gpt.onnx"
    settings = {
        "layers": "4",
        "hidden": "32",
        "heads": "2",
        "sequence": "16",
        "vocabulary": "64",
        "loss": "true",
    }
    build(configure("gpt", settings)).save(path)
    return path


def request(model, scheduler=TESSEL, devices=4, **given):
    cluster = resolve_cluster(
        load_configuration(words={"--gpus": str(devices), "--cluster": "a100-80gb"})
    )
    return Request(model, cluster, PipeDream(), scheduler, **given)


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 3, 16])
@pytest.mark.parametrize("mode", list(Mode))
def test_no_step_is_longer_than_that_of_a_published_schedule(gpt, devices, micro_batches, mode):
    given = {"batch_size": micro_batches, "micro_batches": micro_batches, "mode": mode}
    searched, *published = (
        make_plan(request(gpt, scheduler, devices, **given)).plan.summary
        for scheduler in (Tessel(), OneForwardOneBackward(), GPipe())
    )
    assert all(searched.step_time_s <= other.step_time_s * (1 + 1e-9) for other in published)
    assert searched.lower_bound_s <= searched.step_time_s * (1 + 1e-9)
    assert all(other.lower_bound_s <= searched.step_time_s * (1 + 1e-9) for other in published)
    assert searched.gap == 0 if searched.optimal else 0 < searched.gap < 1


def phases_of(schedule):
    return {task.phase for order in schedule.tasks for task in order}


def test_backwards_are_split_if_this_shortens_the_step(gpt):
    steps = {}
    for micro_batches in (4, 64):
        given = {"batch_size": micro_batches, "micro_batches": micro_batches}
        searched, other = (
            make_plan(request(gpt, each, **given)).plan
            for each in (TESSEL, OneForwardOneBackward())
        )
        steps[micro_batches] = searched.summary.step_time_s / other.summary.step_time_s
        assert searched.schedule.proof.order == "tessel"
        assert (Phase.INPUT_GRADIENT in phases_of(searched.schedule)) is (micro_batches == 4)
    assert steps[4] < 0.95 < steps[64] <= 1 + 1e-9


@pytest.mark.parametrize(
    ("devices", "counts"), [(2, (3, 6, 12)), (2, (4, 8, 16, 32)), (3, (6, 12, 24)), (4, (4, 8, 16))]
)
def test_a_step_takes_no_longer_than_several_smaller_steps(gpt, devices, counts):
    """Split backwards save more than 5% of the step of 8 micro-batches on 2 devices, and less of
    16.
    """
    steps = {
        count: make_plan(
            request(gpt, devices=devices, batch_size=count, micro_batches=count)
        ).plan.summary.step_time_s
        for count in counts
    }
    for fewer, more in itertools.combinations(counts, 2):
        assert steps[more] <= more // fewer * steps[fewer] * (1 + 1e-9), (fewer, more)


@pytest.mark.parametrize(("ratios", "pipelines"), [((), ()), ((1, 2), ()), ((), (0, 1))])
def test_a_repeated_schedule_can_run(ratios, pipelines):
    edges = () if pipelines else ((0, 1),)
    graph = StageGraph(2, ((0,), (1,)), edges, pipelines, ratios)
    orders = []
    for stage in range(2):
        own = range(2 * graph.micro_batch_ratio_at(stage))
        numbers = [number for number in own if not pipelines or number % 2 == pipelines[stage]]
        orders.append(
            tuple(
                Task(stage, phase, number)
                for phase in (Phase.FORWARD, Phase.BACKWARD)
                for number in numbers
            )
        )
    schedule = Schedule(2, tuple(orders))
    schedule.verify(graph, train=True)
    repeated = repeated_schedule(schedule, 3, graph)
    assert repeated.micro_batches == 6
    repeated.verify(graph, train=True)


@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
def test_the_cost_of_splitting_is_considered(gpt, share):
    """Splitting makes the backward of each stage longer by the fraction `share`. A small fraction
    is worth it, a large one is not.
    """
    planned = make_plan(request(gpt, OneForwardOneBackward(), batch_size=4, micro_batches=4))
    placement = planned.plan.placement
    known = planned.plan.prediction
    stages = tuple(
        dataclasses.replace(each, split_s=share * each.backward_s) for each in known.stages
    )
    prediction = dataclasses.replace(known, stages=stages)
    schedule = TESSEL.run_with(planned.problem, placement, prediction)
    assert (Phase.INPUT_GRADIENT in phases_of(schedule)) is (share < 0.5)
    devices = [stage.devices for stage in placement.stages]
    step, whole = (
        simulate(each, devices, prediction).end for each in (schedule, planned.plan.schedule)
    )
    assert lower_bound(planned.problem, placement, prediction) <= step <= whole * (1 + 1e-9)
    load = max(each.forward_s + each.backward_s for each in stages)
    assert schedule.period is None or schedule.proof.lower_bound <= load * (1 + 1e-3), (
        "unsplit backwards are not longer"
    )


def test_a_steady_state_is_saved_and_read_with_its_proof(gpt, tmp_path):
    planned = make_plan(request(gpt, batch_size=64, micro_batches=64))
    schedule = planned.plan.schedule
    summary = planned.plan.summary
    assert summary.optimal and schedule.proof.lower_bound <= schedule.period
    assert 0 < schedule.proof.rounding < 0.001
    load = max(stage.forward_s + stage.backward_s for stage in planned.plan.prediction.stages)
    assert (
        load <= schedule.period * (1 + 1e-9)
        and schedule.period * (1 - schedule.proof.rounding) <= load
    )
    write_plan(tmp_path, planned.plan, planned.timeline)
    assert read_plan(tmp_path).schedule == schedule


def test_a_single_device_needs_no_search(gpt):
    schedule = make_plan(request(gpt, devices=1, batch_size=4, micro_batches=4)).plan.schedule
    assert (schedule.proof.order, schedule.proof.optimal, schedule.period) == ("1f1b", True, None)


def test_the_search_fits_in_memory_that_published_orders_exceed(gpt):
    planned = make_plan(request(gpt, OneForwardOneBackward(), batch_size=16, micro_batches=16))
    placement = planned.plan.placement
    prediction = planned.plan.prediction
    groups = tuple(stage.devices for stage in placement.stages)
    problem = dataclasses.replace(
        planned.problem, memory_limit=max(planned.timeline.peak_memory) - 1
    )
    steps = [
        simulate(scheduler.run(problem, placement), groups, prediction)
        for scheduler in (OneForwardOneBackward(), Tessel())
    ]
    assert [max(step.peak_memory) <= problem.memory_limit for step in steps] == [False, True]


def test_the_error_states_bytes_if_no_order_fits(gpt):
    with pytest.raises(InfeasibleError, match="over the limit"):
        make_plan(request(gpt, batch_size=16, micro_batches=16, memory_limit=100_000))


def test_equal_requests_find_equal_orders(gpt):
    first, second = (make_plan(request(gpt, batch_size=8, micro_batches=8)) for _ in range(2))
    assert first.digest == second.digest
    assert first.plan.schedule == second.plan.schedule
    other = make_plan(dataclasses.replace(request(gpt, batch_size=8, micro_batches=8), seed=7))
    assert other.plan.summary.step_time_s == pytest.approx(first.plan.summary.step_time_s, rel=0.01)
