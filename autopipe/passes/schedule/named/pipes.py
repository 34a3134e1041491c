"""Reading a pipeline out of blocks: which of them are its stages, forwards and backwards, in which direction."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.ir.block_schedule import BlockGraph
from autopipe.ir.errors import InfeasibleError


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
