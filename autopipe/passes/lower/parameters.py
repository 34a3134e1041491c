"""Which rank holds which block of which parameter, and whose gradients add up."""

from __future__ import annotations

from collections.abc import Iterator

from autopipe.ir.graph import Graph
from autopipe.ir.layout import Box, Layout, holders_by_box
from autopipe.ir.program import Shard
from autopipe.passes.lower.shard import ShardedStage


def parameter_shards(graph: Graph, devices: int, stages: tuple[ShardedStage, ...]) -> tuple[tuple[Shard, ...], ...]:
    """For each rank its blocks of parameters; ranks with the same block of a parameter share its gradient.

    No parameter may be torn (see `torn_parameters`).
    """
    indices = {parameter.value.name: index for index, parameter in enumerate(graph.parameters)}
    holders: dict[tuple[int, Box], set[int]] = {}
    users: dict[tuple[int, Box], set[int]] = {}
    for name, holding, box, stage in _blocks(stages):
        holders.setdefault((indices[name], box), set()).update(holding)
        users.setdefault((indices[name], box), set()).add(stage)
    shards: list[list[Shard]] = [[] for _ in range(devices)]
    for (index, box), ranks in sorted(holders.items(), key=lambda item: (item[0][0], sorted(item[1]))):
        stages_using = users[index, box]
        home = min(stages_using) if len(stages_using) == 1 else None
        if home is not None and ranks != set(stages[home].code.devices):
            home = None
        shard = Shard(index, box, tuple(sorted(ranks)), home)
        for rank in ranks:
            shards[rank].append(shard)
    return tuple(map(tuple, shards))


def torn_parameters(stages: tuple[ShardedStage, ...]) -> frozenset[str]:
    """Parameters of which a rank would hold two blocks, or whose blocks overlap without being equal."""
    boxes: dict[str, dict[Box, set[int]]] = {}
    torn: set[str] = set()
    for name, holding, box, _ in _blocks(stages):
        others = boxes.setdefault(name, {})
        for other, ranks in others.items():
            if other != box and (not ranks.isdisjoint(holding) or other.intersect(box) is not None):
                torn.add(name)
        others.setdefault(box, set()).update(holding)
    return frozenset(torn)


def _blocks(stages: tuple[ShardedStage, ...]) -> Iterator[tuple[str, frozenset[int], Box, int]]:
    """Each (parameter, ranks, block, stage)."""
    for stage in stages:
        devices = stage.code.devices
        ranks: dict[Layout, list[tuple[frozenset[int], Box]]] = {}
        for name, layout in stage.parameters.items():
            if layout not in ranks:
                boxes = holders_by_box(layout, len(devices))
                ranks[layout] = [(frozenset(devices[place] for place in places), box) for box, places in boxes]
            for holding, box in ranks[layout]:
                yield name, holding, box, stage.code.stage
