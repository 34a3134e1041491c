"""The order that a file in PyTorch's CSV asks for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Schedule, StageGraph, WrongScheduleError
from autopipe.passes.schedule.equal_micro_batches import require_equal_micro_batches
from autopipe.passes.schedule.given.order_file import Cell, read_orders
from autopipe.passes.schedule.repetend import find_repetends


@dataclass(frozen=True, slots=True)
class CsvOrder:
    """Follows a file in the CSV of `torch.distributed.pipelining`: a row a rank, computation alone (`0F0,0F1,0B0`).

    `autopipe show --csv` writes such a file, and so does torch. The file's stages must stand on the devices that the
    placement gives them.
    """

    name: ClassVar[str] = "csv"

    file: str = ""
    """The file, relative to the working folder."""

    def requires(self, problem: Problem, placement: Placement) -> None:
        """Raise ConfigurationError where no file is given, InfeasibleError where micro-batches differ."""
        if not self.file:
            raise ConfigurationError("schedule csv follows a file, and none is given", "--set schedule.file=order.csv")
        require_equal_micro_batches(self.name, problem, placement)

    def run(self, problem: Problem, placement: Placement) -> Schedule:
        """The schedule. Raises ConfigurationError with line and column where the file does not fit the placement."""
        graph = StageGraph.of(problem, placement)
        return fitted_order(read_orders(Path(self.file)), self.file, graph, problem.micro_batches, problem.train)


def fitted_order(rows: list[list[Cell]], file: str, graph: StageGraph, micro_batches: int, train: bool) -> Schedule:
    """The schedule of a file's rows. Raises ConfigurationError with the place of the first cell that does not fit."""
    for rank, row in enumerate(rows[graph.devices :], graph.devices):
        if row:
            hint = f"a row each for {graph.devices} devices"
            raise ConfigurationError(f"there is no device {rank}", hint, row[0].place)
    rows = [*rows[: graph.devices], *([] for _ in range(graph.devices - len(rows)))]
    _check_micro_batches(rows, file, micro_batches)
    tasks = tuple(tuple(cell.task for cell in row) for row in rows)
    schedule = Schedule(micro_batches, tasks, find_repetends(tasks))
    try:
        schedule.verify(graph, train)
    except WrongScheduleError as error:
        row = rows[error.device]
        place = row[error.position].place if row else f"{file}:{error.device + 1}"
        raise ConfigurationError(error.reason, "write the file for this placement", place) from error
    return schedule


def _check_micro_batches(rows: list[list[Cell]], file: str, micro_batches: int) -> None:
    last = max((cell for row in rows for cell in row), key=lambda cell: cell.task.micro_batch, default=None)
    if last is None:
        raise ConfigurationError("the file has no tasks", where=file)
    count = last.task.micro_batch + 1
    if count != micro_batches:
        hint = f"plan with --micro-batches {count}"
        raise ConfigurationError(
            f"the order is for {count} micro-batches, the step has {micro_batches}", hint, last.place
        )
