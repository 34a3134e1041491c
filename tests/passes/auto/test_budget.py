"""What a search leaves out, and what it looks into instead."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from autopipe.passes.auto.candidates import Candidate, SkippedError, skip_reason
from autopipe.passes.auto.choose import interleaved_candidates
from autopipe.passes.auto.search import CandidateTrial
from autopipe.passes.placement.data_parallel import DataParallel
from autopipe.passes.placement.grid import Grid
from autopipe.passes.placement.pase.strategy import Mcmc
from autopipe.passes.placement.piper.strategy import Piper

CHUNKS = Grid(stages_per_rank=2)
WAVE = Grid(stages_per_rank=2, style="v")


@pytest.mark.parametrize(
    ("strategy", "operators", "devices", "is_left_out"),
    [
        (Piper(), 1000, 32, False),
        (Piper(), 2505, 512, True),
        (Mcmc(), 1000, 8, False),
        (Mcmc(), 1000, 32, True),
        (Grid(), 2505, 4096, False),
        (CHUNKS, 1000, 32, False),
        (CHUNKS, 2505, 512, True),
        (Grid(pipeline=16, stages_per_rank=2), 2505, 512, False),
        (DataParallel(), 2505, 4096, False),
    ],
)
def test_what_is_left_out_follows_from_the_size_alone(strategy, operators, devices, is_left_out):
    reason = skip_reason(strategy, operators, devices)
    assert (reason is not None) == is_left_out
    assert reason is None or "name it to have it searched" in reason.message


def searched(best: Candidate, stages: int, refused: SkippedError | None = None) -> SimpleNamespace:
    placed = SimpleNamespace(
        placement=SimpleNamespace(stages=(None,) * stages),
        problem=SimpleNamespace(micro_batches=24),
    )
    first = SimpleNamespace(candidate=best, placed=placed, refused=None)
    others = [CandidateTrial(Candidate(form), refused=refused) for form in (CHUNKS, WAVE, Piper())]
    return SimpleNamespace(best=first, trials=[first, *others])


def test_finer_forms_of_the_best_grid_are_looked_into():
    best = Candidate(Grid(), recompute="auto", shard=True)
    assert list(interleaved_candidates(searched(best, 8, SkippedError("too large")))) == [
        Candidate(Grid(pipeline=8, stages_per_rank=2), 24, "auto", True),
        Candidate(Grid(pipeline=8, stages_per_rank=2, style="v"), 24, "auto", True),
    ]
    assert not list(interleaved_candidates(searched(best, 8))), "all of them were looked into"
    assert not list(interleaved_candidates(searched(best, 1, SkippedError("too large")))), (
        "one stage needs no line to pass it"
    )
    assert not list(
        interleaved_candidates(searched(Candidate(Piper()), 8, SkippedError("too large")))
    )
