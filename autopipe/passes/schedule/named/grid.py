"""The grid of slots that many published schedules are drawn on: a forward and a backward take one slot each.

A unit of work goes down a pipeline of depth p in slots f, f + 1, ..., f + p - 1 and comes back in the next p slots. A
slot's number says only who comes first on a device: when tasks really start follows from their times. Every
task stands in a later slot than all that it waits for, so any order by slots can run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from autopipe.ir.schedule import Phase, Task

Item = TypeVar("Item")


def first_slot(index: int, depth: int, group: int) -> int:
    """The first slot of the index-th unit of a pipeline where units come in groups.

    Those of a group follow two slots apart; a group begins 2 * depth slots after the one before. With groups
    of `depth` units all are two slots apart: 1F1B.
    """
    return 2 * (depth * (index // group) + index % group)


def there_and_back(forwards: Sequence[Item], backwards: Sequence[Item], first: int) -> Iterator[tuple[int, Item]]:
    """(slot, item) of one unit; both are given by stage."""
    last = 2 * len(forwards) - 1
    yield from ((first + stage, item) for stage, item in enumerate(forwards))
    yield from ((first + last - stage, item) for stage, item in enumerate(backwards))


def on_grid(pipeline: Sequence[int], micro_batches: Iterable[int], group: int) -> Iterator[tuple[int, Task]]:
    """(slot, task) of all micro-batches that a pipeline of these stages runs, in groups of `group`."""
    for index, each in enumerate(micro_batches):
        forwards = [Task(stage, Phase.FORWARD, each) for stage in pipeline]
        backwards = [Task(stage, Phase.BACKWARD, each) for stage in pipeline]
        yield from there_and_back(forwards, backwards, first_slot(index, len(pipeline), group))


def by_lane(lanes: Sequence[Sequence[int]], slots: Iterable[tuple[int, Task]]) -> list[list[Task]]:
    """Tasks by slot, on the lane of their stage."""
    lane_of = {stage: place for place, stages in enumerate(lanes) for stage in stages}
    orders: list[list[Task]] = [[] for _ in lanes]
    for _, task in sorted(slots, key=lambda each: each[0]):
        orders[lane_of[task.stage]].append(task)
    return orders
