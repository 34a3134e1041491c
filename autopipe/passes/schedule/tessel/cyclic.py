"""A cyclic schedule: one unit's starts, repeated every period; and whether it keeps all rules."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from autopipe.ir.block_schedule import BlockGraph
from autopipe.passes.schedule.tessel.memory import changes


@dataclass(frozen=True, slots=True)
class PeriodicStarts:
    """Block i of unit n starts at `starts[i] + period * n`, for every whole n."""

    period: int
    starts: tuple[int, ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """Periods that each block starts after the period of the first one."""
        first = min(self.starts) // self.period
        return tuple(start // self.period - first for start in self.starts)

    @property
    def phases(self) -> tuple[int, ...]:
        """Start of each block within its period."""
        return tuple(start % self.period for start in self.starts)

    def latency(self, graph: BlockGraph) -> int:
        """Time of one unit from its first start to its last end."""
        ends = [start + block.time for start, block in zip(self.starts, graph.blocks, strict=True)]
        return max(ends) - min(self.starts)


def steady_peak(graph: BlockGraph, cyclic: PeriodicStarts, device: int) -> int:
    """Most memory in use on a device while units follow one another without end."""
    added = changes(graph, device)
    phases, stages = cyclic.phases, cyclic.stages
    used = -sum(change * stages[index] for index, change in added.items())
    peak = 0
    for index in sorted(added, key=lambda each: phases[each]):
        used += added[index]
        peak = max(peak, used)
    return peak


def is_valid(graph: BlockGraph, cyclic: PeriodicStarts) -> bool:
    """True if dependencies are kept, no two blocks of any units overlap on a device, and memory suffices."""
    starts, period = cyclic.starts, cyclic.period
    for index, block in enumerate(graph.blocks):
        for position, other in enumerate(block.after):
            if starts[index] < starts[other] + graph.blocks[other].time + block.delay(position):
                return False
        if block.time > period:
            return False
    for first, second in sharing_pairs(graph):
        gap = (starts[second] - starts[first]) % period
        if gap < graph.blocks[first].time or period - gap < graph.blocks[second].time:
            return False
    limits = enumerate(graph.memory)
    return all(limit is None or steady_peak(graph, cyclic, device) <= limit for device, limit in limits)


def sharing_pairs(graph: BlockGraph) -> list[tuple[int, int]]:
    """Pairs of blocks that share a device, each once."""
    pairs: set[tuple[int, int]] = set()
    for device in range(graph.devices):
        members = [index for index, block in enumerate(graph.blocks) if device in block.devices]
        pairs.update(combinations(members, 2))
    return sorted(pairs)
