"""Blocks of several units as a model for CP-SAT: some stand where they are, others are to be placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopipe.ir.block_schedule import BlockGraph

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar

Task = tuple[int, int]
"""(unit, block)"""


@dataclass(frozen=True, slots=True)
class StartWindow:
    """Where a block may start, and where it is known to fit."""

    first: int
    last: int
    known: int


@dataclass(frozen=True, slots=True)
class TaskModel:
    """The model, and a start of each task."""

    model: CpModel
    starts: dict[Task, int | IntVar]
    free: tuple[Task, ...]

    @property
    def variables(self) -> list[IntVar]:
        """Starts of the free tasks, in their order."""
        return [start for task in self.free if not isinstance(start := self.starts[task], int)]


def model_tasks(
    graph: BlockGraph, given: Mapping[Task, int], free: Mapping[Task, StartWindow], in_use: Sequence[int]
) -> TaskModel:
    """All ways to place the free tasks among the given ones, with `in_use` memory in use on each device before.

    Units are alike, so that a unit may be taken to start each block before the next unit does.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    starts: dict[Task, int | IntVar] = dict(given)
    for task, window in free.items():
        variable = model.new_int_var(window.first, window.last, "")
        model.add_hint(variable, window.known)
        starts[task] = variable
    made = TaskModel(model, starts, tuple(free))
    for unit, index in starts:
        block = graph.blocks[index]
        for position, other in enumerate(block.after):
            _follow(made, (unit, other), (unit, index), graph.blocks[other].time + block.delay(position))
        _follow(made, (unit, index), (unit + 1, index), block.time)
    for device, room in enumerate(graph.memory):
        members = [task for task in starts if device in graph.blocks[task[1]].devices]
        model.add_no_overlap(
            model.new_fixed_size_interval_var(starts[task], graph.blocks[task[1]].time, "") for task in members
        )
        if room is not None:
            _keep_memory(graph, made, members, room - in_use[device])
    return made


def _follow(made: TaskModel, before: Task, after: Task, wait: int) -> None:
    """One task some time after another, where both are in the model and not both given."""
    if before not in made.starts or after not in made.starts:
        return
    first, second = made.starts[before], made.starts[after]
    if not (isinstance(first, int) and isinstance(second, int)):
        made.model.add(second >= first + wait)


def _keep_memory(graph: BlockGraph, made: TaskModel, members: Sequence[Task], room: int) -> None:
    """Memory changes at starts, of which no two on a device are at the same time."""
    changing = [task for task in members if graph.blocks[task[1]].memory]
    changes = [graph.blocks[index].memory for _, index in changing]
    least = -sum(abs(change) for change in changes)
    if changing:
        made.model.add_reservoir_constraint([made.starts[task] for task in changing], changes, least, room)
