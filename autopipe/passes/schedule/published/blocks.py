"""Published schedules on blocks: each device's order by the schedule's own grid, every block as soon as that allows.

Reading a pipeline out of blocks: which of them are its stages, forwards and backwards, in which direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autopipe.ir.block_schedule import BlockGraph, BlockSchedule
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.passes.schedule.published.base import first_slot, there_and_back
from autopipe.passes.schedule.tessel.model import in_order, observed_state


@dataclass(frozen=True, slots=True)
class Pipe:
    """A chain of blocks that goes over devices one by one and, in training, comes back the same way."""

    devices: tuple[int, ...]
    """The device of each stage."""
    forwards: tuple[int, ...]
    """The forward of each stage, as an index into the graph's blocks."""
    backwards: tuple[int, ...]
    """The backward of each stage; () without training."""
    shared: tuple[tuple[int, int, bool], ...] = ()
    """(block on several devices, block of a stage that it stands beside, whether it comes before that one)."""


def pipes_of(graph: BlockGraph, schedule: str) -> tuple[Pipe, ...]:
    """The pipes of a graph, in the order of their first blocks. Raises InfeasibleError where it is anything else."""
    chains: list[list[int]] = []
    for index in graph.order:
        after = graph.blocks[index].after
        chain = next((each for each in chains if after == (each[-1],)), None)
        if chain is not None:
            chain.append(index)
        elif after:
            raise _refusal(schedule, f"block {graph.blocks[index].name!r} makes a branch")
        else:
            chains.append([index])
    return tuple(_pipe(graph, chain, schedule) for chain in chains)


def _pipe(graph: BlockGraph, chain: list[int], schedule: str) -> Pipe:
    stages = [index for index in chain if len(graph.blocks[index].devices) == 1]
    path = [graph.blocks[index].devices[0] for index in stages]
    there = len(path) if len(set(path)) == len(path) else len(path) // 2
    devices, back = path[:there], path[there:]
    if not path or len(set(devices)) < there or back not in ([], devices[::-1]):
        raise _refusal(schedule, f"devices {path} are not passed once there and once back")
    forwards, backwards = tuple(stages[:there]), tuple(reversed(stages[there:]))
    return Pipe(tuple(devices), forwards, backwards, tuple(_beside(graph, chain, forwards[-1])))


def _beside(graph: BlockGraph, chain: list[int], turn: int) -> list[tuple[int, int, bool]]:
    """Each block on several devices with its neighbour: up to the last forward the next stage, then the one before."""
    single = {index for index in chain if len(graph.blocks[index].devices) == 1}
    found = []
    for place, index in enumerate(chain):
        if index in single:
            continue
        before = place < chain.index(turn)
        near = chain[place:] if before else chain[place::-1]
        found.append((index, next(other for other in near if other in single), before))
    return found


def _refusal(schedule: str, reason: str) -> InfeasibleError:
    return InfeasibleError(
        f"schedule {schedule} runs chains of stages, but {reason}", hint="tessel takes any blocks", where="blocks"
    )


Slots = Iterator[tuple[int, int, int]]
"""(slot, unit, block)."""


def block_schedule_names() -> tuple[str, ...]:
    """Names of the schedules that blocks can follow, sorted."""
    return tuple(sorted(_SLOTS))


def schedule_blocks(name: str, graph: BlockGraph, units: int) -> BlockSchedule:
    """`units` units of blocks under the named schedule.

    Raises ConfigurationError where there is no such schedule or the blocks are malformed, InfeasibleError where the
    schedule has no place for them or memory is too small, with the device and what it would need.
    """
    if name not in _SLOTS:
        raise ConfigurationError(
            f"schedule {name!r} does not take blocks", hint=f"these do: {', '.join(block_schedule_names())}, tessel"
        )
    if units < 1:
        raise ConfigurationError(f"there must be 1 unit or more, not {units}")
    graph.verify()
    place = {index: position for position, index in enumerate(graph.order)}
    slots = sorted(_SLOTS[name](graph, units), key=lambda each: (each[0], each[1], place[each[2]]))
    starts = in_order(graph, units, [(unit, index) for _, unit, index in slots])
    schedule = observed_state(graph, starts)
    for device, (peak, room) in enumerate(zip(schedule.peak_memory, graph.memory, strict=True)):
        if room is not None and peak > room:
            raise InfeasibleError(
                f"schedule {name} needs memory {peak} where there is {room}", where=f"device {device}"
            )
    return schedule


def _gpipe(graph: BlockGraph, units: int) -> Slots:
    """All forwards, then the rest. Forwards are the blocks that add memory, and those that one of them waits for."""
    forward = {index for index, block in enumerate(graph.blocks) if block.memory > 0}
    for index in reversed(graph.order):
        if index in forward:
            forward.update(graph.blocks[index].after)
    for unit in range(units):
        for place, index in enumerate(graph.order):
            first = 0 if index in forward or not forward else units + len(graph.blocks)
            yield first + unit + place, unit, index


def _one_f_one_b(graph: BlockGraph, units: int) -> Slots:
    _refuse_shared(graph, "1f1b")
    return _one_f_one_b_plus(graph, units)


def _one_f_one_b_plus(graph: BlockGraph, units: int) -> Slots:
    """1F1B's grid, with what several devices run together between its slots, beside its neighbour's.

    Lin et al., "Tessel" (HPCA 2024), section VI-A. Forwards alone follow one another closely.
    """
    pipes = pipes_of(graph, "1f1b_plus")
    if len(pipes) > 1:
        raise InfeasibleError("schedule 1f1b runs one chain of stages, but these blocks are several", where="blocks")
    for unit in range(units):
        first = 2 * unit if pipes[0].backwards else unit
        slot = {index: place for place, index in there_and_back(pipes[0].forwards, pipes[0].backwards, first)}
        yield from ((2 * place, unit, index) for index, place in slot.items())
        yield from ((2 * slot[near] + (-1 if before else 1), unit, index) for index, near, before in pipes[0].shared)


def _chimera(graph: BlockGraph, units: int) -> Slots:
    """Two opposite pipes on the grid, in groups of half as many units as there are devices: see `Chimera`."""
    _refuse_shared(graph, "chimera")
    pipes = pipes_of(graph, "chimera")
    if len(pipes) != 2 or pipes[0].devices != pipes[1].devices[::-1] or len(pipes[0].devices) % 2:
        raise InfeasibleError(
            "schedule chimera runs two chains over the same even number of devices, in opposite directions",
            hint="shape x is such",
            where="blocks",
        )
    depth = len(pipes[0].devices)
    group = depth // 2 if pipes[0].backwards else units
    for unit in range(units):
        for pipe in pipes:
            slots = there_and_back(pipe.forwards, pipe.backwards, first_slot(unit, depth, group))
            yield from ((slot, unit, index) for slot, index in slots)


def _refuse_shared(graph: BlockGraph, schedule: str) -> None:
    """Raise InfeasibleError, naming the first, where blocks are on several devices."""
    shared = next((block.name for block in graph.blocks if len(block.devices) > 1), None)
    if shared is not None:
        reason = f"schedule {schedule} runs blocks of one device each"
        raise InfeasibleError(reason, hint="take 1f1b_plus or tessel", where=f"block {shared!r}")


_SLOTS: dict[str, Callable[[BlockGraph, int], Slots]] = {
    "1f1b": _one_f_one_b,
    "1f1b_plus": _one_f_one_b_plus,
    "chimera": _chimera,
    "gpipe": _gpipe,
}
