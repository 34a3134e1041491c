"""Each rank's instructions: its tasks in the schedule's order, with communication placed around them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from autopipe.ir.program import Instruction, Loop, Section, Verb
from autopipe.ir.schedule import Phase, Task
from autopipe.passes.lower.messages import RankPeers, SendingOrders, postings

_COMPUTE = {
    Phase.FORWARD: Verb.FORWARD,
    Phase.BACKWARD: Verb.BACKWARD,
    Phase.INPUT_GRADIENT: Verb.INPUT_GRADIENT,
    Phase.WEIGHT_GRADIENT: Verb.WEIGHT_GRADIENT,
}
_AFTER = {
    Phase.FORWARD: Verb.SEND,
    Phase.BACKWARD: Verb.SEND_GRADIENT,
    Phase.INPUT_GRADIENT: Verb.SEND_GRADIENT,
}
"""How a task's results leave; the gradients of parameters stay."""


def instructions(tasks: Sequence[Task], talking: RankPeers, orders: SendingOrders) -> tuple[Instruction, ...]:
    """The rank's instructions for a step: its tasks, with receives before them (see `postings`) and sends behind."""
    found: list[Instruction] = []
    for task, asked in zip(tasks, postings(tasks, talking, orders), strict=True):
        found += asked
        found.append(Instruction(_COMPUTE[task.phase], task.stage, task.micro_batch))
        after = _AFTER.get(task.phase)
        if after is not None and (task.stage, after) in talking.sends:
            found.append(Instruction(after, task.stage, task.micro_batch))
    return tuple(found)


def sections(flat: Sequence[Instruction], turns: Sequence[int] = ()) -> tuple[Section, Section, Section]:
    """Warm-up, repetend and cool-down: the loop that covers most, what stands before it and after, rolled up too.

    `turns` are the micro-batches that each stage makes of one of the program's, where that is not one.
    """
    period = math.lcm(*turns)
    units = {stage: period // each for stage, each in enumerate(turns)}
    before, loop, after = _parted(flat, units)
    if loop is None:
        return tuple(flat), (), ()
    return _rolled(before, units), (loop,), _rolled(after, units)


def _rolled(flat: Sequence[Instruction], units: Mapping[int, int]) -> Section:
    before, loop, after = _parted(flat, units)
    if loop is None:
        return tuple(flat)
    return (*_rolled(before, units), loop, *_rolled(after, units))


def _parted(
    flat: Sequence[Instruction], units: Mapping[int, int]
) -> tuple[Sequence[Instruction], Loop | None, Sequence[Instruction]]:
    """The loop that covers most, and what stands before it and after.

    `units` are the lengths of stages' micro-batches, so that what moves on together moves by one distance.
    """
    found = _longest_loop(flat, units)
    if found is None:
        return flat, None, ()
    start, length, count, distance = found
    body = tuple(flat[start : start + length])
    strides = tuple(distance // units.get(each.stage, 1) for each in body)
    loop = Loop(body, count, strides[0], () if len(set(strides)) == 1 else strides)
    return flat[:start], loop, flat[start + length * count :]


_LONGEST_BODY = 2048
"""A group of micro-batches of Chimera or of interleaved 1F1B on 32 devices takes some hundred instructions."""


def _longest_loop(flat: Sequence[Instruction], units: Mapping[int, int]) -> tuple[int, int, int, int] | None:
    """(start, body length, count, distance) of the loop that covers most, the shortest body among equals."""
    kinds: dict[tuple[int, Verb, int | None], int] = {}
    keys = ((each.stage, each.verb, each.source) for each in flat)
    codes = np.array([kinds.setdefault(key, len(kinds)) for key in keys], np.int32)
    indices = np.array([each.micro_batch * units.get(each.stage, 1) for each in flat], np.int64)
    best: tuple[int, int, int, int] | None = None
    covered = 0
    for length in range(1, min(_LONGEST_BODY, len(flat) // 2) + 1):
        same = codes[length:] == codes[:-length]
        if np.count_nonzero(same) < max(length, covered + 1 - length):
            continue  # too few for a loop that covers more
        start, count, distance = _longest_run(same, indices, length)
        if length * count > covered:
            best, covered = (start, length, count, distance), length * count
    return best


def _longest_run(same: np.ndarray, indices: np.ndarray, length: int) -> tuple[int, int, int]:
    """(start, count, distance) of the longest run of bodies of `length`, the first among equals; count 0 for none.

    In a run each instruction is the `same` as the one `length` before it but for its index, which is moved on by one
    same distance.
    """
    distances = np.where(same, np.maximum(indices[length:] - indices[:-length], 0), 0)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(distances)) + 1))
    spans = np.diff(np.concatenate((starts, [len(distances)])))
    counts = np.where((distances[starts] > 0) & (spans >= length), 1 + spans // length, 0)
    found = int(np.argmax(counts))
    return int(starts[found]), int(counts[found]), int(distances[starts[found]])
