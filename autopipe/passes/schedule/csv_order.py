"""Schedule `csv`, which reads the order of tasks from a file in the CSV format of
`torch.distributed.pipelining`: one row per rank, with computations and without communication.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import InvalidScheduleError, Phase, Schedule, StageGraph, Task
from autopipe.ir.words import plural
from autopipe.passes.schedule.orders import find_repetends, require_equal_micro_batches

_TASK = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_ACTION = re.compile(r"\d+([A-Z_]{2,})\d*")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Cell:
    """A task that a file lists, and its position in the file."""

    task: Task
    position: str
    """File, line and column, such as `order.csv:2:5`."""


def read_orders(path: Path) -> list[list[Cell]]:
    """Return the tasks of each row of the file `path` in order, one row per rank. Empty cells, in
    which a rank waits, are skipped.

    A cell is a task such as `2F0`: the stage, then F (forward), B (backward), I (input gradient) or
    W (weight gradient), then the micro-batch. A cell with two overlapped tasks, such as
    `(0F4;3B1)OVERLAP_F_B`, yields both tasks in this order. Raises ConfigurationError, with file,
    line and column, for any other cell, and if the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"the file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError("the file is not UTF-8 text", where=str(path)) from error
    return [
        list(_cells_of_row(line, f"{path}:{number}"))
        for number, line in enumerate(text.splitlines(), 1)
    ]


def _cells_of_row(line: str, where: str) -> Iterator[Cell]:
    """Yield the tasks of one line of the file in order. `where` is the file and the number of the
    line.
    """
    column = 1
    for cell in line.split(","):
        position = f"{where}:{column + len(cell) - len(cell.lstrip())}"
        text = cell.strip().strip('"').strip()
        overlapped = _OVERLAPPED.fullmatch(text)
        for part in map(
            str.strip, overlapped[1].split(";") if overlapped else [text] if text else []
        ):
            if found := _TASK.fullmatch(part):
                yield Cell(Task(int(found[1]), Phase(found[2]), int(found[3])), position)
                continue
            quoted = repr(part if len(part) <= 40 else part[:40] + "...")
            if _ACTION.fullmatch(part):
                hint = (
                    "write the file in torch's format compute_only, because autopipe adds the "
                    "communication"
                )
                raise ConfigurationError(
                    f"{quoted} is a communication action, expected a computation", hint, position
                )
            hint = "write tasks such as 2F0: the stage, then F, B, I or W, then the micro-batch"
            raise ConfigurationError(f"{quoted} is not a task", hint, position)
        column += len(cell) + 1


@dataclass(frozen=True, slots=True)
class CsvOrder:
    """Run tasks in the order that a file lists, in the CSV format of
    `torch.distributed.pipelining`: one row per rank, with computations only (`0F0,0F1,0B0`).

    `autopipe show --csv` writes such a file, and so does torch. Each rank may run only the stages
    that the placement assigns to its device.
    """

    name: ClassVar[str] = "csv"

    file: str = ""
    """Path of the file, relative to the working directory."""

    def requires(self, problem: Problem, placement: Placement) -> None:
        """Raise ConfigurationError if no file is set, and InfeasibleError if stages have different
        micro-batch sizes.
        """
        if not self.file:
            raise ConfigurationError(
                "schedule csv requires a file, but schedule.file is empty",
                "set the file with --set schedule.file=order.csv",
            )
        require_equal_micro_batches(self.name, problem, placement)

    def run(self, problem: Problem, placement: Placement) -> Schedule:
        """Return the schedule that the file lists."""
        graph = StageGraph.of(problem, placement)
        return schedule_from_rows(
            read_orders(Path(self.file)), self.file, graph, problem.micro_batches, problem.train
        )


def schedule_from_rows(
    rows: list[list[Cell]], file: str, graph: StageGraph, micro_batches: int, train: bool
) -> Schedule:
    """Return the schedule with the orders in `rows`, which were read from `file`.

    Raises ConfigurationError, with the position of the cell, if the rows contradict the placement,
    the number of micro-batches, or the dependencies between tasks.
    """
    for rank, row in enumerate(rows[graph.devices :], graph.devices):
        if row:
            devices = f"{graph.devices} {plural(graph.devices, 'device')}"
            raise ConfigurationError(
                f"row {rank + 1} has tasks, but the cluster has {devices}, one per row",
                "write one row per device",
                row[0].position,
            )
    rows = [*rows[: graph.devices], *([] for _ in range(graph.devices - len(rows)))]
    last = max(
        (cell for row in rows for cell in row), key=lambda cell: cell.task.micro_batch, default=None
    )
    if last is None:
        raise ConfigurationError(
            "the file lists no tasks, expected one row of tasks per device", where=file
        )
    if last.task.micro_batch + 1 != micro_batches:
        count = last.task.micro_batch + 1
        reason = (
            f"the file has {count} {plural(count, 'micro-batch')}, but the step has {micro_batches}"
        )
        raise ConfigurationError(reason, f"plan with --micro-batches {count}", last.position)
    tasks = tuple(tuple(cell.task for cell in row) for row in rows)
    schedule = Schedule(micro_batches, tasks, find_repetends(tasks))
    try:
        schedule.verify(graph, train)
    except InvalidScheduleError as error:
        row = rows[error.device]
        position = row[error.position].position if row else f"{file}:{error.device + 1}"
        raise ConfigurationError(
            error.reason, "write the file for this placement", position
        ) from error
    return schedule
