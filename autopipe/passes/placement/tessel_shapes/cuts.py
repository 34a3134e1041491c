"""A run of nodes cut into stages that take equally long."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import recomputed_nodes
from autopipe.passes.cost.chain import Chain
from autopipe.passes.placement.tessel_shapes.model import CostedModel


def even_stages(
    model: CostedModel, chain: Chain, nodes: Sequence[int], count: int, devices: Sequence[int] = ()
) -> tuple[tuple[int, ...], ...]:
    """`nodes` in `count` runs of the line whose slowest is fastest, with the time that messages take at either end.

    Where the device of each run is given, time is that on it, and none has more parameters than there is room for. Cuts
    stand between blocks of the line. Raises InfeasibleError where the blocks are too few or the room is.
    """
    groups: dict[int, list[int]] = {}
    for node in nodes:
        groups.setdefault(int(chain.block_of[node]), []).append(node)
    blocks = [tuple(sorted(groups[block])) for block in sorted(groups)]
    if len(blocks) < count:
        raise InfeasibleError(
            f"{len(blocks)} operators cannot be cut into {count} stages", hint="take fewer devices or fewer chunks"
        )
    kinds = [model.problem.cluster.devices[device] for device in devices]
    by_kind = {
        kind: np.array([float(model.on_kind[kind][list(block)].sum()) for block in blocks]) for kind in set(kinds)
    }
    seconds = [by_kind[kind] for kind in kinds] or [np.array([model.weighs(block) for block in blocks])] * count
    room = [model.room[device] for device in devices] or [np.inf] * count
    stops = best_stops(seconds, _crossing_seconds(model, blocks), _parameter_bytes(model, blocks), room)
    if not stops:
        raise InfeasibleError(f"{count} stages have no room for their parameters", hint="use more devices")
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


def _parameter_bytes(model: CostedModel, blocks: Sequence[tuple[int, ...]]) -> NDArray[np.float64]:
    """Bytes of the parameters that each block is the first to read."""
    seen: set[str] = set()
    found = np.zeros(len(blocks))
    for index, block in enumerate(blocks):
        read = {name for node in block for name in model.graph.nodes[node].inputs if model.graph.parameter(name)} - seen
        found[index] = sum(model.graph.type_of(name).bytes for name in read)
        seen |= read
    return found


def best_stops(
    seconds: Sequence[NDArray[np.float64]],
    crossing: NDArray[np.float64],
    sizes: NDArray[np.float64],
    room: Sequence[float],
) -> list[int]:
    """Where each of the runs ends, one for each entry of `room`, which no run's sum of `sizes` exceeds.

    The largest sum of a run's own `seconds` is least, what crosses its ends counted with it. [] where there is no
    answer.
    """
    places = len(crossing)
    size = _sums(sizes)
    best = np.full(places, np.inf)
    best[0] = 0.0
    chosen = []
    costs: dict[int, NDArray[np.float64]] = {}
    for own, most in zip(seconds, room, strict=True):
        if id(own) not in costs:
            costs[id(own)] = _sums(own) + crossing[None, :] + crossing[:, None]
            costs[id(own)][np.tril_indices(places)] = np.inf  # A run has one block at least.
        reached = np.maximum(best[:, None], np.where(size > most, np.inf, costs[id(own)]))
        start = reached.argmin(axis=0)
        best = reached[start, np.arange(places)]
        chosen.append(start)
    if not np.isfinite(best[-1]):
        return []
    stops = [places - 1]
    for start in reversed(chosen[1:]):
        stops.append(int(start[stops[-1]]))
    return stops[::-1]


def _sums(figures: NDArray[np.float64]) -> NDArray[np.float64]:
    """At [a, b] the sum from entry a to b - 1."""
    done = np.concatenate(([0.0], np.cumsum(figures)))
    found: NDArray[np.float64] = done[None, :] - done[:, None]
    return found
