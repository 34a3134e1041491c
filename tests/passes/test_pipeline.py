"""From an ONNX file to a plan, on small models of the zoo."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from autopipe.configs.configuration import load_configuration, resolve_cluster
from autopipe.configs.zoo import build, configure
from autopipe.ir.errors import ConfigurationError, InfeasibleError, ModelError
from autopipe.ir.problem import Mode
from autopipe.passes.pipeline import Request, make_plan, pass_names, reopen_plan
from autopipe.passes.placement.data_parallel import DataParallel
from autopipe.passes.placement.pipedream import PipeDream
from autopipe.passes.schedule.published.base import GPipe
from autopipe.passes.schedule.published.one_f_one_b import OneForwardOneBackward


def cluster(devices):
    return resolve_cluster(
        load_configuration(words={"--gpus": str(devices), "--cluster": "a100-80gb"})
    )


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


def baked_model(path, batch, expanded=False):
    """x W, with the batch in the file's shapes; with `expanded`, a constant that differs from
    sample to sample.
    """
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    offset = numpy_helper.from_array(np.arange(batch, dtype=np.float32).reshape(batch, 1), "offset")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], "product")]
    nodes.append(
        helper.make_node(
            "Add" if expanded else "Relu", ["h", "offset"] if expanded else ["h"], ["y"], "last"
        )
    )
    shape = [batch, 4]
    graph = helper.make_graph(
        nodes,
        "baked",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [weight, offset] if expanded else [weight],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path
    )
    return path


def request(model, devices=4, **given):
    return Request(model, cluster(devices), PipeDream(), OneForwardOneBackward(), **given)


class Recorder:
    def __init__(self):
        self.names = []

    def started(self, name):
        self.names.append(name)

    def finished(self, name, value, seconds):
        assert value is not None


def test_a_plan_holds_what_was_decided(gpt):
    recorder = Recorder()
    planned = make_plan(request(gpt, batch_size=32, micro_batches=8), recorder)
    plan = planned.plan
    problem = planned.problem
    summary = planned.plan.summary
    assert tuple(dict.fromkeys(recorder.names)) == pass_names(request(gpt))
    assert tuple(name for name, _ in summary.search_time_s) == pass_names(request(gpt))
    assert (problem.batch_size, problem.micro_batches, problem.mode) == (32, 8, Mode.TRAIN)
    assert (summary.micro_batches, summary.micro_batch_size, summary.devices) == (8, 4, 4)
    assert (summary.stages, summary.depth) == (len(plan.placement.stages), 4)
    assert plan.graph_digest == problem.graph.digest()
    assert summary.step_time_s == planned.timeline.end
    assert summary.samples_per_s == pytest.approx(32 / planned.timeline.end)
    assert summary.peak_memory_bytes == planned.timeline.peak_memory
    assert 0 < summary.lower_bound_s <= summary.step_time_s


def test_equal_requests_make_equal_plans(gpt):
    first = make_plan(request(gpt))
    second = make_plan(request(gpt))
    assert first.digest == second.digest
    assert first.timeline == second.timeline
    assert first.digest != make_plan(request(gpt, batch_size=8)).digest


def test_a_schedulers_plan_differs_by_its_schedule_alone(gpt):
    one = request(gpt)
    other = dataclasses.replace(request(gpt), scheduler=GPipe())
    first = make_plan(one).plan
    second = make_plan(other).plan
    assert first.placement == second.placement
    assert first.schedule != second.schedule
    assert max(first.summary.peak_memory_bytes) < max(second.summary.peak_memory_bytes)


def test_inference_runs_forwards_alone(gpt):
    planned = make_plan(request(gpt, mode=Mode.INFER))
    assert {task.phase.value for order in planned.plan.schedule.tasks for task in order} == {"F"}
    assert planned.plan.mode == "infer"


def test_a_batch_is_divided_as_the_strategy_needs(gpt):
    # One stage gains nothing by several micro-batches but memory; those of 4 samples can still be
    # shared by 4 replicas.
    free = dataclasses.replace(request(gpt), strategy=DataParallel())
    planned = make_plan(free)
    assert (planned.plan.summary.micro_batches, planned.plan.summary.micro_batch_size) == (1, 16)
    peaks = {
        count: max(
            make_plan(
                dataclasses.replace(free, batch_size=16, micro_batches=count)
            ).timeline.peak_memory
        )
        for count in (1, 2, 4)
    }
    assert peaks[1] > peaks[2] > peaks[4]
    for count in (2, 4):
        tight = make_plan(dataclasses.replace(free, memory_limit=peaks[count]))
        assert tight.plan.summary.micro_batches == count
    with pytest.raises(InfeasibleError, match="over the limit"):
        make_plan(dataclasses.replace(free, memory_limit=1000))
    with pytest.raises(InfeasibleError, match="cannot split"):
        make_plan(dataclasses.replace(request(gpt, batch_size=6), strategy=DataParallel()))


def test_a_baked_batch_is_the_step(tmp_path):
    planned = make_plan(request(baked_model(tmp_path / "m.onnx", 8), devices=2))
    assert (planned.problem.batch_size, planned.problem.micro_batches) == (8, 8)
    assert planned.problem.graph.inputs[0].shape == (1, 4)


def test_a_batch_baked_to_one_sample_makes_micro_batches_of_one(tmp_path):
    planned = make_plan(request(baked_model(tmp_path / "m.onnx", 1), devices=2, batch_size=64))
    assert (planned.problem.micro_batches, planned.problem.micro_batch_size) == (64, 1)


def test_a_batch_that_cannot_be_cut_is_left_whole(tmp_path):
    planned = make_plan(
        request(baked_model(tmp_path / "m.onnx", 8, expanded=True), devices=2, batch_size=16)
    )
    assert (planned.problem.micro_batches, planned.problem.micro_batch_size) == (2, 8)


def test_indivisible_batches_are_refused(gpt):
    with pytest.raises(ConfigurationError, match="3 micro-batches do not divide"):
        make_plan(request(gpt, batch_size=8, micro_batches=3))


def test_what_the_strategy_refuses_is_said_before_what_does_not_divide(gpt):
    refused = dataclasses.replace(
        request(gpt, batch_size=16, micro_batches=8), strategy=PipeDream(max_stages=0)
    )
    with pytest.raises(ConfigurationError, match="max_stages is 0"):
        make_plan(refused)


def test_training_without_a_loss_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="loss"):
        make_plan(request(baked_model(tmp_path / "m.onnx", 2), devices=1, mode=Mode.TRAIN))


def test_memory_limits_are_kept_or_refused_with_a_number(gpt):
    free = dataclasses.replace(request(gpt, batch_size=64, micro_batches=16), scheduler=GPipe())
    peak = max(make_plan(free).timeline.peak_memory)
    assert make_plan(dataclasses.replace(free, memory_limit=peak)).timeline.peak_memory
    # 1F1B fits where GPipe does not: the strategy finds a placement, the simulation refuses GPipe's
    # step.
    with pytest.raises(
        InfeasibleError, match=r"stage \d on device \d would need .* above the limit"
    ) as caught:
        make_plan(dataclasses.replace(free, memory_limit=peak * 3 // 4))
    assert "micro-batches" in caught.value.hint


def test_failures_name_the_pass_and_those_before_it(gpt, tmp_path):
    with pytest.raises(InfeasibleError, match="pass pipedream, after read, cost: "):
        make_plan(request(gpt, memory_limit=1000))
    (tmp_path / "no.onnx").write_bytes(b"no model")
    with pytest.raises(ModelError, match=r"no\.onnx"):
        make_plan(request(tmp_path / "no.onnx"))


def test_a_plan_is_reopened_on_its_own_model_only(gpt, tmp_path):
    planned = make_plan(request(gpt, batch_size=8, micro_batches=4))
    again = reopen_plan(request(gpt), planned.plan)
    assert (again.problem, again.timeline, again.digest) == (
        planned.problem,
        planned.timeline,
        planned.digest,
    )
    with pytest.raises(
        ConfigurationError,
        match="the plan is for mode train, but its configuration is for mode infer",
    ):
        reopen_plan(request(gpt, mode=Mode.INFER), planned.plan)
    with pytest.raises(
        ConfigurationError, match="the plan is for 4 devices, but its configuration is for 3"
    ):
        reopen_plan(request(gpt, devices=3), planned.plan)
    other = tmp_path / "other.onnx"
    build(
        configure(
            "gpt", {"layers": "2", "hidden": "32", "heads": "2", "sequence": "16", "loss": "true"}
        )
    ).save(other)
    with pytest.raises(ConfigurationError, match="was made for another model"):
        reopen_plan(request(other), planned.plan)
