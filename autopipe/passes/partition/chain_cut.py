"""The model as a line of stages that take about equally long, each on a group of devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Device, Link
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import recomputed_nodes
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.chain import Chain, distinct_sums, make_chain
from autopipe.passes.cost.memory import state_of
from autopipe.passes.cost.roofline import mean_seconds, node_seconds

_MOST_BLOCKS = 224
"""Places to cut that are considered: time grows with their square."""

_Floats = NDArray[np.float64]


def cut_into_stages(
    problem: Problem, groups: Sequence[Sequence[int]], fixed: Mapping[int, int], replicas: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """The nodes of the stage on each of `groups` of devices, `fixed` ones in the stages it says.

    Of what crosses from stage to stage each of `replicas` in a group sends its own samples; without a number one device
    sends all, but among groups that differ as many as the smaller one has.

    The slowest stage is as fast as it can be, work shared by its group and messages at both its ends included, as far
    as that is known before splits are. Where devices have different memory, no stage has parameters that its group
    cannot hold even in parts, if that can be. Raises ConfigurationError where `fixed` allows no line, InfeasibleError
    where the model has fewer operators than stages.
    """
    count = len(groups)
    if count == 1:
        return (tuple(range(len(problem.graph.nodes))),)
    forward, backward = mean_seconds(problem)
    seconds = forward + (backward if problem.train else 0.0)
    together = tuple(tuple(node for node in fixed if fixed[node] == stage) for stage in sorted(set(fixed.values())))
    chain = make_chain(problem.graph, seconds, _MOST_BLOCKS, together)
    if chain.blocks < count:
        raise InfeasibleError(f"{chain.blocks} operators cannot be cut into {count} stages", hint="take fewer stages")
    bounds = _bounds(problem.graph, chain, count, fixed)
    lengths = _lengths(problem, chain, groups, replicas)
    stops = _best_stops(_within_memory(problem, chain, groups, lengths), bounds) or _best_stops(lengths, bounds)
    return tuple(chain.nodes(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True))


def _bounds(graph: Graph, chain: Chain, count: int, fixed: Mapping[int, int]) -> list[tuple[int, int]]:
    """For each stage the first and the last place where it may end."""
    found = []
    for stage in range(1, count + 1):
        before = {int(chain.block_of[node]): node for node in fixed if fixed[node] < stage}
        after = {int(chain.block_of[node]): node for node in fixed if fixed[node] >= stage}
        first = max(max(before, default=-1) + 1, stage)
        last = min(min(after, default=chain.blocks), chain.blocks - count + stage)
        if first > last:
            early, late = before.get(first - 1), after.get(last)
            names = [repr(graph.nodes[node].name) for node in (late, early) if node is not None]
            raise ConfigurationError(
                f"constraints leave no place to end stage {stage - 1} of {count}: {' comes before '.join(names)}",
                hint="a stage may read from earlier stages only, and each needs at least one operator",
                where="constraints",
            )
        found.append((first, last))
    return found


def _lengths(problem: Problem, chain: Chain, groups: Sequence[Sequence[int]], replicas: int | None) -> list[_Floats]:
    """For each stage, at [a, b] the seconds of blocks a to b - 1, with what crosses both ends; infinite for none."""
    cluster = problem.cluster
    kinds = [(frozenset(cluster.kinds_among(group)), len(group)) for group in groups]
    if len(set(kinds)) == 1:
        crossing = _crossing_seconds(problem, chain, cluster.slowest_link(range(cluster.size)), replicas or 1)
        length = _length(chain, _seconds(problem, kinds[0][0]) / kinds[0][1], crossing, crossing)
        return [length] * len(groups)
    own = {kind: _seconds(problem, *kind) for kind in set(kinds)}
    crossing_over = cache(lambda link, lanes: _crossing_seconds(problem, chain, link, lanes))
    ends = [np.zeros(chain.blocks + 1)]
    for one, other in itertools.pairwise(groups):
        lanes = replicas or min(len(one), len(other))
        ends.append(crossing_over(cluster.slowest_link((one[-1], other[0])), lanes))
    ends.append(ends[0])
    return [_length(chain, own[kind], ends[stage], ends[stage + 1]) for stage, kind in enumerate(kinds)]


def _length(chain: Chain, seconds: _Floats, before: _Floats, after: _Floats) -> _Floats:
    """The same for one stage, with the seconds of each node, and of what crosses each place before and after it."""
    done = np.concatenate(([0.0], np.cumsum(chain.by_block(seconds))))
    found: _Floats = done[None, :] - done[:, None] + before[:, None] + after[None, :]
    found[np.tril_indices(len(done))] = np.inf
    return found


def _seconds(problem: Problem, kinds: Iterable[Device], width: int = 1) -> _Floats:
    """Seconds of forward and backward of each node, shared by `width` devices, the slowest of some kinds."""
    both = (node_seconds(problem.work, device, problem.precision, 1 / width) for device in kinds)
    found: _Floats = np.maximum.reduce([forward + (backward if problem.train else 0.0) for forward, backward in both])
    return found


def _within_memory(
    problem: Problem, chain: Chain, groups: Sequence[Sequence[int]], lengths: list[_Floats]
) -> list[_Floats]:
    """The lengths, infinite for parameters that a group does not hold in equal parts, where devices differ in that."""
    limits = [min(map(problem.memory_of, group)) for group in groups]
    if len(set(limits)) == 1:
        return lengths
    readers = problem.graph.consumers()
    items = []
    for each in problem.graph.parameters:
        blocks = sorted({int(chain.block_of[node]) for node in readers.get(each.value.name, ())})
        items.append((blocks, float(state_of(problem, ((each.value.name, 1),)).total)))
    state = distinct_sums(chain.blocks, items)
    return [
        np.where(state > limit * len(group), np.inf, length)
        for group, limit, length in zip(groups, limits, lengths, strict=True)
    ]


def _best_stops(lengths: Sequence[_Floats], bounds: list[tuple[int, int]]) -> list[int]:
    """Where each stage ends, so that the longest is shortest; [] where one has to be infinitely long."""
    places = np.arange(len(lengths[0]))
    longest = np.where(places == 0, 0.0, np.inf)
    came_from = []
    for stage, (first, last) in enumerate(bounds):
        through = np.maximum(longest[:, None], lengths[stage])
        came_from.append(through.argmin(axis=0))
        longest = through.min(axis=0)
        is_end = places == len(places) - 1
        longest[(places < first) | (places > last) | (stage == len(bounds) - 1) & ~is_end] = np.inf
    if np.isinf(longest[-1]):
        return []
    stops = [len(places) - 1]
    for sources in came_from[:0:-1]:
        stops.append(int(sources[stops[-1]]))
    return stops[::-1]


def _crossing_seconds(problem: Problem, chain: Chain, link: Link, replicas: int) -> _Floats:
    """For each place between two blocks, and 0 at both ends, the time of sending what crosses it."""
    graph, recomputed = problem.graph, recomputed_nodes(problem.graph)
    change = np.zeros(chain.blocks + 2)
    for name, readers in graph.consumers().items():
        producer = graph.producer(name)
        if producer is None or producer in recomputed:
            continue
        start, last = int(chain.block_of[producer]), max(int(chain.block_of[reader]) for reader in readers)
        if last > start:
            change[[start + 1, last + 1]] += np.array([1, -1]) * link.seconds(graph.type_of(name).bytes / replicas)
    crossing: _Floats = np.cumsum(change)[: chain.blocks + 1]
    crossing[[0, -1]] = 0.0
    return crossing
