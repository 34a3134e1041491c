"""The plan that is chosen: kept between runs, in limited time, with what is left out."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest

from autopipe.ir.errors import InfeasibleError, InternalError
from autopipe.ir.files import JsonRecord
from autopipe.ir.plan import plan_digest
from autopipe.passes.auto import candidates as budget
from autopipe.passes.auto.choose import choose_plan, search_plans
from autopipe.passes.auto.plan_cache import JsonStore, cache_key, decode_error, encode_error
from autopipe.passes.pipeline import Observer, Request, Runner, read_request_model
from autopipe.passes.placement.piper.strategy import Piper
from autopipe.passes.schedule.published.base import GPipe
from autopipe.passes.schedule.published.zero_bubble import DualPipe
from tests.passes.auto.models import cluster, layers


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return layers(tmp_path_factory.mktemp("model") / "layers.onnx", count=4, width=512)


def request_of(model, **given):
    return Request(
        model,
        **{"cluster": cluster(2), "strategy": None, "scheduler": None, "batch_size": 8, **given},
    )


class Recorder(Observer):
    def __init__(self):
        self.names = []
        self.steps = []

    def started(self, name):
        self.names.append(name)

    def improved(self, step_s, bound_s):
        self.steps.append((step_s, bound_s))


@pytest.fixture(scope="module")
def fresh(model, tmp_path_factory):
    store = JsonStore(tmp_path_factory.mktemp("answers"))
    heard = Recorder()
    return choose_plan(request_of(model), heard, store), store, heard


def test_incumbents_get_better_and_none_is_below_its_bound(fresh):
    found, _, heard = fresh
    steps = [step_s for step_s, _ in heard.steps]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] == found.plan.summary.step_time_s
    assert all(bound_s <= step_s * (1 + 1e-9) for step_s, bound_s in heard.steps)


def test_a_kept_answer_is_the_one_that_was_found(fresh, model):
    found, store, _ = fresh
    heard = Recorder()
    again = choose_plan(request_of(model), heard, store)
    assert "pase" not in heard.names, "nothing is searched"
    assert again.digest == found.digest == plan_digest(again.plan)
    assert again.request == found.request
    summaries = [
        dataclasses.replace(each.plan.summary, search_time_s=()) for each in (again, found)
    ]
    assert summaries[0] == summaries[1]
    assert dataclasses.replace(again.plan, summary=found.plan.summary) == found.plan
    assert again.timeline == found.timeline


@pytest.mark.parametrize(
    "damage",
    [
        lambda each: each.update(step_time_s=1e-9),
        lambda each: each.update(graph_digest="0" * 64),
        lambda each: each["decided"].update(micro_batches=3),
        lambda each: each.pop("decided"),
        lambda each: each["decided"]["placement"]["stages"][0].update(devices=[7]),
        lambda each: each["decided"]["placement"]["stages"][0].update(nodes=[[0, 10**6]]),
        lambda each: each["chosen"]["choice"].update(strategy="none such"),
        lambda each: each["chosen"]["choice"].update(options={"none such": "1"}),
        lambda each: each.update(chosen=[]),
        lambda each: each.update(schedule={"micro_batches": 1, "orders": [], "devices": [0, 0]}),
    ],
)
def test_an_answer_that_is_not_right_is_searched_anew(fresh, model, tmp_path, monkeypatch, damage):
    found, kept, _ = fresh
    (path,) = kept.folder.iterdir()
    document = json.loads(path.read_text())
    damage(document)
    (tmp_path / path.name).write_text(json.dumps(document))
    monkeypatch.setattr("autopipe.passes.auto.choose._search_and_choose", lambda *_: found)
    assert choose_plan(request_of(model), None, JsonStore(tmp_path)) is found
    assert (
        json.loads((tmp_path / path.name).read_text())["step_time_s"]
        == found.plan.summary.step_time_s
    )


def test_answers_are_kept_by_what_they_follow_from(model, tmp_path):
    def key(request):
        return cache_key(request, read_request_model(request, Runner()))

    other = layers(tmp_path / "other.onnx", count=4, width=256)
    moved = layers(tmp_path / "moved.onnx", count=4, width=512)
    plain = request_of(model)
    assert key(plain) == key(request_of(moved)) == key(request_of(model, time_limit=3.0))
    others = [
        request_of(other),
        request_of(model, batch_size=16),
        request_of(model, precision="bf16"),
        request_of(model, seed=1),
        request_of(model, memory_limit=10**9),
        dataclasses.replace(plain, cluster=cluster(4)),
        dataclasses.replace(plain, cluster=cluster(2, "a100-80gb")),
    ]
    assert len({key(plain), *map(key, others)}) == 8


@pytest.mark.parametrize("cores", [1, 3])
def test_other_processes_come_to_the_same_plan(fresh, model, monkeypatch, cores):
    monkeypatch.setattr("autopipe.passes.auto.choose.free_cores", lambda: cores)
    found = choose_plan(request_of(model)).plan
    other = fresh[0].plan
    times = {"search_time_s": ()}
    assert dataclasses.replace(found.summary, **times) == dataclasses.replace(
        other.summary, **times
    )
    assert dataclasses.replace(found, summary=other.summary) == other


def test_no_time_gives_the_first_plan_there_is(model, tmp_path):
    store = JsonStore(tmp_path)
    found = choose_plan(request_of(model, time_limit=1e-6), None, store)
    assert found.plan.summary.step_time_s > 0
    assert len(found.plan.alternatives) == 1
    assert not list(tmp_path.iterdir()), "the best may be another"


def test_time_ends_the_search_with_the_best_so_far(model):
    tried = []
    for limit in (2.0, 40.0, 1e9):
        tick = itertools.count().__next__  # The clock goes on by a second whenever it is looked at.
        tried.append(search_plans(request_of(model, time_limit=limit), Runner(), tick))
    assert len(tried[0].trials) < len(tried[1].trials) < len(tried[2].trials)
    names = [[each.candidate for each in one.trials] for one in tried]
    assert names[2][: len(names[1])] == names[1]
    assert math.inf > tried[0].step_s >= tried[1].step_s >= tried[2].step_s


def test_what_would_take_long_is_left_out_and_said(model, monkeypatch):
    monkeypatch.setattr(budget, "_MAX_SIZE", {"pase": 1, "tepdist": 1})
    found = choose_plan(request_of(model))
    refused = {
        each.choice.strategy: each.refused for each in found.plan.alternatives if each.refused
    }
    assert refused["pase"] == (
        "skipped: pase would search long for 10 operators on 2 devices; name it to have it searched"
    )


def test_large_placements_are_simulated_only_where_they_can_win(model, monkeypatch, fresh):
    monkeypatch.setattr(budget, "_MAX_TASKS", 0)
    found = choose_plan(request_of(model))
    assert found.digest == fresh[0].digest
    left = [
        each
        for each in found.plan.alternatives
        if (each.refused or "").startswith("skipped: no schedule")
    ]
    assert left
    assert all(each.lower_bound_s >= found.plan.summary.step_time_s * (1 - 1e-9) for each in left)
    assert all(math.isfinite(each.lower_bound_s) for each in left), (
        "one placement of several has one bound"
    )


class Failing(Recorder):
    """Hears of mistakes."""

    def __init__(self):
        super().__init__()
        self.failures = []

    def failed(self, error):
        self.failures.append(error)


@pytest.mark.parametrize("pieces", ["a strategy", "a scheduler"])
def test_a_mistake_of_ours_ends_one_candidate_and_is_told(model, tmp_path, monkeypatch, pieces):
    """The plan is that of the others; it is searched again, where the mistake may have been
    mended.
    """

    def fail(*_):
        raise ZeroDivisionError("no such luck")

    monkeypatch.setattr(*((Piper, "run") if pieces == "a strategy" else (GPipe, "run")), fail)
    monkeypatch.setattr("autopipe.passes.auto.choose.free_cores", lambda: 1)
    store = JsonStore(tmp_path)
    heard = Failing()
    found = choose_plan(request_of(model), heard, store)
    told = {str(error).partition(",")[0] for error in heard.failures}
    name = "piper" if pieces == "a strategy" else "gpipe"
    assert f"pass {name}" in told, "schedules that begin with gpipe's fail with it"
    assert any("no such luck" in (row.refused or "") for row in found.plan.alternatives)
    assert not list(tmp_path.rglob("*.json"))

    def refuse(error):
        raise error

    heard.failed = refuse
    with pytest.raises(InternalError, match="no such luck"):
        choose_plan(request_of(model), heard)


def test_a_mistake_of_ours_is_told_by_other_processes_too():
    told = decode_error(
        JsonRecord(encode_error(InternalError("internal error: x", "rerun", "pass piper")), "piper")
    )
    assert type(told) is InternalError
    assert (told.message, told.hint, told.where) == ("internal error: x", "rerun", "pass piper")


def test_a_named_schedule_is_refused_for_its_own_reason(model):
    # Two micro-batches are too few for DualPipe on two devices; no strategy that places one
    # pipeline is tried.
    heard = Recorder()
    with pytest.raises(
        InfeasibleError,
        match="requires an even number of micro-batches, 4 or more, but the step has 2",
    ):
        choose_plan(request_of(model, scheduler=DualPipe(), micro_batches=2), heard)
    assert not {"data_parallel", "pipedream", "tepdist"} & set(heard.names)
