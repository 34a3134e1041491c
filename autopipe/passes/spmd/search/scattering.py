"""How shares are added up on the way from each of some layouts to each of others: `reductions` as tables.

What is scattered along a dimension follows from how both layouts cut it and from who holds shares. Of these there are
few, so pairs of layouts are told apart by numbers, and what adds shares up is worked out once for those that are alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autopipe.ir.layout import Layout, MeshAxes, degree_of, merged
from autopipe.passes.analysis.resharding import scattered_along, without
from autopipe.passes.spmd.search.adding import Addition
from autopipe.passes.spmd.search.lack import DimensionPair, pairs_by_dimension
from autopipe.passes.spmd.search.numbering import Integers, distinct, numbered


@dataclass(frozen=True, slots=True, eq=False)
class ReductionPaths:
    """How each source comes to each target: what adds up its shares, and what is held after that."""

    additions: list[Addition]
    held: list[Layout]
    addition_of: Integers
    """[sources, targets]"""
    held_of: Integers
    """[sources, targets]"""


@dataclass(frozen=True, slots=True, eq=False)
class _Scattered:
    """Along one dimension: `insides` are the axes along which shares are scattered, the first of them none."""

    pair: DimensionPair
    insides: list[MeshAxes]
    of: Integers
    """Which of them, [sources, ways of targets]."""


def reduction_paths(sources: Sequence[Layout], targets: Sequence[Layout]) -> ReductionPaths:
    """How the shares of each of `sources` are added up on the way to each of `targets`, which are even and hold none.

    A target's axes cut one dimension each, so what is scattered along one does not depend on the others.
    """
    shares, shares_of = numbered(source.partial_over for source in sources)
    parts, parts_of = numbered(source.parts for source in sources)
    scattered = [_scattered(pair, shares, shares_of) for pair in pairs_by_dimension(sources, targets)]
    codes = np.zeros((len(sources), len(targets)), dtype=np.int64)
    for each in scattered:
        codes = codes * len(each.insides) + each.of[:, each.pair.wanted.of]
    known, codes = distinct(codes)
    cases, case_of = distinct(codes + np.arange(len(sources))[:, None] * len(known))
    row, left = cases // len(known), known[cases % len(known)]
    digits: list[Integers] = []
    for each in reversed(scattered):
        digits.insert(0, left % len(each.insides))
        left = left // len(each.insides)
    _, adding_of = distinct((shares_of[row] * len(parts) + parts_of[row]) * len(known) + cases % len(known))
    one_each = np.zeros(adding_of.max() + 1, dtype=np.int64)
    one_each[adding_of] = np.arange(len(cases))
    additions = [
        _addition(shares[of], parts[count], [each.insides[digit] for each, digit in zip(scattered, own, strict=True)])
        for of, count, *own in np.stack([shares_of[row], parts_of[row], *digits])[:, one_each].T.tolist()
    ]
    held, held_of = _held(targets[0].shape, scattered, row, digits)
    return ReductionPaths(additions, held, adding_of[case_of], held_of[case_of])


def _scattered(pair: DimensionPair, shares: Sequence[MeshAxes], shares_of: Integers) -> _Scattered:
    insides: dict[MeshAxes, int] = {(): 0}
    cases, case_of = distinct(pair.held.of * len(shares) + shares_of)
    table = np.zeros((len(cases), len(pair.wanted.axes)), dtype=np.int64)
    for place, (now, over) in enumerate(zip(*(each.tolist() for each in np.divmod(cases, len(shares))), strict=True)):
        if shares[over]:
            found = (scattered_along(pair.held.axes[now], wanted, shares[over]) for wanted in pair.wanted.axes)
            table[place] = [insides.setdefault(axes, len(insides)) for axes in found]
    return _Scattered(pair, list(insides), table[case_of])


def _addition(shares: MeshAxes, parts: int, insides: Iterable[MeshAxes]) -> Addition:
    """Reduction that adds up `shares` of a tensor in `parts` blocks, scattered along `insides` of a dimension each."""
    steps = []
    for inside in filter(None, insides):
        steps.append(("reduce_scatter", inside, parts))
        shares = without(shares, inside)
        parts *= degree_of(inside)
    if shares:
        steps.append(("all_reduce", merged(shares), parts))
    return tuple(steps)


def _held(
    shape: tuple[int, ...], scattered: Sequence[_Scattered], row: Integers, digits: Sequence[Integers]
) -> tuple[list[Layout], Integers]:
    """The different layouts after shares have been scattered, and which of them each case has."""
    codes = np.zeros_like(row)
    ways: list[list[MeshAxes]] = []
    for each, digit in zip(scattered, digits, strict=True):
        pairs, pair_of = distinct(each.pair.held.of[row] * len(each.insides) + digit)
        before, inside = (found.tolist() for found in np.divmod(pairs, len(each.insides)))
        cuts, cut_of = numbered(
            merged(each.pair.held.axes[now] + each.insides[more]) for now, more in zip(before, inside, strict=True)
        )
        codes = codes * len(cuts) + cut_of[pair_of]
        ways.append(cuts)
    found, held_of = np.unique(codes, return_inverse=True)
    layouts = []
    for code in found.tolist():
        own: list[MeshAxes] = [()] * len(shape)
        for each, cuts in zip(reversed(scattered), reversed(ways), strict=True):
            code, place = divmod(code, len(cuts))
            own[each.pair.dimension] = cuts[place]
        layouts.append(Layout(shape, tuple(own)))
    return layouts, held_of.reshape(-1)
