"""Whether memory suffices for one unit, in which order, and what the least is that would do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autopipe.ir.blocks import BlockGraph
from autopipe.ir.errors import InfeasibleError
from autopipe.passes.schedule.tessel.cyclic import sharing_pairs
from autopipe.passes.solvers.cp_sat import Limit, Status, solve

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import IntVar


def serial_order(graph: BlockGraph, limit: Limit) -> tuple[int, ...]:
    """An order of the blocks of one unit, one at a time, within the room on all devices.

    Raises InfeasibleError, with the device and the least room that would do, where there is none.
    """
    order = _greedy(graph)
    if not _missing(graph, order):
        return order
    order, proven = _least(graph, limit)
    missing = _missing(graph, order)
    if not missing:
        return order
    device = missing[0]
    alone, proven = _least(replace(graph, memory=_only(graph, device)), limit)
    least = peaks(graph, alone)[device]
    others = ""
    if least <= (graph.memory[device] or 0):
        # Each device alone would do, but not together: what this one needs when the others keep to theirs.
        least, others = peaks(graph, order)[device], " with the others as they are"
    hint = f"{'the least that would do is' if proven else 'this much would do:'} {least}{others}"
    raise InfeasibleError(
        f"one unit alone needs more memory than its room of {graph.memory[device]}", hint, f"device {device}"
    )


def peaks(graph: BlockGraph, order: Sequence[int]) -> tuple[int, ...]:
    """Most memory in use on each device while one unit runs in this order."""
    used, most = [0] * graph.devices, [0] * graph.devices
    for index in order:
        block = graph.blocks[index]
        for device in block.devices:
            used[device] += block.memory
            most[device] = max(most[device], used[device])
    return tuple(most)


def _missing(graph: BlockGraph, order: Sequence[int]) -> list[int]:
    """Devices on which this order needs more than there is."""
    rooms = zip(peaks(graph, order), graph.memory, strict=True)
    return [device for device, (peak, room) in enumerate(rooms) if room is not None and peak > room]


def _only(graph: BlockGraph, device: int) -> tuple[int | None, ...]:
    return tuple(room if each == device else None for each, room in enumerate(graph.memory))


def _greedy(graph: BlockGraph) -> tuple[int, ...]:
    """Of the blocks that may start, one that frees memory if there is any, otherwise one furthest along."""
    waits = [len(set(block.after)) for block in graph.blocks]
    following: list[list[int]] = [[] for _ in graph.blocks]
    for index, block in enumerate(graph.blocks):
        for other in set(block.after):
            following[other].append(index)
    rank = {index: place for place, index in enumerate(graph.order)}
    ready = [index for index, count in enumerate(waits) if count == 0]
    newest: dict[int, int] = {}
    order: list[int] = []
    while ready:
        index = min(ready, key=lambda each: (graph.blocks[each].memory > 0, -newest.get(each, -1), rank[each]))
        ready.remove(index)
        order.append(index)
        for other in following[index]:
            waits[other] -= 1
            if waits[other] == 0:
                ready.append(other)
                newest[other] = len(order)
    return tuple(order)


def _least(graph: BlockGraph, limit: Limit) -> tuple[tuple[int, ...], bool]:
    """The order that exceeds rooms by the least in all, and whether that is proven."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    count = len(graph.blocks)
    places = [model.new_int_var(0, count - 1, "") for _ in range(count)]
    for index, block in enumerate(graph.blocks):
        for other in block.after:
            model.add(places[other] < places[index])
    before: dict[tuple[int, int], IntVar] = {}
    for first, second in sharing_pairs(graph):
        before[first, second] = model.new_bool_var("")
        model.add(places[first] < places[second]).only_enforce_if(before[first, second])
        model.add(places[second] < places[first]).only_enforce_if(before[first, second].negated())
    excess = []
    for device, room in enumerate(graph.memory):
        if room is None:
            continue
        members = [index for index, block in enumerate(graph.blocks) if device in block.devices]
        over = model.new_int_var(0, sum(abs(graph.blocks[index].memory) for index in members) + abs(room), "")
        excess.append(over)
        for index in members:
            if graph.blocks[index].memory > 0:
                earlier = sum(
                    graph.blocks[other].memory * (before[other, index] if other < index else 1 - before[index, other])
                    for other in members
                    if other != index
                )
                model.add(graph.blocks[index].memory + earlier <= room + over)
    model.minimize(sum(excess))
    for place, index in enumerate(_greedy(graph)):
        model.add_hint(places[index], place)
    answer = solve(model, places, limit)
    if not answer.found:
        return _greedy(graph), False
    order = sorted(range(count), key=lambda index: (answer.values[index], index))
    return tuple(order), answer.status is Status.OPTIMAL
