"""View of a plan or of a schedule of blocks, for `autopipe show`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from autopipe.cli.block_screen import block_screen, block_title
from autopipe.cli.drawing.block_picture import block_picture
from autopipe.cli.drawing.picture import Picture, plan_picture
from autopipe.cli.drawing.sparkline import draw_memory
from autopipe.cli.drawing.terminal import draw_timeline
from autopipe.cli.output import Output
from autopipe.cli.plan_folder import open_plan, open_prediction
from autopipe.cli.plan_screen import prediction_line, schedule_line, stage_table, traffic_line
from autopipe.ir.block_schedule import BlockSchedule
from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.ir.plan import Plan
from autopipe.ir.plan_file import summary_form
from autopipe.ir.schedule_file import block_schedule_form, read_block_schedule
from autopipe.ir.timeline import Timeline

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autopipe.cli.drawing.report import Report


class View(Protocol):
    """Something to draw."""

    @property
    def picture(self) -> Picture:
        """Its timeline and memory."""

    def report(self, output: Output) -> Report:
        """Its page; compared with every other schedule, which may take a while."""

    def screen(self, output: Output) -> Iterator[RenderableType]:
        """Lines for the terminal."""

    def data(self) -> dict[str, object]:
        """The same for a program."""


def open_view(path: Path) -> View:
    """The plan of a folder, or the schedule of blocks of a file. Raises ConfigurationError."""
    if path.is_file():
        _check_json(path)
        return BlockView(path, read_block_schedule(path))
    return PlanView(path, *open_prediction(path))


def _check_json(path: Path) -> None:
    """Raise ConfigurationError for a file that cannot be a schedule, such as a model."""
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip()[:1]
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    if start != b"{":
        hint = "autopipe plan makes the one, autopipe schedule -o FILE the other"
        raise ConfigurationError(f"{path} is neither the folder of a plan nor a schedule of blocks", hint)


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan and the step that its predictions make."""

    folder: Path
    plan: Plan
    timeline: Timeline

    @property
    def picture(self) -> Picture:
        """Its timeline and memory."""
        return plan_picture(self.plan, self.timeline)

    def report(self, output: Output) -> Report:
        """Its page. Other schedules need the model; where it is gone or changed, a warning says so."""
        from autopipe.cli.drawing.plan_report import plan_report
        from autopipe.cli.rivals import compare_plan_schedules

        try:
            planned = open_plan(self.folder)
        except AutopipeError as error:
            output.warn(f"no other schedules on the page: {error.message}", error.hint)
            return plan_report(self.plan, self.timeline, ())
        return plan_report(self.plan, self.timeline, compare_plan_schedules(self.plan, self.timeline, planned, output))

    def screen(self, output: Output) -> Iterator[RenderableType]:
        """The decisions, the timeline, the memory, the stages."""
        plan, summary, picture = self.plan, self.plan.summary, self.picture
        yield (
            f"{plan.model}: {summary.strategy} with {summary.schedule}, {plan.mode}, {summary.devices} devices, "
            f"{summary.micro_batches} micro-batches of {summary.micro_batch_size}"
        )
        yield prediction_line(summary)
        yield traffic_line(summary)
        yield schedule_line(plan)
        yield ""
        yield from draw_timeline(picture, output.width, output.coloured)
        yield ""
        yield from draw_memory(picture, output.width, output.coloured)
        yield ""
        yield stage_table(plan)

    def data(self) -> dict[str, object]:
        """Decisions, predictions, and each device's tasks."""
        plan = self.plan
        stages = zip(plan.placement.stages, plan.prediction.stages, strict=True)
        return {
            "plan": self.folder,
            "model": plan.model,
            "mode": plan.mode,
            "summary": summary_form(plan.summary),
            "static_memory_bytes": self.timeline.static_memory,
            "stages": [
                {
                    "devices": each.devices,
                    "nodes": len(each.nodes),
                    "micro_batch_size": each.micro_batch_size,
                    "recompute": each.recompute,
                    "predicted": predicted,
                }
                for each, predicted in stages
            ],
            "tasks": [[str(task) for task in order] for order in plan.schedule.tasks],
        }


@dataclass(frozen=True, slots=True)
class BlockView:
    """A schedule of blocks and the file that it is from."""

    file: Path
    schedule: BlockSchedule

    @property
    def picture(self) -> Picture:
        """Its timeline and memory."""
        return block_picture(self.schedule, self._title)

    @property
    def _title(self) -> str:
        return block_title(self.schedule, self.file.name)

    def report(self, output: Output) -> Report:
        """Its page."""
        from autopipe.cli.drawing.block_report import block_report
        from autopipe.cli.rivals import compare_block_schedules

        return block_report(self.schedule, self._title, str(self.file), compare_block_schedules(self.schedule, output))

    def screen(self, output: Output) -> Iterator[RenderableType]:
        """How good it is, the timeline, the memory."""
        return block_screen(self.schedule, self._title, output.width, output.coloured)

    def data(self) -> dict[str, object]:
        """The schedule as its file has it."""
        return {"file": self.file, **block_schedule_form(self.schedule)}
