"""The dynamic programme: the fewest stages none of which is slower than a limit, and the least such limit.

Tarnawski, Narayanan, Phanishayee, "Piper: Multidimensional Planner for DNN Parallelization" (NeurIPS 2021), section 4:
for each downset, the stages after it and the devices they use, the least time of the slowest stage. What a stage keeps
grows with its place from the end, so of two ways to place what comes after it on as many devices within one limit the
one with fewer stages is never worse. So it runs from the end and tries limits: a state is a downset and a number of
devices, its value the fewest stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.problem import Problem
from autopipe.passes.partition.downsets import Downsets
from autopipe.passes.placement.piper.prices import ANY_PLACE, Option, StagePrices
from autopipe.passes.placement.piper.sharing import StageSharing

_STEP = 1.15
"""By what factor limits begin above the least that there can be, and a limit that is too low is raised."""

_SLOWER = 1.1
"""By what factor a slower stage is allowed, for fewer stages."""

_NONE = ANY_PLACE
"""In place of a number of stages: there is no answer."""


@dataclass(frozen=True, slots=True)
class DownsetStage:
    """One stage of an answer: the blocks of the outer downset that the inner one lacks."""

    inner: int
    outer: int
    sharing: StageSharing
    recompute: bool
    device: int
    """The first of its devices."""
    seconds: float


def search(prices: StagePrices, most_s: float) -> list[DownsetStage]:
    """The stages, in order, whose slowest one is fastest; as few of them as that allows.

    Empty where memory holds none, or none of which the slowest takes about `most_s`.
    """
    most_s = min(most_s, prices.most_s)
    too_low, limit = 0.0, prices.least_s * _STEP
    options = prices.options(limit)
    answer = _answer(prices, options, limit)
    while not answer:
        if limit > most_s:
            return []
        too_low, limit = limit, limit * _STEP
        options = prices.options(limit)
        answer = _answer(prices, options, limit)
    steps = np.unique(np.concatenate([option.seconds for option in options]))
    steps = steps[(steps > too_low) & (steps < _slowest(answer))]
    while len(steps):
        middle = len(steps) // 2
        better = _answer(prices, options, float(steps[middle]))
        if better:
            answer = better
            steps = steps[:middle][steps[:middle] < _slowest(better)]
        else:
            steps = steps[middle + 1 :]
    return answer


def search_steps(prices: StagePrices, most_step_s: float) -> list[DownsetStage]:
    """As `search`, or of the chains with fewer stages and a slower one that whose step is shorter.

    Limits are raised by `_SLOWER` at a time, as long as a step could be shorter: so this is no proof.
    """
    count = prices.problem.micro_batches
    best = _answer(prices, prices.whole(), math.inf)
    most_step_s = min(most_step_s, step_seconds(best, count))
    pieces = search(prices, most_step_s / count)
    limit = _slowest(pieces)
    while pieces:
        best = min(best or pieces, pieces, key=lambda each: step_seconds(each, count))
        limit *= _SLOWER
        if len(pieces) == 1 or count * limit > min(most_step_s, step_seconds(best, count)):
            break
        pieces = _answer(prices, prices.options(limit), limit)
    return best


def step_seconds(pieces: list[DownsetStage], micro_batches: int) -> float:
    """Seconds of a step, filling and draining included; infinite without stages."""
    return sum(piece.seconds for piece in pieces) + (micro_batches - 1) * _slowest(pieces) if pieces else math.inf


def _slowest(pieces: list[DownsetStage]) -> float:
    return max((piece.seconds for piece in pieces), default=math.inf)


def _answer(prices: StagePrices, options: list[Option], limit: float) -> list[DownsetStage]:
    """The fewest stages within a limit; empty where there are none."""
    chosen = list(_useful(options, limit, len(prices.chains.downsets.inner)))
    fewest = _fewest_stages(prices, chosen)
    return [] if fewest[-1, -1] == _NONE else _trace(prices, chosen, fewest)


def _useful(options: list[Option], limit: float, pairs: int) -> Iterator[Option]:
    """Of each option what is within the limit and fits farther from the end than on any smaller group."""
    farthest = np.zeros(pairs, np.int16)
    for option in options:
        fits = option.farthest > farthest[option.pairs]
        fits &= option.seconds <= limit
        kept = replace(option, pairs=option.pairs[fits], seconds=option.seconds[fits], farthest=option.farthest[fits])
        farthest[kept.pairs] = kept.farthest
        yield kept


def _fewest_stages(prices: StagePrices, options: list[Option]) -> NDArray[np.int16]:
    """For each downset and number of devices the fewest stages that do the rest on that many last devices."""
    downsets, size = prices.chains.downsets, prices.problem.cluster.size
    found = np.full((len(downsets.holds), size + 1), _NONE, np.int16)
    found[0] = 0
    bounds = [np.searchsorted(option.pairs, downsets.starts) for option in options]
    for level in range(1, len(downsets.levels) - 1):
        for option, places in zip(options, bounds, strict=True):
            begin, end = places[level], places[level + 1]
            if begin < end:
                _reach(downsets, found, option, slice(begin, end), _after(prices.problem, option.sharing.devices))
        rows = slice(downsets.levels[level], downsets.levels[level + 1])
        found[rows] = np.minimum.accumulate(found[rows], axis=1)
    return found


def _reach(downsets: Downsets, found: NDArray[np.int16], option: Option, part: slice, after: NDArray[np.int64]) -> None:
    """Put the stages of a part of an option, whose inner downsets are of one level, before what is known."""
    pairs = option.pairs[part]
    later = found[np.ix_(downsets.outer[pairs], after)]
    stages = np.where(later < option.farthest[part, None], later + 1, _NONE)
    inner = downsets.inner[pairs]
    firsts = np.flatnonzero(np.diff(inner, prepend=-1))
    rows, columns = inner[firsts], after + option.sharing.devices
    best = np.minimum.reduceat(stages, firsts, axis=0)
    found[np.ix_(rows, columns)] = np.minimum(found[np.ix_(rows, columns)], best)


def _after(problem: Problem, devices: int) -> NDArray[np.int64]:
    """Possible numbers of devices behind a group of `devices`: a group fits into a node or begins with one."""
    size, node = problem.cluster.size, problem.cluster.devices_per_node
    after = np.arange(size - devices + 1)
    first, last = size - after - devices, size - after - 1
    fits = (first // node == last // node) | (devices > node) & (first % node == 0)
    found: NDArray[np.int64] = after[fits]
    return found


def _trace(prices: StagePrices, options: list[Option], fewest: NDArray[np.int16]) -> list[DownsetStage]:
    """The stages behind the fewest for all blocks on all devices; of equally few the quickest first stages."""
    downsets, problem = prices.chains.downsets, prices.problem
    inner, devices = len(downsets.holds) - 1, problem.cluster.size
    found: list[DownsetStage] = []
    while inner:
        stages = fewest[inner, devices]
        devices = int(np.argmax(fewest[inner] == stages))
        begin, end = np.searchsorted(downsets.inner, (inner, inner + 1))
        choices: list[DownsetStage] = []
        for option in options:
            after = devices - option.sharing.devices
            if after < 0 or after not in _after(problem, option.sharing.devices):
                continue
            part = slice(*np.searchsorted(option.pairs, (begin, end)))
            outer = downsets.outer[option.pairs[part]]
            fits = (fewest[outer, after] == stages - 1) & (stages <= option.farthest[part])
            for place in np.flatnonzero(fits)[option.seconds[part][fits].argsort(kind="stable")[:1]]:
                seconds = float(option.seconds[part][place])
                piece = DownsetStage(
                    inner, int(outer[place]), option.sharing, option.recompute, problem.cluster.size - devices, seconds
                )
                choices.append(piece)
        best = min(choices, key=lambda piece: piece.seconds)
        found.append(best)
        inner, devices = best.outer, devices - best.sharing.devices
    return found
