"""Plans chosen for small models on few and odd devices, in inference, under constraints."""

from __future__ import annotations

import dataclasses

import pytest

from autopipe.ir.errors import OutOfMemoryError
from autopipe.ir.problem import Constraint, Mode, Optimizer
from autopipe.passes.auto.choose import choose_plan
from autopipe.passes.pipeline import Request, make_plan
from autopipe.passes.placement.data_parallel import DataParallel
from autopipe.passes.placement.tessel_shapes import TesselShapes
from autopipe.passes.schedule.published.base import GPipe
from autopipe.passes.schedule.published.one_f_one_b import OneForwardOneBackward
from tests.passes.auto.models import cluster, layers

WIDE = 2048
"""Units of a layer, for 16 MiB of parameters."""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return layers(tmp_path_factory.mktemp("models") / "small.onnx", 2)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return layers(tmp_path_factory.mktemp("models") / "wide.onnx", 2, WIDE)


def asked(path, devices, **more):
    return Request(path, cluster(devices), None, None, **more)


@pytest.mark.parametrize(("devices", "mode"), [(1, Mode.TRAIN), (3, Mode.INFER)])
def test_no_named_choice_is_faster(small, devices, mode):
    request = asked(small, devices, mode=mode)
    found = choose_plan(request)
    assert found.problem.mode is mode
    for strategy in (DataParallel(), TesselShapes("v")):
        for scheduler in (OneForwardOneBackward(), GPipe()):
            if devices == 3 and isinstance(strategy, DataParallel):
                continue  # It wants samples that three divide.
            named = make_plan(dataclasses.replace(request, strategy=strategy, scheduler=scheduler))
            assert named.problem.batch_size == found.problem.batch_size
            assert found.timeline.end <= named.timeline.end * (1 + 1e-9)


def test_what_came_of_a_choice_is_what_naming_it_gives(small):
    request = asked(small, 2)
    found = choose_plan(request)
    best = min(found.plan.alternatives, key=lambda each: each.step_time_s or 1.0)
    assert best.step_time_s == found.timeline.end
    named = dataclasses.replace(
        request,
        strategy=found.request.strategy,
        scheduler=found.request.scheduler,
        micro_batches=best.choice.micro_batches,
        optimizer=Optimizer(shard=best.choice.shard),
    )
    if best.choice.micro_batches is not None:
        named = dataclasses.replace(named, batch_size=found.problem.batch_size)
    assert make_plan(named).digest == found.digest


def test_fewer_samples_than_devices(small):
    found = choose_plan(asked(small, 4, batch_size=2))
    assert found.problem.batch_size == 2


def test_constraints_are_obeyed(small):
    found = choose_plan(
        asked(
            small, 2, constraints=(Constraint("product0", stage=0), Constraint("product1", stage=1))
        )
    )
    names = [
        {found.problem.graph.nodes[node].name for node in stage.nodes}
        for stage in found.plan.placement.stages
    ]
    first = next(index for index, each in enumerate(names) if "product0" in each)
    assert "product1" not in names[first]


def test_state_is_shared_where_one_device_cannot_hold_it(wide):
    parameters = 2 * WIDE * WIDE * 4
    request = asked(
        wide, 2, optimizer=Optimizer("adamw"), memory_limit=7 * parameters // 2, batch_size=8
    )
    with pytest.raises(OutOfMemoryError):
        make_plan(
            dataclasses.replace(request, strategy=DataParallel(), scheduler=OneForwardOneBackward())
        )
    found = choose_plan(request)
    tried = [each for each in found.plan.alternatives if each.choice.strategy == "data_parallel"]
    assert [each.choice.shard for each in tried if each.step_time_s] == [True]
    assert max(found.timeline.peak_memory) <= request.memory_limit
