"""Whether losses keep their scores or recompute them: by time, by memory, under every strategy, in
the search.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from autopipe.configs.zoo import build, configure
from autopipe.ir.errors import InfeasibleError, OutOfMemoryError
from autopipe.ir.graph import Graph
from autopipe.ir.plan import LossScores
from autopipe.ir.problem import SCORES, Mode, Scores
from autopipe.passes.auto.choose import choose_plan
from autopipe.passes.auto.plan_cache import JsonStore
from autopipe.passes.frontend import read_model
from autopipe.passes.pipeline import PlanResult, Request, make_plan
from autopipe.passes.registry import STRATEGIES, scheduler_class, strategy_class
from tests.passes.auto.models import cluster

CLASSES = 16_384
TOKENS = 16
SETTINGS = {
    "layers": "2",
    "hidden": "32",
    "heads": "1",
    "sequence": str(TOKENS),
    "loss": "true",
    "weights": "none",
}
SEARCHED = sorted(set(STRATEGIES) - {"explicit", "manual", "one_weird_trick"})
"""Strategies for a model without convolutions."""


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "gpt.onnx"
    build(configure("gpt", {**SETTINGS, "vocabulary": str(CLASSES)})).save(path)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small.onnx"
    build(configure("gpt", {**SETTINGS, "vocabulary": str(CLASSES - 1)})).save(path)
    return path


def asked(path: Path, strategy: str = "data_parallel", devices: int = 1, **more: object) -> Request:
    own = Request(
        path, cluster(devices, "cpu-local"), strategy_class(strategy)(), scheduler_class("gpipe")()
    )
    return dataclasses.replace(own, batch_size=2, micro_batches=1, recompute="none", **more)  # type: ignore[arg-type]


def recomputes(graph: Graph) -> bool:
    return any(node.op == "LinearCrossEntropy" for node in graph.nodes)


def peak(planned: PlanResult) -> int:
    return max(planned.plan.summary.peak_memory_bytes)


def told(planned: PlanResult) -> LossScores:
    scores = planned.plan.summary.scores
    assert scores is not None
    return scores


@pytest.mark.parametrize("scores", SCORES)
def test_what_is_asked_for_is_planned(gpt: Path, small: Path, scores: Scores) -> None:
    for path in (gpt, small):
        planned = make_plan(asked(path, scores=scores))
        assert recomputes(planned.problem.graph) is (scores == "recompute")
        assert told(planned).choice == planned.request.scores == scores
        assert told(planned).other_step_s is None, "no other plan was made"


def test_small_vocabularies_are_left_alone(small: Path) -> None:
    planned = make_plan(asked(small))
    assert not recomputes(planned.problem.graph)
    assert planned.plan.summary.scores is None
    assert planned.request.scores is None


@pytest.mark.parametrize("strategy", SEARCHED)
def test_memory_decides_under_every_strategy(gpt: Path, strategy: str) -> None:
    """One device leaves a strategy no other placement that would need less memory."""
    kept = make_plan(asked(gpt, strategy))
    assert told(kept).choice == "keep"
    least = peak(make_plan(asked(gpt, strategy, scores="recompute")))
    assert least < peak(kept)
    enough = make_plan(asked(gpt, strategy, memory_limit=peak(kept)))
    assert (told(enough).choice, peak(enough)) == ("keep", peak(kept))
    assert told(enough).other_step_s is not None, (
        "memory may be short: the other form is planned, too"
    )
    assert enough.timeline.end < told(enough).other_step_s
    short = make_plan(asked(gpt, strategy, memory_limit=peak(kept) - 1))
    assert (told(short).choice, peak(short), short.request.scores) == (
        "recompute",
        least,
        "recompute",
    )
    assert recomputes(short.problem.graph)
    assert told(short).other_refused is not None, "why scores cannot be kept"
    with pytest.raises(InfeasibleError):
        make_plan(asked(gpt, strategy, memory_limit=least - 1))


def test_the_shorter_step_wins_where_memory_binds(gpt: Path) -> None:
    """Kept scores fit memory only in micro-batches of one sample, whose weight gradients are added
    up.
    """
    own = dataclasses.replace(asked(gpt), batch_size=16, micro_batches=None)
    kept, recomputed = (make_plan(dataclasses.replace(own, scores=scores)) for scores in SCORES)
    limit = max(peak(recomputed), peak(kept) - 1)
    planned = make_plan(dataclasses.replace(own, memory_limit=limit))
    rivals = []
    for scores in SCORES:
        try:
            rivals.append(
                make_plan(dataclasses.replace(own, memory_limit=limit, scores=scores)).timeline.end
            )
        except OutOfMemoryError:
            continue
    assert planned.timeline.end == min(rivals)


def test_scores_are_compared_by_node(gpt: Path) -> None:
    planned = make_plan(asked(gpt))
    rows = 2 * TOKENS
    assert told(planned).saved_bytes == 4 * rows * CLASSES - 16 * rows, (
        "scores; a label, its weight and its logarithm"
    )
    other = make_plan(asked(gpt, scores="recompute"))
    assert told(other) == dataclasses.replace(told(planned), choice="recompute")
    change = told(planned).recompute_s - told(planned).keep_s
    assert change > 0
    assert other.timeline.end - planned.timeline.end == pytest.approx(change, rel=0.05)


def test_the_search_tries_both_where_memory_is_short(gpt: Path, tmp_path: Path) -> None:
    own = dataclasses.replace(asked(gpt), strategy=None, scheduler=None)
    kept = choose_plan(own)
    assert {each.choice.scores for each in kept.plan.alternatives} == {"keep"}, (
        "memory suffices for all of them"
    )
    assert told(kept).choice == "keep"
    store = JsonStore(tmp_path / "answers")
    short = dataclasses.replace(own, memory_limit=peak(kept) - 1)
    found = choose_plan(short, store=store)
    assert {each.choice.scores for each in found.plan.alternatives} == {"keep", "recompute"}
    assert told(found).choice == found.request.scores == "recompute"
    assert told(found).other_refused is not None
    again = choose_plan(short, store=store)
    assert (again.digest, again.plan.summary.scores) == (found.digest, found.plan.summary.scores)


def test_an_inference_saves_nothing(gpt: Path) -> None:
    planned = make_plan(dataclasses.replace(asked(gpt), mode=Mode.INFER))
    assert told(planned).saved_bytes == 0


def test_both_forms_are_read_at_once(gpt: Path) -> None:
    model = read_model(gpt, batch=2)
    assert [(each.scores, recomputes(each.graph)) for each in model.forms] == [
        ("keep", False),
        ("recompute", True),
    ]
    assert model.with_scores("recompute").with_scores("keep") == model
    assert (
        read_model(gpt, batch=2, scores="recompute").graph == model.with_scores("recompute").graph
    )
