"""A run of nodes cut into stages that take equally long."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import recomputed_nodes
from autopipe.passes.cost.chain import Chain
from autopipe.passes.placement.tessel_shapes.model import CostedModel


def even_stages(model: CostedModel, chain: Chain, nodes: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """`nodes` in `count` runs of the line whose slowest is fastest, with the time that messages take at either end.

    Cuts stand between blocks of the line. Raises InfeasibleError where the blocks are too few.
    """
    groups: dict[int, list[int]] = {}
    for node in nodes:
        groups.setdefault(int(chain.block_of[node]), []).append(node)
    blocks = [tuple(sorted(groups[block])) for block in sorted(groups)]
    if len(blocks) < count:
        raise InfeasibleError(
            f"{len(blocks)} operators cannot be cut into {count} stages", hint="take fewer devices or fewer chunks"
        )
    seconds = np.array([model.weighs(block) for block in blocks])
    stops = best_stops(seconds, _crossing_seconds(model, blocks), count)
    starts = [0, *stops[:-1]]
    return tuple(
        tuple(sorted(node for block in blocks[start:stop] for node in block))
        for start, stop in zip(starts, stops, strict=True)
    )


def _crossing_seconds(model: CostedModel, blocks: Sequence[tuple[int, ...]]) -> NDArray[np.float64]:
    """For each place between two blocks, and 0 at both ends, the time of sending what crosses it."""
    graph, recomputed = model.graph, recomputed_nodes(model.graph)
    link = model.problem.cluster.slowest_link(range(model.devices))
    place = {node: index for index, block in enumerate(blocks) for node in block}
    change = np.zeros(len(blocks) + 2)
    for node in place.keys() - recomputed:
        for name in graph.nodes[node].outputs:
            last = max((place[reader] for reader in model.readers.get(name, ()) if reader in place), default=0)
            if last > place[node]:
                price = link.seconds(graph.type_of(name).bytes)
                change[place[node] + 1] += price
                change[last + 1] -= price
    crossing: NDArray[np.float64] = np.cumsum(change)[: len(blocks) + 1]
    crossing[[0, -1]] = 0.0
    return crossing


def best_stops(seconds: NDArray[np.float64], crossing: NDArray[np.float64], count: int) -> list[int]:
    """Where each of `count` runs ends: the largest sum of a run is least, what crosses its ends counted with it."""
    places = len(seconds) + 1
    done = np.concatenate(([0.0], np.cumsum(seconds)))
    cost = done[None, :] - done[:, None] + crossing[None, :] + crossing[:, None]
    cost[np.tril_indices(places)] = np.inf  # A run has one block at least.
    best = np.full(places, np.inf)
    best[0] = 0.0
    chosen = []
    for _ in range(count):
        reached = np.maximum(best[:, None], cost)
        start = reached.argmin(axis=0)
        best = reached[start, np.arange(places)]
        chosen.append(start)
    stops = [places - 1]
    for start in reversed(chosen[1:]):
        stops.append(int(start[stops[-1]]))
    return stops[::-1]
