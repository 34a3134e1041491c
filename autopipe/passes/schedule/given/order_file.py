"""Reading an order from the CSV of `torch.distributed.pipelining`: a row a rank, computation alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.schedule import Phase, Task

_TASK = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_ACTION = re.compile(r"\d+([A-Z_]{2,})\d*")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Cell:
    """A task and where the file has it."""

    task: Task
    place: str
    """File, line and column, such as `order.csv:2:5`."""


def read_orders(path: Path) -> list[list[Cell]]:
    """A row's tasks in order, a row a rank; empty cells, where a rank waits, are left out.

    A cell is a task, such as `2F0`: the stage, F (forward), B (backward), I or W (its halves: input and weight
    gradient), the micro-batch. Two tasks that torch overlaps, such as `(0F4;3B1)OVERLAP_F_B`, follow one another.
    Raises ConfigurationError with file, line and column for a cell that is anything else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError("the file is no text", where=str(path)) from error
    return [list(_row(line, f"{path}:{number}")) for number, line in enumerate(text.splitlines(), 1)]


def _row(line: str, where: str) -> Iterator[Cell]:
    column = 1
    for cell in line.split(","):
        place = f"{where}:{column + len(cell) - len(cell.lstrip())}"
        yield from (Cell(task, place) for task in _tasks(cell.strip().strip('"').strip(), place))
        column += len(cell) + 1


def _tasks(text: str, place: str) -> Iterator[Task]:
    overlapped = _OVERLAPPED.fullmatch(text)
    for part in overlapped[1].split(";") if overlapped else [text] if text else []:
        found = _TASK.fullmatch(part.strip())
        if found is None:
            raise _refusal(part.strip(), place)
        yield Task(int(found[1]), Phase(found[2]), int(found[3]))


def _refusal(text: str, place: str) -> ConfigurationError:
    shown = text if len(text) <= 40 else text[:40] + "..."
    if _ACTION.fullmatch(text):
        hint = "autopipe finds out itself what is sent when; let torch write the file as compute_only"
        return ConfigurationError(f"{shown!r} is no computation", hint, place)
    hint = "tasks are written like 2F0: stage, F, B, I or W, micro-batch"
    return ConfigurationError(f"{shown!r} is not a task", hint, place)
