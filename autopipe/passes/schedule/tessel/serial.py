"""An order of one unit's blocks, one at a time, that memory suffices for: every search begins from it."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from autopipe.ir.block_schedule import BlockGraph
from autopipe.ir.errors import InfeasibleError
from autopipe.passes.schedule.room import require_room
from autopipe.passes.schedule.tessel.cyclic import sharing_pairs
from autopipe.passes.schedule.tessel.memory import reserved
from autopipe.passes.solvers.cp_sat import Limit, Status, solve

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar


def serial_order(graph: BlockGraph, units: int, limit: Limit) -> tuple[int, ...]:
    """An order within the room on all devices for `units` units, one after the other.

    Raises InfeasibleError, with the device and the least room that would do, where there is none.
    """
    last, order = reserved(graph, units - 1), _greedy(graph)
    if _fits(last, order):
        return order
    found = _solved(last, limit)
    if isinstance(found, tuple):
        return found
    require_room(graph, units)
    if found is Status.INFEASIBLE:
        raise InfeasibleError("no order of one unit's blocks keeps to the memory limits of all devices")
    raise InfeasibleError(
        "no order of one unit's blocks was found that keeps to the memory limits", hint="search longer, or raise them"
    )


def _fits(graph: BlockGraph, order: tuple[int, ...]) -> bool:
    for device, room in enumerate(graph.memory):
        if room is not None:
            used = 0
            for index in order:
                if device in graph.blocks[index].devices:
                    used += graph.blocks[index].memory
                    if used > room:
                        return False
    return True


def _greedy(graph: BlockGraph) -> tuple[int, ...]:
    """Of the blocks that may start, one that allocates nothing if there is any, otherwise the one readied last."""
    waits = [len(set(block.after)) for block in graph.blocks]
    following: list[list[int]] = [[] for _ in graph.blocks]
    for index, block in enumerate(graph.blocks):
        for other in set(block.after):
            following[other].append(index)
    order: list[int] = []
    ready = [(block.memory > 0, 0, index) for index, block in enumerate(graph.blocks) if not block.after]
    heapq.heapify(ready)
    while ready:
        index = heapq.heappop(ready)[-1]
        order.append(index)
        for other in following[index]:
            waits[other] -= 1
            if waits[other] == 0:
                heapq.heappush(ready, (graph.blocks[other].memory > 0, -len(order), other))
    return tuple(order)


def _solved(graph: BlockGraph, limit: Limit) -> tuple[int, ...] | Status:
    """An order that fits, or how the search for one ended."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    count = len(graph.blocks)
    places = [model.new_int_var(0, count - 1, "") for _ in range(count)]
    for index, block in enumerate(graph.blocks):
        for other in block.after:
            model.add(places[other] < places[index])
    before: dict[tuple[int, int], IntVar] = {}
    for first, second in sharing_pairs(graph):
        holds = before[first, second] = model.new_bool_var("")
        model.add(places[first] < places[second]).only_enforce_if(holds)
        model.add(places[second] < places[first]).only_enforce_if(holds.negated())
    for device, room in enumerate(graph.memory):
        if room is not None:
            _keep_memory(graph, model, before, device, room)
    answer = solve(model, places, limit)
    if not answer.found:
        return answer.status
    return tuple(sorted(range(count), key=lambda index: (answer.values[index], index)))


def _keep_memory(
    graph: BlockGraph, model: CpModel, before: dict[tuple[int, int], IntVar], device: int, room: int
) -> None:
    members = [index for index, block in enumerate(graph.blocks) if device in block.devices]
    for index in members:
        if graph.blocks[index].memory > 0:
            earlier = (
                graph.blocks[other].memory * (before[other, index] if other < index else 1 - before[index, other])
                for other in members
                if other != index
            )
            model.add(graph.blocks[index].memory + sum(earlier) <= room)
