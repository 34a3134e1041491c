"""The model as a line of stages that take about equally long, each on a group of devices, and the
divider of any line into runs whose slowest is fastest.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Device, Link
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.problem import Problem
from autopipe.ir.words import plural
from autopipe.passes.analysis.chain import Chain, make_chain, range_sums, values_between
from autopipe.passes.analysis.gradients import sent_bytes
from autopipe.passes.cost.range_tables import state_sums
from autopipe.passes.cost.roofline import mean_seconds, node_seconds

_MOST_BLOCKS = 224
"""Places to cut that are considered: time grows with their square."""

_Floats = NDArray[np.float64]


def best_stops(
    lengths: Sequence[_Floats],
    known: Sequence[int],
    bounds: Sequence[tuple[int, int]] | None = None,
) -> list[int]:
    """Where each of a line's runs ends, so that the longest is shortest; [] where there is no
    division.

    `lengths[s][a, b]` is the length of run s from place a to place b, infinite where it may not be
    one. Run s ends from place `bounds[s][0]` to `bounds[s][1]`, where they are given. Of equal
    divisions the first: for every stage and end the earliest start.

    The best division into s runs up to a place follows from those into s - 1 runs up to all earlier
    places, as its longest run is the longer of theirs and the last. A run that is longer than the
    longest of a division that is `known` (by its stops) is in no best one, so that few starts are
    looked at for each end.
    """
    places = np.arange(len(lengths[0]))
    different = {id(each): each for each in lengths}
    bounds = bounds or [(0, len(places) - 1)] * len(lengths)
    runs = list(itertools.pairwise([0, *known]))
    slowest = max(float(length[run]) for length, run in zip(lengths, runs, strict=True))
    width = len(places) - 1
    if not np.isinf(slowest) and all(
        first <= stop <= last for stop, (first, last) in zip(known, bounds, strict=True)
    ):
        spans = (np.subtract(*np.nonzero(length <= slowest)) for length in different.values())
        width = max(-int(each.min()) for each in spans)
    starts = places[:, None] + np.arange(-width, 0)
    # At [b, j] the length from place `starts[b, j]` to b; infinite where there is no such start.
    bands = {
        key: np.where(starts < 0, np.inf, each[np.maximum(starts, 0), places[:, None]])
        for key, each in different.items()
    }
    longest = np.where(places == 0, 0.0, np.inf)
    came_from = []
    for length, (first, last) in zip(lengths, bounds, strict=True):
        before = np.lib.stride_tricks.sliding_window_view(
            np.concatenate((np.full(width, np.inf), longest)), width
        )[:-1]
        through = np.maximum(before, bands[id(length)])
        nearest = through.argmin(axis=1)
        longest = through[places, nearest]
        longest[(places < first) | (places > last)] = np.inf
        came_from.append(starts[places, nearest])
    if np.isinf(longest[-1]):
        return []
    stops = [len(places) - 1]
    for sources in came_from[:0:-1]:
        stops.append(int(sources[stops[-1]]))
    return stops[::-1]


def within_room(
    lengths: Sequence[_Floats], weights: _Floats, room: Sequence[float]
) -> list[_Floats]:
    """The same lengths, infinite where a run's entry in `weights` is more than its room."""
    pairs = [(id(length), most) for length, most in zip(lengths, room, strict=True)]
    cut = {
        pair: np.where(weights > pair[1], np.inf, length)
        for pair, length in zip(pairs, lengths, strict=True)
    }
    return [cut[pair] for pair in pairs]


def step_of_line(seconds: Sequence[float], micro_batches: int) -> float:
    """Seconds of a step of stages that take these for a micro-batch, filling and draining
    included.
    """
    return sum(seconds) + (micro_batches - 1) * max(seconds)


def even_stops(work: _Floats, count: int) -> list[int]:
    """Where runs of about equal work end, each of a block at least."""
    done = np.concatenate(([0.0], np.cumsum(work)))
    stops = [0]
    for stage, stop in enumerate(np.searchsorted(done, done[-1] * np.arange(1, count + 1) / count)):
        stops.append(min(max(int(stop), stops[-1] + 1), len(work) - count + 1 + stage))
    return [*stops[1:-1], len(work)]


def run_lengths(seconds: _Floats, before: _Floats, after: _Floats) -> _Floats:
    """At [a, b] the seconds of blocks a to b - 1, with what crosses at places a and b; infinite for
    none.
    """
    found: _Floats = range_sums(seconds) + before[:, None] + after[None, :]
    found[np.tril_indices(len(found))] = np.inf
    return found


def crossing_seconds(
    graph: Graph,
    precision: str,
    block_of: Mapping[int, int],
    blocks: int,
    link: Link,
    replicas: int = 1,
) -> _Floats:
    """For each place between two blocks, and 0 at both ends, the time of sending what crosses it,
    each of `replicas` devices its own samples. Nodes that are in no block count for nothing.
    """
    change = np.zeros(blocks + 2)
    sizes = sent_bytes(graph, precision)
    for name, start, readers in values_between(graph, block_of):
        if readers[-1] > start:
            seconds = link.seconds(sizes[name] / replicas)
            change[[start + 1, readers[-1] + 1]] += np.array([1, -1]) * seconds
    crossing: _Floats = np.cumsum(change)[: blocks + 1]
    crossing[[0, -1]] = 0.0
    return crossing


