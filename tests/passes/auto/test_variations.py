"""What is varied, by a search whose answers are made up."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from autopipe.ir.errors import InfeasibleError, OutOfMemoryError
from autopipe.ir.problem import Optimizer
from autopipe.passes.auto import choose as varied
from autopipe.passes.auto.candidates import Candidate
from autopipe.passes.auto.search import CandidateTrial, ScheduleOutcome
from autopipe.passes.batching import Division
from autopipe.passes.pipeline import Request
from tests.passes.auto.models import cluster

BATCH = 64
SIZES = tuple(size for size in range(1, BATCH + 1) if BATCH % size == 0)


@dataclass(frozen=True)
class Named:
    """A strategy of which the search knows the name, and how it wants batches divided."""

    name: str
    wanted: Division = Division.MANY
    form: int = 0

    def division(self, graph):
        return self.wanted


GIVEN = Named("given counts")
CHOOSING = Named("choosing", Division.OWN)
FEW = Named("few", Division.FEW)


@dataclass
class Made:
    """A search that answers by a function: (micro-batches, bound, step) of a candidate, None where
    it is refused.
    """

    answer: object
    request: Request
    trials: list = field(default_factory=list)

    def start_early(self, candidates):
        """Nothing is done before its turn."""

    @property
    def best(self):
        found = min(self.trials, key=lambda each: each.step_s, default=None)
        return None if found is None or math.isinf(found.step_s) else found

    @property
    def step_s(self):
        return math.inf if self.best is None else self.best.step_s

    def try_all(self, candidates):
        self.trials += map(self._outcome, candidates)

    def _outcome(self, candidate):
        answer = self.answer(candidate)
        if answer is None:
            return CandidateTrial(candidate, refused=OutOfMemoryError("too large"))
        count, bound, step = answer
        placed = SimpleNamespace(problem=SimpleNamespace(micro_batches=count), placement=object())
        run = ScheduleOutcome(
            SimpleNamespace(name="kfkb"), SimpleNamespace(timeline=SimpleNamespace(end=step))
        )
        return CandidateTrial(candidate, placed, bound, runs=[run])


@pytest.fixture
def try_variations(monkeypatch):
    def tried(answer, *strategies, short=False, copies=False, train=True, **asked):
        monkeypatch.setattr(varied, "_has_replicated_parameters", lambda each: copies)
        search = Made(answer, Request(Path("m.onnx"), cluster(4), None, None, **asked))
        search.try_all(
            each if isinstance(each, Candidate) else Candidate(each) for each in strategies
        )
        problem = SimpleNamespace(
            graph=None,
            train=train,
            cluster=search.request.cluster,
            optimizer=search.request.optimizer,
            states_of=search.request.optimizer.states_of,
            batch_size=BATCH,
            micro_batch_size=BATCH,
            micro_batch_sizes=SIZES,
        )
        before = len(search.trials)
        varied.try_variations(search, problem, short and train)
        return [each.candidate for each in search.trials[before:]]

    return tried


def by_count(least):
    """Steps that are shortest with `least` micro-batches, 16 where none are asked for."""

    def answer(candidate):
        count = candidate.micro_batches or 16
        step = 1 + abs(math.log2(count / least)) / 10
        return count, step, step

    return answer


@pytest.mark.parametrize(
    ("least", "counts"), [(4, [32, 8, 4, 2]), (64, [32, 64, 8]), (16, [32, 8])]
)
def test_counts_go_on_as_long_as_bounds_fall(try_variations, least, counts):
    found = try_variations(by_count(least), GIVEN)
    assert [each.micro_batches for each in found] == counts


def test_counts_begin_with_those_of_the_best_plan(try_variations):
    def answer(candidate):
        return (1, 1.0, 1.0) if candidate.strategy == CHOOSING else by_count(1)(candidate)

    found = try_variations(answer, GIVEN, CHOOSING)
    assert [each.micro_batches for each in found] == [1, 2]


def test_counts_grow_until_memory_takes_them(try_variations):
    def answer(candidate):
        count = candidate.micro_batches or 4
        return None if count < 32 else (count, 1.0, 1.0)

    found = try_variations(answer, GIVEN, recompute="none")
    assert [each.micro_batches for each in found] == [32, 64, 16]


def test_what_cannot_come_near_the_best_plan_is_left_alone(try_variations):
    def answer(candidate):
        return (
            (16, 1.0, 1.0)
            if candidate.strategy == CHOOSING
            else (candidate.micro_batches or 16, 2.0, 3.0)
        )

    assert try_variations(answer, GIVEN, CHOOSING) == []


@pytest.mark.parametrize("strategy", [CHOOSING, FEW])
def test_strategies_that_choose_are_not_given_counts(try_variations, strategy):
    assert try_variations(by_count(4), strategy) == []


def test_a_strategy_with_a_form_that_chooses_is_not_given_counts(try_variations):
    assert try_variations(by_count(4), GIVEN, Named("given counts", Division.OWN, 1)) == []


@pytest.mark.parametrize("asked", [{"micro_batches": 16}, {"micro_batch_size": 4}])
def test_counts_that_are_asked_for_stand(try_variations, asked):
    assert try_variations(by_count(4), GIVEN, **asked) == []


def test_recomputation_is_tried_where_memory_is_short_alone(try_variations):
    def refused(candidate):
        return (4, 1.0, 1.0) if candidate.recompute == "auto" else None

    assert try_variations(refused, CHOOSING) == []
    assert try_variations(refused, CHOOSING, recompute="none", short=True) == []
    assert try_variations(refused, CHOOSING, train=False, short=True) == []
    assert try_variations(refused, CHOOSING, short=True) == [Candidate(CHOOSING, recompute="auto")]


def test_recomputation_is_not_tried_where_it_was_weighed_or_changes_nothing(try_variations):
    for refused in (Candidate(CHOOSING, recompute="auto"), Candidate(Named("pase", Division.FEW))):
        assert try_variations(lambda _: None, refused, short=True) == []


def test_what_will_be_asked_for_is_known_before():
    tepdist = Candidate(Named("tepdist"), recompute="auto")
    other = Candidate(CHOOSING)
    request = Request(Path("m.onnx"), cluster(4), None, None)
    problem = SimpleNamespace(train=True, cluster=request.cluster)
    assert list(varied.early_candidates([tepdist, other], problem, request)) == [
        replace(tepdist, shard=True)
    ]
    assert (
        list(varied.early_candidates([tepdist], problem, replace(request, shard_open=False))) == []
    )


def test_what_is_refused_for_other_reasons_is_not_varied(try_variations, monkeypatch):
    def outcome(self, candidate):
        return CandidateTrial(candidate, refused=InfeasibleError("the model has no branches"))

    monkeypatch.setattr(Made, "_outcome", outcome)
    assert all(each.recompute == "none" for each in try_variations(None, CHOOSING, short=True))


def test_schedules_that_memory_refuses_lead_to_recomputation_too(try_variations, monkeypatch):
    def answer(candidate):
        return 4, 1.0, 1.0

    monkeypatch.setattr(Made, "_outcome", _without_schedules)
    assert Candidate(CHOOSING, recompute="auto") in try_variations(answer, CHOOSING, short=True)


def _without_schedules(self, candidate):
    placed = SimpleNamespace(problem=SimpleNamespace(micro_batches=4), placement=object())
    return CandidateTrial(
        candidate,
        placed,
        1.0,
        runs=[ScheduleOutcome(SimpleNamespace(name="1f1b"), refused=OutOfMemoryError("full"))],
    )


def test_state_is_shared_where_parameters_have_copies(try_variations):
    def answer(candidate):
        return 4, 1.0, 1.0

    assert try_variations(answer, CHOOSING) == []
    assert try_variations(answer, CHOOSING, copies=True) == [Candidate(CHOOSING, shard=True)]
    for asked in ({"shard_open": False}, {"optimizer": Optimizer(shard=True)}):
        assert try_variations(answer, CHOOSING, copies=True, **asked) == []


def test_state_is_shared_where_memory_refuses_even_recomputation(try_variations):
    def answer(candidate):
        return (4, 1.0, 1.0) if candidate.shard else None

    assert Candidate(CHOOSING, recompute="auto", shard=True) in try_variations(
        answer, CHOOSING, short=True, optimizer=Optimizer("adamw")
    )
    assert all(not each.shard for each in try_variations(answer, CHOOSING, short=True))
