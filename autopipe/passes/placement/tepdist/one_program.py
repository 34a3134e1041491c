"""One integer program over a whole min-sum model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopipe.passes.placement.tepdist.narrowing import ReducedModel, fix_by_reduced_cost, promising
from autopipe.passes.placement.tepdist.program import Programs
from autopipe.passes.solvers.min_sum import Assignment, MinSum
from autopipe.passes.solvers.min_sum.model import chosen, priced, restricted

MOST_PAIRS = 50_000
"""Of configurations on edges: what an integer program may have."""

MOST_PAIRS_WITHIN = 10_000
"""The same within a memory limit, where programs take longest."""


def least_by_program(model: MinSum, programs: Programs, most: float = MOST_PAIRS) -> Assignment:
    """The best choice of a merged model, by a program of about `most` pairs of configurations at most.

    There is none where the dual of the relaxation meets a choice. Raises InfeasibleError where every choice is
    forbidden.
    """
    left = fix_by_reduced_cost(model)
    if left.is_met:
        return left.answer(model)
    left = promising(model, left, most)
    known = _places(left, left.choice)
    found = programs.least(restricted(model, left.kept), known or ())
    bound = max(left.bound, min(float(found.bound), left.left_out))
    proven = found.proven and found.cost <= left.left_out
    return replace(found, choice=chosen(left.kept, found.choice), bound=bound, proven=proven)


def least_within(
    model: MinSum, limit: float, rate: float, cutoff: float, known: Sequence[int], programs: Programs
) -> Assignment:
    """The best choice of a merged model that needs at most `limit` bytes and costs at most `cutoff`.

    What the program may leave out shows at the price `rate` for a byte; it begins with `known` if that fits.
    Raises InfeasibleError where there is no such choice, or none was found in time.
    """
    at_price = priced(model, rate)
    left = fix_by_reduced_cost(at_price, 0, known, cutoff + rate * limit)
    left = promising(at_price, left, MOST_PAIRS_WITHIN)
    start = _places(left, known) if model.memory_of(known) <= limit else None
    found = programs.least(restricted(model, left.kept), start or (), limit)
    left_out = left.left_out - rate * limit
    proven = found.proven and found.cost <= left_out
    return replace(
        found, choice=chosen(left.kept, found.choice), bound=min(float(found.bound), left_out), proven=proven
    )


def _places(left: ReducedModel, choice: Sequence[int]) -> list[int] | None:
    """Where a choice is among what is left; None where a part of it is not."""
    places = [int(keep.searchsorted(number)) for keep, number in zip(left.kept, choice, strict=True)]
    there = all(
        place < len(keep) and keep[place] == number
        for keep, place, number in zip(left.kept, places, choice, strict=True)
    )
    return places if there else None
