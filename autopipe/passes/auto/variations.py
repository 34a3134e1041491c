"""What is tried once it is known which candidates promise most: other micro-batches, recomputation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.auto.candidate import Candidate
from autopipe.passes.batching import Division

if TYPE_CHECKING:
    from autopipe.passes.auto.search import Search
    from autopipe.passes.auto.tried import Tried

_MOST = 3
"""Candidates that are varied: those with the shortest steps, of a strategy each."""


def variations(search: Search) -> Iterator[Candidate]:
    """Candidates for what memory refused, and for the most promising ones; later ones go by what came of earlier."""
    if search.request.recompute is None:
        yield from [
            dataclasses.replace(each.candidate, recompute="auto")
            for each in search.tried
            if isinstance(each.refused, InfeasibleError)
        ]
    for each in _promising(search):
        if search.request.recompute is None and each.candidate.recompute == "none":
            yield dataclasses.replace(each.candidate, recompute="auto")
        if search.request.micro_batches is None and search.request.micro_batch_size is None:
            yield from _in_other_counts(search, each)


def _promising(search: Search) -> list[Tried]:
    """The candidates with the shortest steps, one of each strategy."""
    found: dict[str, Tried] = {}
    for each in sorted(search.tried, key=lambda one: one.step_s):
        if each.runs and each.step_s < float("inf"):
            found.setdefault(each.candidate.strategy.name, each)
    return list(found.values())[:_MOST]


def _in_other_counts(search: Search, start: Tried) -> Iterator[Candidate]:
    """More micro-batches, or fewer, by twos, as long as that helps; none where the strategy chooses them itself."""
    assert start.placed is not None
    problem = start.placed.problem
    if start.candidate.strategy.division(problem.graph) is Division.OWN:
        return
    for up in (True, False):
        count, step_s = problem.micro_batches, start.step_s
        while True:
            count = count * 2 if up else count // 2
            if not count or problem.batch_size % count:
                break
            yield dataclasses.replace(start.candidate, micro_batches=count, batch_size=problem.batch_size)
            if search.tried[-1].step_s >= step_s:
                break
            step_s = search.tried[-1].step_s
