"""The stated price of a change is what planning the edited placement gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopipe.configs.configuration import load_configuration, resolve_cluster
from autopipe.configs.zoo import build, configure
from autopipe.passes.explain import (
    Change,
    best_changes,
    move_changes,
    node_report,
    split_changes,
    stage_changes,
    what_if_requests,
    what_if_result,
)
from autopipe.passes.pipeline import PlanResult, Request, make_plan
from autopipe.passes.placement.explicit import explicit_strategy
from autopipe.passes.registry import scheduler_class, strategy_class

GPT = {
    "layers": "2",
    "hidden": "32",
    "heads": "2",
    "sequence": "16",
    "vocabulary": "64",
    "loss": "true",
}
PLANS = {
    "gpt, pipedream": ("gpt", GPT, "pipedream", "1f1b", 4),
    "gpt, data parallel": ("gpt", GPT, "data_parallel", "gpipe", 4),
    "gpt, searched": ("gpt", GPT, "tessel_shapes", "tessel", 2),
    "mmt, graphpipe": (
        "mmt",
        {"layers": "1", "branches": "2", "loss": "true"},
        "graphpipe",
        "kfkb",
        4,
    ),
}


@pytest.fixture(scope="module", params=PLANS)
def planned(request, tmp_path_factory) -> PlanResult:
    name, settings, strategy, schedule, devices = PLANS[request.param]
    path: Path = tmp_path_factory.mktemp("models") / f"{name}.onnx"
    build(configure(name, settings)).save(path)
    cluster = resolve_cluster(
        load_configuration(words={"--gpus": str(devices), "--cluster": "a100-80gb"})
    )
    return make_plan(
        Request(
            path, cluster, strategy_class(strategy)(), scheduler_class(schedule)(), batch_size=16
        )
    )


def forced(planned: PlanResult, price: Change) -> float:
    """The step of the edited placement, written down and planned."""
    strategy = explicit_strategy(planned.problem.graph, price.placement)
    problem = planned.problem
    request = replace(
        planned.request,
        strategy=strategy,
        batch_size=problem.batch_size,
        micro_batches=problem.micro_batches,
    )
    return make_plan(request).plan.summary.step_time_s


def test_prices_of_a_nodes_other_places_are_what_planning_them_gives(planned: PlanResult) -> None:
    problem = planned.problem
    placement = planned.plan.placement
    count = len(problem.graph.nodes)
    tried = 0
    for node in (count // 3, count // 2):
        splits = best_changes(planned, split_changes(problem, placement, node), wanted=1)
        moves = best_changes(planned, move_changes(problem, placement, node), wanted=1)
        prices = (*splits, *moves)
        for price in prices:
            if price.step_s is not None:
                assert forced(planned, price) == price.step_s, price.what
                tried += 1
    assert tried


def test_prices_of_a_stages_other_forms_are_what_planning_them_gives(planned: PlanResult) -> None:
    problem = planned.problem
    placement = planned.plan.placement
    prices = best_changes(
        planned, stage_changes(problem, placement, len(placement.stages) - 1), wanted=2
    )
    assert prices
    for price in prices:
        if price.step_s is not None:
            assert forced(planned, price) == price.step_s, price.what


def test_a_nodes_report_is_of_its_stage(planned: PlanResult) -> None:
    problem = planned.problem
    placement = planned.plan.placement
    stages = placement.stage_of()
    for node in range(0, len(problem.graph.nodes), 7):
        report = node_report(problem, placement, node)
        assert report.stage == stages[node]
        assert report.splits == placement.stages[report.stage].splits_of(node)
        assert {edge.value for edge in report.edges if edge.reads} == set(
            filter(None, problem.graph.nodes[node].inputs)
        )


def test_what_helps_is_a_plan_of_the_changed_request(planned: PlanResult) -> None:
    now = planned.plan.summary.samples_per_s
    for what, request in what_if_requests(planned):
        if "bandwidth" in what:
            found = what_if_result(planned, what, request, again=True)
            assert found.samples_per_s == make_plan(request).plan.summary.samples_per_s
            kept = what_if_result(planned, what, request, again=False)
            assert kept.samples_per_s is not None
            assert kept.samples_per_s >= now * (1 - 1e-9), "no slower on faster links"
        if "same size" in what:
            kept = what_if_result(planned, what, request, again=False)
            assert kept.samples_per_s is not None
            if planned.plan.summary.schedule != "tessel":
                assert kept.samples_per_s >= now * (1 - 1e-9), (
                    "a longer step idles for a smaller part of it"
                )
