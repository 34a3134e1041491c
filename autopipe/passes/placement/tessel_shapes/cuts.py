"""A run of nodes cut into stages that take equally long."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Device
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.placement import recomputed_nodes
from autopipe.passes.analysis.chain import Chain
from autopipe.passes.placement.tessel_shapes.model import CostedModel

_ROUNDING = 1e-9
"""Share of a sum of seconds that rounding may be off by."""

_Floats = NDArray[np.float64]
Stages = tuple[tuple[int, ...], ...]
"""The nodes of each stage, ascending."""


@dataclass(frozen=True, slots=True, eq=False)
class CutLine:
    """A run of nodes in blocks, between which it may be cut, and what tells where."""

    blocks: Stages
    seconds: _Floats
    """Of each block, on average over kinds of devices."""
    on_kind: dict[Device, _Floats]
    crossing: _Floats
    """For each place between two blocks, and 0 at both ends, the seconds of sending what crosses it."""
    sizes: _Floats
    """Bytes of the parameters that each block is the first to read."""

    def even(self, count: int) -> Stages:
        """`count` runs of blocks whose slowest is fastest, with the time that messages take at either end."""
        return self._cut([self.seconds] * count, [np.inf] * count)

    def even_on(self, kinds: Sequence[Device], room: Sequence[float]) -> Stages:
        """The same for a run on each of some devices; none has more bytes of parameters than there is room for.

        Raises InfeasibleError where the blocks are too few or the room is.
        """
        return self._cut([self.on_kind[kind] for kind in kinds], room)

    def _cut(self, seconds: Sequence[_Floats], room: Sequence[float]) -> Stages:
        count = len(room)
        if len(self.blocks) < count:
            raise InfeasibleError(
                f"{len(self.blocks)} operators cannot be cut into {count} stages",
                hint="take fewer devices or fewer chunks",
            )
        stops = best_stops(seconds, self.crossing, self.sizes, room)
        if not stops:
            raise InfeasibleError(f"{count} stages have no room for their parameters", hint="use more devices")
        runs = zip([0, *stops[:-1]], stops, strict=True)
        return tuple(tuple(sorted(node for block in self.blocks[start:stop] for node in block)) for start, stop in runs)


@remembered(GRAPHS)
def line_of(model: CostedModel, chain: Chain, nodes: Sequence[int]) -> CutLine:
    """Nodes of `nodes` in each block of a chain."""
    groups: dict[int, list[int]] = {}
    for node in nodes:
        groups.setdefault(int(chain.block_of[node]), []).append(node)
    blocks = tuple(tuple(sorted(groups[block])) for block in sorted(groups))
    on_kind = {
        kind: np.array([float(seconds[list(block)].sum()) for block in blocks])
        for kind, seconds in model.on_kind.items()
    }
    seconds = np.array([model.weighs(block) for block in blocks])
    return CutLine(blocks, seconds, on_kind, _crossing_seconds(model, blocks), _parameter_bytes(model, blocks))


def _crossing_seconds(model: CostedModel, blocks: Stages) -> _Floats:
    """`CutLine.crossing` of some blocks."""
    graph, recomputed = model.graph, recomputed_nodes(model.graph)
    link = model.cluster.slowest_link(range(model.devices))
    place = {node: index for index, block in enumerate(blocks) for node in block}
    change = np.zeros(len(blocks) + 2)
    for node in place.keys() - recomputed:
        for name in graph.nodes[node].outputs:
            last = max((place[reader] for reader in model.readers.get(name, ()) if reader in place), default=0)
            if last > place[node]:
                price = link.seconds(graph.type_of(name).bytes)
                change[place[node] + 1] += price
                change[last + 1] -= price
    crossing: _Floats = np.cumsum(change)[: len(blocks) + 1]
    crossing[[0, -1]] = 0.0
    return crossing


def _parameter_bytes(model: CostedModel, blocks: Stages) -> _Floats:
    """`CutLine.sizes` of some blocks."""
    seen: set[str] = set()
    found = np.zeros(len(blocks))
    for index, block in enumerate(blocks):
        read = {name for node in block for name in model.graph.nodes[node].inputs if model.graph.parameter(name)} - seen
        found[index] = sum(model.graph.type_of(name).bytes for name in read)
        seen |= read
    return found


def best_stops(
    seconds: Sequence[_Floats],
    crossing: _Floats,
    sizes: _Floats,
    room: Sequence[float],
) -> list[int]:
    """Where each of the runs ends, one for each entry of `room`, which no run's sum of `sizes` exceeds.

    The largest sum of a run's own `seconds` is least, what crosses its ends counted with it. [] where there is no
    answer. A run that takes longer than the slowest of an answer that is known cannot be part of the best, so that few
    starts are looked at for each end.
    """
    places = np.arange(len(crossing))
    width = _most_blocks(seconds, crossing, sizes, room)
    ends, size = _before(crossing, width, 0.0), _sums(sizes, width)
    best = np.full(len(places), np.inf)
    best[0] = 0.0
    chosen = []
    costs: dict[tuple[int, float], _Floats] = {}
    for own, most in zip(seconds, room, strict=True):
        key = id(own), most
        if key not in costs:
            whole = _sums(own, width) + crossing[:, None] + ends
            costs[key] = np.where(size > most, np.inf, whole)
        reached = np.maximum(_before(best, width, np.inf), costs[key])
        start = reached.argmin(axis=1)
        best = reached[places, start]
        chosen.append(start + places - width)
    if not np.isfinite(best[-1]):
        return []
    stops = [len(places) - 1]
    for start in reversed(chosen[1:]):
        stops.append(int(start[stops[-1]]))
    return stops[::-1]


def _most_blocks(
    seconds: Sequence[_Floats],
    crossing: _Floats,
    sizes: _Floats,
    room: Sequence[float],
) -> int:
    """The most blocks that a run can have which is no slower than the slowest of runs with equal work."""
    blocks, count = len(sizes), len(room)
    done = np.concatenate(([0.0], np.cumsum(np.sum(seconds, axis=0))))
    spread = np.searchsorted(done, done[-1] * np.arange(1, count + 1) / count)
    stops = [0]
    for stage, stop in enumerate(spread):
        stops.append(min(max(int(stop), stops[-1] + 1), blocks - count + 1 + stage))
    stops[-1] = blocks
    runs = list(itertools.pairwise(stops))
    held = np.concatenate(([0.0], np.cumsum(sizes)))
    if any(held[stop] - held[start] > most for (start, stop), most in zip(runs, room, strict=True)):
        return blocks
    slowest = max(
        float(own[start:stop].sum() + crossing[start] + crossing[stop])
        for own, (start, stop) in zip(seconds, runs, strict=True)
    )
    found = 1
    for own in {id(each): each for each in seconds}.values():
        done = np.concatenate(([0.0], np.cumsum(own)))
        first = np.searchsorted(done, done - slowest * (1 + _ROUNDING) - _ROUNDING * done[-1])
        found = max(found, int((np.arange(blocks + 1) - first).max()))
    return found


def _before(figures: _Floats, width: int, none: float) -> _Floats:
    """At [b, j] entry b - width + j; `none` before the first."""
    return np.lib.stride_tricks.sliding_window_view(np.concatenate((np.full(width, none), figures)), width)[:-1]


def _sums(figures: _Floats, width: int) -> _Floats:
    """At [b, j] the sum from entry b - width + j to b - 1; infinite where there is no such start."""
    done = np.concatenate(([0.0], np.cumsum(figures)))
    found: _Floats = done[:, None] - _before(done, width, -np.inf)
    return found
