"""A stage graph for each published schedule: chains of stages on the devices that the schedule
requires.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.ir.schedule import StageGraph


def down(devices: int, times: int = 1) -> tuple[int, ...]:
    """Return the devices in ascending order, repeatedly: 0 1 2 0 1 2."""
    return tuple(range(devices)) * times


def waves(devices: int, times: int = 1) -> tuple[int, ...]:
    """Return the devices in ascending and then in descending order: 0 1 2 2 1 0."""
    return (*range(devices), *reversed(range(devices))) * times


def chain_on(path: Sequence[int], pipelines: int = 1) -> StageGraph:
    """Return one stage per entry of the path. If there are several pipelines, each gets an equal
    part of the path.
    """
    depth = len(path) // pipelines
    edges = tuple((stage, stage + 1) for stage in range(len(path) - 1) if (stage + 1) % depth)
    of = tuple(stage // depth for stage in range(len(path))) if pipelines > 1 else ()
    return StageGraph(max(path) + 1, tuple((device,) for device in path), edges, of)


def suited(name: str, devices: int) -> StageGraph:
    """Return a placement that the schedule requires, with the minimum number of stages."""
    match name:
        case "interleaved_1f1b" | "looped_bfs":
            return chain_on(down(devices, 2))
        case "hanayo" | "zb_v" | "v_half" | "v_min" | "dualpipe_v":
            return chain_on(waves(devices))
        case "chimera" | "dualpipe":
            return chain_on(waves(devices), pipelines=2)
        case _:
            return chain_on(down(devices))
