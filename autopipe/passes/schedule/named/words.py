"""A device's order spelled as it is drawn: F0 F1 B1 W ...

A letter is a phase; the digit behind it says on which of the device's stages. W stands alone: the oldest weight
gradient that is owed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from autopipe.ir.schedule import Phase, Task


def spell(words: Iterable[str], stages: Sequence[int], micro_batches: Sequence[Sequence[int]]) -> list[Task]:
    """The tasks that words stand for.

    `stages` are the device's, `micro_batches` those that each of them runs, in order: a word takes the first one that
    has not had its forward, or its backward. One that finds none left says nothing.
    """
    forwards, backwards = ([deque(each) for each in micro_batches] for _ in range(2))
    owed: deque[Task] = deque()
    order: list[Task] = []
    for word in words:
        if word == "W":
            order.append(owed.popleft())
            continue
        phase, place = Phase(word[0]), int(word[1:])
        left = (forwards if phase is Phase.FORWARD else backwards)[place]
        if not left:
            continue
        task = Task(stages[place], phase, left.popleft())
        order.append(task)
        if phase is Phase.INPUT_GRADIENT:
            owed.append(Task(task.stage, Phase.WEIGHT_GRADIENT, task.micro_batch))
    return order
