"""Which rank holds which block of which parameter, and whose gradients add up."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from autopipe.ir.graph import Graph
from autopipe.ir.layout import Box, Layout
from autopipe.ir.program import Shard
from autopipe.passes.lower.shard import ShardedStage


def parameter_shards(graph: Graph, devices: int, stages: tuple[ShardedStage, ...]) -> tuple[tuple[Shard, ...], ...]:
    """For each rank its blocks of parameters; ranks with the same block of a parameter share its gradient.

    No parameter may be torn (see `torn_parameters`).
    """
    indices = {parameter.value.name: index for index, parameter in enumerate(graph.parameters)}
    holders: dict[tuple[int, Box], set[int]] = {}
    users: dict[tuple[int, Box], set[int]] = {}
    for name, rank, box, stage in _blocks(stages):
        holders.setdefault((indices[name], box), set()).add(rank)
        users.setdefault((indices[name], box), set()).add(stage)
    shards: list[list[Shard]] = [[] for _ in range(devices)]
    for (index, box), ranks in sorted(holders.items(), key=lambda item: (item[0][0], sorted(item[1]))):
        stages_using = users[index, box]
        home = min(stages_using) if len(stages_using) == 1 else None
        if home is not None and ranks != set(stages[home].code.devices):
            home = None
        for rank in ranks:
            shards[rank].append(Shard(index, box, tuple(sorted(ranks)), home))
    return tuple(map(tuple, shards))


def torn_parameters(stages: tuple[ShardedStage, ...]) -> frozenset[str]:
    """Parameters of which a rank would hold two blocks, or whose blocks overlap without being equal."""
    boxes: dict[str, set[Box]] = {}
    held: dict[tuple[str, int], Box] = {}
    torn: set[str] = set()
    for name, rank, box, _ in _blocks(stages):
        others = boxes.setdefault(name, set())
        if held.setdefault((name, rank), box) != box:
            torn.add(name)
        if any(other != box and other.intersect(box) is not None for other in others):
            torn.add(name)
        others.add(box)
    return frozenset(torn)


def _blocks(stages: tuple[ShardedStage, ...]) -> Iterator[tuple[str, int, Box, int]]:
    """Each (parameter, rank, block, stage)."""
    for stage in stages:
        devices = stage.code.devices
        for name, layout in stage.parameters.items():
            for rank, box in zip(devices, _boxes(layout, len(devices)), strict=True):
                yield name, rank, box, stage.code.stage


@lru_cache(maxsize=1024)
def _boxes(layout: Layout, group: int) -> tuple[Box, ...]:
    """Every device's block. Layers repeat, so few layouts are asked for often."""
    return tuple(map(layout.box, range(group)))
