"""`autopipe show --tasks`: the task graphs of a plan's ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType

from autopipe.cli.figures import bytes_text
from autopipe.cli.plan_folder import open_plan
from autopipe.cli.task_form import task_graph_form
from autopipe.cli.task_screen import rank_table, selected_ranks, task_screen
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.program import Program
from autopipe.passes.lower.lower import lower
from autopipe.passes.lower.task_graph import TaskSource


@dataclass(frozen=True, slots=True)
class TaskView:
    """The task graphs of one rank, or of all."""

    folder: Path
    source: TaskSource
    rank: int | None

    @staticmethod
    def open(folder: Path, rank: int | None) -> TaskView:
        """Tasks of the plan in `folder`, lowered again from its model.

        Raises ConfigurationError for a folder without a plan, or a rank that it does not have; ModelError for its
        model.
        """
        planned = open_plan(folder)
        plan, problem = planned.plan, planned.problem
        devices = plan.schedule.devices
        if rank is not None and rank >= devices:
            raise ConfigurationError(f"there is no rank {rank}", hint=f"the plan has ranks 0 to {devices - 1}")
        loss = problem.loss if problem.train else None
        program = lower(problem.graph, plan.placement, plan.schedule, loss, problem.optimizer.shard)
        return TaskView(folder, TaskSource.of(program, problem.graph, plan.placement, plan.prediction.stages), rank)

    def screen(self) -> Iterator[RenderableType]:
        """A table of the ranks and the tasks of rank 0, or those of the rank that was asked for."""
        program = self.source.program
        if self.rank is None and program.world_size > 1:
            yield rank_table(
                [self.source.graph(rank) for rank in selected_ranks(program.world_size)], program.world_size
            )
            yield ""
        rank = self.rank or 0
        yield from task_screen(self.source.graph(rank), _buffers(program, rank))

    def data(self) -> dict[str, object]:
        """The graphs, whole."""
        ranks = range(self.source.program.world_size) if self.rank is None else (self.rank,)
        return {"plan": self.folder, "ranks": [task_graph_form(self.source.graph(rank)) for rank in ranks]}


def _buffers(program: Program, rank: int) -> str:
    """Receive buffers of a rank, in words."""
    sizes = {
        piece.channel: piece.sent.elements * value.dtype.itemsize
        for code in program.ranks
        for wired in code.stages
        for piece in wired.sends
        for value in program.stages[wired.stage].outputs
        if value.name == piece.tensor
    }
    rings = [(each.buffers, sizes[each.number]) for each in program.channels if each.target_rank == rank]
    rings += [(each.gradient_buffers, sizes[each.number]) for each in program.channels if each.source_rank == rank]
    rings = [(count, size) for count, size in rings if count]
    if not rings:
        return ""
    total = sum(count * size for count, size in rings)
    buffers = sum(count for count, _ in rings)
    return f"; {buffers} buffers of {bytes_text(total)} in all for messages that come"
