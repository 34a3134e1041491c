"""Each rank's instructions: its tasks in the schedule's order, with communication placed around them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopipe.ir.program import Instruction, Loop, Section, Verb
from autopipe.ir.schedule import Phase, Task
from autopipe.passes.lower.posting import SendingOrders, Talking, postings

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


def instructions(tasks: Sequence[Task], talking: Talking, orders: SendingOrders) -> tuple[Instruction, ...]:
    """The rank's instructions for a step: its tasks, with receives before them (see `postings`) and sends behind."""
    found: list[Instruction] = []
    for task, asked in zip(tasks, postings(tasks, talking, orders), strict=True):
        found += asked
        found.append(Instruction(_COMPUTE[task.phase], task.stage, task.micro_batch))
        after = _AFTER.get(task.phase)
        if after is not None and (task.stage, after) in talking.sends:
            found.append(Instruction(after, task.stage, task.micro_batch))
    return tuple(found)


def sections(flat: Sequence[Instruction]) -> tuple[Section, Section, Section]:
    """Warm-up, repetend and cool-down: the loop that covers most, what stands before it and after, rolled up too."""
    loop = _longest_loop(flat)
    if loop is None:
        return tuple(flat), (), ()
    start, length, count, stride = loop
    body = Loop(tuple(flat[start : start + length]), count, stride)
    return _rolled(flat[:start]), (body,), _rolled(flat[start + length * count :])


def _rolled(flat: Sequence[Instruction]) -> Section:
    loop = _longest_loop(flat)
    if loop is None:
        return tuple(flat)
    start, length, count, stride = loop
    body = Loop(tuple(flat[start : start + length]), count, stride)
    return (*_rolled(flat[:start]), body, *_rolled(flat[start + length * count :]))


_LONGEST_BODY = 2048
"""A group of micro-batches of Chimera or of interleaved 1F1B on 32 devices takes some hundred instructions."""


def _longest_loop(flat: Sequence[Instruction]) -> tuple[int, int, int, int] | None:
    """(start, body length, count, stride) of the loop that covers most instructions; the shortest body among equals."""
    kinds: dict[tuple[int, Verb, int | None], int] = {}
    keys = ((each.stage, each.verb, each.source) for each in flat)
    codes = np.array([kinds.setdefault(key, len(kinds)) for key in keys], np.int32)
    indices = np.array([each.micro_batch for each in flat], np.int64)
    best: tuple[int, int, int, int] | None = None
    covered = 0
    for length in range(1, min(_LONGEST_BODY, len(flat) // 2) + 1):
        same = codes[length:] == codes[:-length]
        if np.count_nonzero(same) < max(length, covered + 1 - length):
            continue  # too few for a loop that covers more
        start, count, stride = _longest_run(same, indices, length)
        if length * count > covered:
            best, covered = (start, length, count, stride), length * count
    return best


def _longest_run(same: np.ndarray, indices: np.ndarray, length: int) -> tuple[int, int, int]:
    """(start, count, stride) of the longest run of bodies of `length`, the first among equals; count 0 for none.

    In a run each instruction is the `same` as the one `length` before it but for its micro-batch, which is moved on by
    one same distance.
    """
    distances = np.where(same, np.maximum(indices[length:] - indices[:-length], 0), 0)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(distances)) + 1))
    spans = np.diff(np.concatenate((starts, [len(distances)])))
    counts = np.where((distances[starts] > 0) & (spans >= length), 1 + spans // length, 0)
    found = int(np.argmax(counts))
    return int(starts[found]), int(counts[found]), int(distances[starts[found]])
