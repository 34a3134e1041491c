"""Strategies that choose the micro-batches of their stages: asked once, with the largest there can
be.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import ClassVar

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from autopipe.configs.configuration import load_configuration, resolve_cluster
from autopipe.configs.zoo import build, configure
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.plan import read_plan, write_plan
from autopipe.ir.schedule import Phase, StageGraph
from autopipe.passes.batching import Division
from autopipe.passes.lower.deadlock_check import prove_no_deadlock
from autopipe.passes.lower.lower import lower
from autopipe.passes.pipeline import Request, make_plan, reopen_plan
from autopipe.passes.schedule.published.base import GPipe
from autopipe.passes.schedule.published.one_f_one_b import (
    KForwardsKBackwards,
    OneForwardOneBackward,
)
from autopipe.passes.schedule.tessel.model import SearchOptions
from autopipe.passes.schedule.tessel.scheduler import Tessel
from autopipe.passes.schedule.tessel.search import search
from autopipe.passes.schedule.tessel.stage_blocks import (
    busiest_seconds,
    stage_blocks,
    stage_schedule,
)


@dataclasses.dataclass(frozen=True)
class Chooser:
    """Equal numbers of nodes on each device, with the micro-batches that it is told to choose."""

    name: ClassVar[str] = "chooser"

    sizes: tuple[int, ...] = ()
    asked: list = dataclasses.field(default_factory=list)

    def division(self, graph):
        return Division.OWN

    def requires(self, problem):
        pass

    def run(self, problem):
        self.asked.append((problem.micro_batch_size, problem.micro_batch_sizes))
        count = len(self.sizes)
        ends = [len(problem.graph.nodes) * place // count for place in range(count + 1)]
        nodes = [tuple(range(low, high)) for low, high in itertools.pairwise(ends)]
        most = problem.micro_batch_size
        sizes = [min(size, most) for size in self.sizes]
        return Placement(
            tuple(
                Stage(own, (rank,), size)
                for rank, (own, size) in enumerate(zip(nodes, sizes, strict=True))
            )
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "model.onnx"
    build(configure("two-branch", {"loss": "true"})).save(path)
    return path


def request(model, sizes, scheduler=None, **given):
    cluster = resolve_cluster(
        load_configuration(words={"--gpus": str(len(sizes)), "--cluster": "a100-80gb"})
    )
    return Request(
        model,
        cluster,
        Chooser(sizes),
        scheduler or KForwardsKBackwards(),
        **{"batch_size": 16, **given},
    )


@pytest.mark.parametrize("sizes", [(1, 2, 4), (8, 8), (2, 16), (1, 1)])
def test_the_problem_becomes_that_of_the_largest(model, sizes, tmp_path):
    asked = request(model, sizes)
    planned = make_plan(asked)
    assert asked.strategy.asked == [(16, (1, 2, 4, 8, 16))]
    summary = planned.plan.summary
    largest = max(sizes)
    assert (summary.micro_batch_size, summary.micro_batches) == (largest, 16 // largest)
    assert tuple(stage.micro_batch_size for stage in planned.plan.placement.stages) == sizes
    again = reopen_plan(dataclasses.replace(asked, batch_size=16), planned.plan)
    assert again.digest == planned.digest
    assert again.timeline == planned.timeline
    write_plan(tmp_path, planned.plan, planned.timeline)
    assert dataclasses.replace(read_plan(tmp_path), model="") == dataclasses.replace(
        planned.plan, model=""
    )
    assert 0 < summary.lower_bound_s <= summary.step_time_s
    per_sample = math.fsum(span.end - span.start for span in planned.timeline.spans)
    assert per_sample <= len(sizes) * summary.step_time_s


def test_the_batch_is_a_round_that_all_sizes_divide(model):
    assert make_plan(request(model, (4, 6), batch_size=24)).problem.micro_batch_size == 12


@pytest.mark.parametrize("given", [{"micro_batches": 4}, {"micro_batch_size": 4}])
def test_what_the_user_fixes_leaves_no_choice(model, given):
    asked = request(model, (4, 4), **given)
    assert make_plan(asked).problem.micro_batch_size == 4
    assert asked.strategy.asked == [(4, ())]


@pytest.mark.parametrize("scheduler", [OneForwardOneBackward(), GPipe()])
def test_schedules_of_equal_micro_batches_say_so(model, scheduler):
    with pytest.raises(
        InfeasibleError,
        match=r"one micro-batch size for all stages, but stage 0 uses 1 sample",
    ):
        make_plan(request(model, (1, 4), scheduler))


def test_a_searched_schedule_is_no_longer_than_the_greedy_one(model):
    greedy = make_plan(request(model, (1, 2, 4))).plan.summary
    searched = make_plan(request(model, (1, 2, 4), Tessel(1.0))).plan.summary
    assert searched.lower_bound_s <= searched.step_time_s <= greedy.step_time_s


def test_a_searched_order_of_split_backwards_becomes_a_program_that_can_run(model):
    planned = make_plan(request(model, (1, 2, 4)))
    problem = planned.problem
    placement = planned.plan.placement
    prediction = planned.plan.prediction
    graph = StageGraph.of(problem, placement)
    blocks = stage_blocks(
        graph, prediction, True, busiest_seconds(graph, prediction) / 100, split=True
    )
    schedule = stage_schedule(blocks, search(blocks.graph, 4, SearchOptions(0.5)), graph, 4)
    schedule.verify(graph, train=True)
    assert {task.phase for order in schedule.tasks for task in order} == set(Phase) - {
        Phase.BACKWARD
    }
    prove_no_deadlock(lower(problem.graph, placement, schedule, problem.loss))


def test_a_strategy_is_asked_again_where_so_few_samples_leave_other_operators(tmp_path):
    # A computed bias is expanded to the batch, which is nothing to do for one sample.
    initial = {
        "w": np.ones((4, 4), np.float32),
        "bias": np.ones((1, 4), np.float32),
        **{
            name: np.array([value], np.int64)
            for name, value in (("four", 4), ("zero", 0), ("one", 1))
        },
    }
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Slice", ["shape", "zero", "one"], ["samples"]),
        helper.make_node("Concat", ["samples", "four"], ["target"], axis=0),
        helper.make_node("MatMul", ["x", "w"], ["h"], "product"),
        helper.make_node("MatMul", ["bias", "w"], ["row"], "row"),
        helper.make_node("Expand", ["row", "target"], ["wide"], "expand"),
        helper.make_node("Add", ["h", "wide"], ["y"], "sum"),
        helper.make_node("ReduceMean", ["y"], ["loss"], "mean", keepdims=0),
    ]
    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)]
        for name, shape in (("x", ["n", 4]), ("loss", []))
    )
    tensors = [numpy_helper.from_array(array, name) for name, array in initial.items()]
    graph = helper.make_graph(nodes, "biased", inputs, outputs, tensors)
    path = tmp_path / "biased.onnx"
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path
    )
    asked = request(path, (1, 1), batch_size=8)
    planned = make_plan(asked)
    assert asked.strategy.asked == [(8, (1, 2, 4, 8)), (1, (1,))]
    assert "Expand" not in {node.op for node in planned.problem.graph.nodes}
    assert reopen_plan(asked, planned.plan).digest == planned.digest
