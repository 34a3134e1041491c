"""The model as a line of stages that take about equally long, each on an equal group of devices."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import recomputed_nodes
from autopipe.ir.problem import Problem
from autopipe.passes.cost.chain import Chain, make_chain
from autopipe.passes.cost.roofline import node_seconds

_MOST_BLOCKS = 224
"""Places to cut that are considered: time grows with their square."""

_Floats = NDArray[np.float64]


def cut_into_stages(problem: Problem, count: int, fixed: Mapping[int, int]) -> tuple[tuple[int, ...], ...]:
    """The nodes of each of `count` stages, `fixed` ones in the stages it says.

    The slowest stage is as fast as it can be, work shared by its group and messages at both its ends included, as far
    as that is known before splits are. Raises ConfigurationError where `fixed` allows no line, InfeasibleError where
    the model has fewer operators than stages.
    """
    if count == 1:
        return (tuple(range(len(problem.graph.nodes))),)
    forward, backward = node_seconds(problem.work, problem.cluster.devices[0], problem.precision)
    seconds = forward + (backward if problem.train else 0.0)
    together = tuple(tuple(node for node in fixed if fixed[node] == stage) for stage in sorted(set(fixed.values())))
    chain = make_chain(problem.graph, seconds, _MOST_BLOCKS, together)
    if chain.blocks < count:
        raise InfeasibleError(f"{chain.blocks} operators cannot be cut into {count} stages", hint="take fewer stages")
    group = problem.cluster.size // count
    bounds = _bounds(problem.graph, chain, count, fixed)
    stops = _best_stops(chain.by_block(seconds / group), _crossing_seconds(problem, chain), bounds)
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


def _best_stops(seconds: _Floats, crossing: _Floats, bounds: list[tuple[int, int]]) -> list[int]:
    """Where each stage ends, so that the longest is shortest: the sum of its `seconds`, and what crosses its ends."""
    done = np.concatenate(([0.0], np.cumsum(seconds)))
    lengths = done[None, :] - done[:, None] + crossing[:, None] + crossing[None, :]
    places = np.arange(len(done))
    lengths[places[:, None] >= places[None, :]] = np.inf
    longest = np.where(places == 0, 0.0, np.inf)
    came_from = []
    for stage, (first, last) in enumerate(bounds):
        through = np.maximum(longest[:, None], lengths)
        came_from.append(through.argmin(axis=0))
        longest = through.min(axis=0)
        longest[(places < first) | (places > last) | (stage == len(bounds) - 1) & (places < len(done) - 1)] = np.inf
    stops = [len(done) - 1]
    for sources in came_from[:0:-1]:
        stops.append(int(sources[stops[-1]]))
    return stops[::-1]


def _crossing_seconds(problem: Problem, chain: Chain) -> _Floats:
    """For each place between two blocks, and 0 at both ends, the time of sending what crosses it."""
    graph, recomputed = problem.graph, recomputed_nodes(problem.graph)
    link = problem.cluster.slowest_link(range(problem.cluster.size))
    change = np.zeros(chain.blocks + 2)
    for name, readers in graph.consumers().items():
        producer = graph.producer(name)
        if producer is None or producer in recomputed:
            continue
        start, last = int(chain.block_of[producer]), max(int(chain.block_of[reader]) for reader in readers)
        if last > start:
            change[[start + 1, last + 1]] += np.array([1, -1]) * link.seconds(graph.type_of(name).bytes)
    crossing: _Floats = np.cumsum(change)[: chain.blocks + 1]
    crossing[[0, -1]] = 0.0
    return crossing
