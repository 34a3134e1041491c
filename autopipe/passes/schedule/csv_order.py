"""The order that a file in the CSV of `torch.distributed.pipelining` asks for: a row a rank,
computation alone.
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
from autopipe.ir.schedule import Phase, Schedule, StageGraph, Task, WrongScheduleError
from autopipe.ir.words import plural
from autopipe.passes.schedule.orders import find_repetends, require_equal_micro_batches

_TASK = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_ACTION = re.compile(r"\d+([A-Z_]{2,})\d*")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Cell:
    task: Task
    place: str
    """File, line and column, such as `order.csv:2:5`."""


def read_orders(path: Path) -> list[list[Cell]]:
    """A row's tasks in order, a row a rank; empty cells, where a rank waits, are left out. A cell
    is a task, such as `2F0`: the stage, F (forward), B (backward), I or W (its halves: input and
    weight gradient), the micro-batch. Two tasks that torch overlaps, such as
    `(0F4;3B1)OVERLAP_F_B`, follow one another. Raises ConfigurationError with file, line and column
    for a cell that is anything else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError("the file is no text", where=str(path)) from error
    return [
        list(_row(line, f"{path}:{number}")) for number, line in enumerate(text.splitlines(), 1)
    ]


def _row(line: str, where: str) -> Iterator[Cell]:
    column = 1
    for cell in line.split(","):
        place = f"{where}:{column + len(cell) - len(cell.lstrip())}"
        text = cell.strip().strip('"').strip()
        overlapped = _OVERLAPPED.fullmatch(text)
        for part in map(
            str.strip, overlapped[1].split(";") if overlapped else [text] if text else []
        ):
            if found := _TASK.fullmatch(part):
                yield Cell(Task(int(found[1]), Phase(found[2]), int(found[3])), place)
                continue
            quoted = repr(part if len(part) <= 40 else part[:40] + "...")
            if _ACTION.fullmatch(part):
                hint = (
                    "autopipe finds out itself what is sent when; let torch write the file as "
                    "compute_only"
                )
                raise ConfigurationError(f"{quoted} is no computation", hint, place)
            hint = "tasks are written like 2F0: stage, F, B, I or W, micro-batch"
            raise ConfigurationError(f"{quoted} is not a task", hint, place)
        column += len(cell) + 1


@dataclass(frozen=True, slots=True)
class CsvOrder:
    """Follows a file in the CSV of `torch.distributed.pipelining`: a row a rank, computation alone
    (`0F0,0F1,0B0`).

    `autopipe show --csv` writes such a file, and so does torch. The file's stages must stand on the
    devices that the placement gives them.
    """

    name: ClassVar[str] = "csv"

    file: str = ""
    """The file, relative to the working folder."""

    def requires(self, problem: Problem, placement: Placement) -> None:
        if not self.file:
            raise ConfigurationError(
                "schedule csv follows a file, and none is given", "--set schedule.file=order.csv"
            )
        require_equal_micro_batches(self.name, problem, placement)

    def run(self, problem: Problem, placement: Placement) -> Schedule:
        graph = StageGraph.of(problem, placement)
        return fitted_order(
            read_orders(Path(self.file)), self.file, graph, problem.micro_batches, problem.train
        )


def fitted_order(
    rows: list[list[Cell]], file: str, graph: StageGraph, micro_batches: int, train: bool
) -> Schedule:
    """The schedule of a file's rows. Raises ConfigurationError with the place of the first cell
    that does not fit.
    """
    for rank, row in enumerate(rows[graph.devices :], graph.devices):
        if row:
            hint = f"a row each for {graph.devices} {plural(graph.devices, 'device')}"
            raise ConfigurationError(f"there is no device {rank}", hint, row[0].place)
    rows = [*rows[: graph.devices], *([] for _ in range(graph.devices - len(rows)))]
    last = max(
        (cell for row in rows for cell in row), key=lambda cell: cell.task.micro_batch, default=None
    )
    if last is None:
        raise ConfigurationError("the file has no tasks", where=file)
    if last.task.micro_batch + 1 != micro_batches:
        count = last.task.micro_batch + 1
        reason = (
            f"the order is for {count} {plural(count, 'micro-batch')}, the step has {micro_batches}"
        )
        raise ConfigurationError(reason, f"plan with --micro-batches {count}", last.place)
    tasks = tuple(tuple(cell.task for cell in row) for row in rows)
    schedule = Schedule(micro_batches, tasks, find_repetends(tasks))
    try:
        schedule.verify(graph, train)
    except WrongScheduleError as error:
        row = rows[error.device]
        place = row[error.position].place if row else f"{file}:{error.device + 1}"
        raise ConfigurationError(
            error.reason, "write the file for this placement", place
        ) from error
    return schedule