def cut_into_stages(
    problem: Problem,
    groups: Sequence[Sequence[int]],
    fixed: Mapping[int, int],
    replicas: int | None = None,
) -> tuple[tuple[int, ...], ...]:
    """The nodes of the stage on each of `groups` of devices, `fixed` ones in the stages it says.

    Of what crosses from stage to stage each of `replicas` in a group sends its own samples; without
    a number one device sends all, but among groups that differ as many as the smaller one has.

    The slowest stage is as fast as it can be, work shared by its group and messages at both its
    ends included, as far as that is known before splits are. Where devices have different memory,
    no stage has parameters that its group cannot hold even in parts, if that can be. Raises
    ConfigurationError where `fixed` allows no line, InfeasibleError where the model has fewer
    operators than stages.
    """
    count = len(groups)
    if count == 1:
        return (tuple(range(len(problem.graph.nodes))),)
    forward, backward = mean_seconds(problem)
    seconds = forward + (backward if problem.train else 0.0)
    together = tuple(
        tuple(node for node in fixed if fixed[node] == stage)
        for stage in sorted(set(fixed.values()))
    )
    chain = make_chain(problem.graph, seconds, _MOST_BLOCKS, together)
    if chain.blocks < count:
        raise InfeasibleError(
            (
                f"{chain.blocks} {plural(chain.blocks, 'operator')} cannot be cut into {count} "
                f"{plural(count, 'stage')}"
            ),
            hint="take fewer stages",
        )
    bounds = _bounds(problem.graph, chain, count, fixed)
    lengths = _lengths(problem, chain, groups, replicas)
    known = even_stops(chain.by_block(seconds), count)
    stops = []
    limits = [min(map(problem.memory_of, group)) for group in groups]
    if len(set(limits)) > 1:
        room = [limit * len(group) for group, limit in zip(groups, limits, strict=True)]
        stops = best_stops(
            within_room(lengths, state_sums(problem, chain, attrgetter("total")), room),
            known,
            bounds,
        )
    stops = stops or best_stops(lengths, known, bounds)
    return tuple(chain.nodes(start, stop) for start, stop in itertools.pairwise([0, *stops]))


def _bounds(
    graph: Graph, chain: Chain, count: int, fixed: Mapping[int, int]
) -> list[tuple[int, int]]:
    """For each stage the first and the last place where it may end."""
    found = []
    for stage in range(1, count + 1):
        before = {int(chain.block_of[node]): node for node in fixed if fixed[node] < stage}
        after = {int(chain.block_of[node]): node for node in fixed if fixed[node] >= stage}
        first = max(max(before, default=-1) + 1, stage)
        last = min(min(after, default=chain.blocks), chain.blocks - count + stage)
        if first > last:
            early = before.get(first - 1)
            late = after.get(last)
            names = [repr(graph.nodes[node].name) for node in (late, early) if node is not None]
            raise ConfigurationError(
                (
                    f"constraints leave no place to end stage {stage - 1} of {count}: "
                    f"{' comes before '.join(names)}"
                ),
                hint=(
                    "a stage may read from earlier stages only, and each needs at least one "
                    "operator"
                ),
                where="constraints",
            )
        found.append((first, last))
    return found


def _lengths(
    problem: Problem, chain: Chain, groups: Sequence[Sequence[int]], replicas: int | None
) -> list[_Floats]:
    """For each stage, at [a, b] the seconds of blocks a to b - 1, with what crosses both ends;
    infinite for none. A group's devices share the work, and the slowest kind of them tells how long
    it takes.
    """
    cluster = problem.cluster
    block_of = dict(enumerate(chain.block_of.tolist()))
    kinds = [(frozenset(cluster.kinds_among(group)), len(group)) for group in groups]

    @cache
    def crossing(link: Link, lanes: int) -> _Floats:
        return crossing_seconds(
            problem.graph, problem.precision, block_of, chain.blocks, link, lanes
        )

    def seconds(devices: frozenset[Device], share: float) -> _Floats:
        both = (node_seconds(problem.work, device, problem.precision, share) for device in devices)
        each = [forward + backward if problem.train else forward for forward, backward in both]
        slowest: _Floats = np.maximum.reduce(each)
        return slowest

    if len(set(kinds)) == 1:
        devices, width = kinds[0]
        between = crossing(cluster.slowest_link(range(cluster.size)), replicas or 1)
        return [run_lengths(chain.by_block(seconds(devices, 1.0) / width), between, between)] * len(
            groups
        )
    own = {kind: chain.by_block(seconds(kind[0], 1 / kind[1])) for kind in set(kinds)}
    ends = [np.zeros(chain.blocks + 1)]
    for one, other in itertools.pairwise(groups):
        lanes = replicas or min(len(one), len(other))
        ends.append(crossing(cluster.slowest_link((one[-1], other[0])), lanes))
    ends.append(ends[0])
    return [
        run_lengths(own[kind], ends[stage], ends[stage + 1]) for stage, kind in enumerate(kinds)
    ]
