"""Which ways to a placement are tried, and what naming one of them means."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from autopipe.ir.problem import Constraint, Mode, Optimizer
from autopipe.passes.auto.candidates import Candidate, candidate_strategies, candidates
from autopipe.passes.pipeline import Request
from autopipe.passes.placement.tessel_shapes import TesselShapes
from autopipe.passes.registry import strategy_names
from autopipe.passes.schedule.published.zero_bubble import DualPipe, DualPipeV, ZeroBubbleH1
from tests.passes.auto.models import cluster

REQUEST = Request(Path("model.onnx"), cluster(2), None, None)


def test_every_strategy_is_tried_but_those_that_follow_what_somebody_writes():
    found = [each.strategy.name for each in candidates(REQUEST)]
    assert set(found) == set(strategy_names()) - {"explicit", "manual"}


def test_constraints_are_followed_by_manual_first():
    asked = dataclasses.replace(REQUEST, constraints=(Constraint("*", stage=0),))
    assert next(each.strategy.name for each in candidates(asked)) == "manual"


def test_no_two_candidates_are_the_same():
    found = list(candidates(REQUEST))
    assert len(set(found)) == len(found)


def test_recomputation_is_weighed_at_once_where_memory_may_be_short():
    found = {
        each.strategy.name for each in candidates(REQUEST, short=True) if each.recompute == "auto"
    }
    assert found == {"tepdist"}
    assert all(each.recompute == "none" for each in candidates(REQUEST))


def test_a_candidate_settles_what_the_request_leaves_open():
    candidate = Candidate(TesselShapes("m"), micro_batches=8, recompute="auto", shard=True)
    settled = candidate.apply_to(REQUEST)
    assert (settled.strategy, settled.micro_batches, settled.recompute) == (
        TesselShapes("m"),
        8,
        "auto",
    )
    assert settled.optimizer == Optimizer(shard=True)


def test_what_the_request_says_stands():
    asked = dataclasses.replace(
        REQUEST, recompute="full", micro_batches=4, optimizer=Optimizer(shard=True)
    )
    settled = Candidate(TesselShapes()).apply_to(asked)
    assert (settled.recompute, settled.micro_batches, settled.optimizer.shard) == ("full", 4, True)


def test_a_choice_says_what_to_name():
    choice = Candidate(TesselShapes("v", stages_per_rank=2, style="v"), 8, shard=True).choice(
        REQUEST, "zb_v"
    )
    assert choice.options == (("shape", "v"), ("stages_per_rank", "2"), ("style", "v"))
    assert (choice.schedule, choice.micro_batches, choice.recompute, choice.shard) == (
        "zb_v",
        8,
        "none",
        True,
    )


def test_strategies_are_told_by_name_without_their_candidates():
    names = tuple(dict.fromkeys(each.strategy.name for each in candidates(REQUEST)))
    assert candidate_strategies(REQUEST) == names


@pytest.mark.parametrize(
    ("scheduler", "forms"),
    [
        (DualPipe(), {("tessel_shapes", "x", 1, "loop"), ("grid", None, 1, "loop")}),
        (DualPipeV(), {("tessel_shapes", "v", 2, "v"), ("grid", None, 2, "v")}),
    ],
    ids=["dualpipe", "dualpipe_v"],
)
def test_a_named_schedule_leaves_the_forms_that_it_runs(scheduler, forms):
    found = candidates(dataclasses.replace(REQUEST, scheduler=scheduler))
    told = {
        (
            name,
            getattr(each, "shape", None),
            getattr(each, "stages_per_rank", 1),
            getattr(each, "style", "loop"),
        )
        for each, name in ((each.strategy, each.strategy.name) for each in found)
    }
    assert told == forms


def test_a_chain_schedule_leaves_out_several_stages_per_device():
    found = [
        each.strategy for each in candidates(dataclasses.replace(REQUEST, scheduler=ZeroBubbleH1()))
    ]
    assert {each.name for each in found} == set(strategy_names()) - {"explicit", "manual"}
    assert all(getattr(each, "stages_per_rank", 1) == 1 for each in found)


def test_inference_runs_forwards_on_any_form():
    request = dataclasses.replace(REQUEST, scheduler=DualPipe(), mode=Mode.INFER)
    assert list(candidates(request)) == list(
        candidates(dataclasses.replace(REQUEST, mode=Mode.INFER))
    )
