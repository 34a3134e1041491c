"""`launch --profile`: which steps, the one file of measured and predicted timelines, and the table of the worst
bubbles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import RenderableType
from rich.table import Table

from autopipe.backends.torch.launcher import read_times
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.cli.drawing.bubbles import MeasuredSteps, measured_steps, predicted_bubbles, worst_bubbles
from autopipe.cli.drawing.picture import Picture, plan_picture
from autopipe.cli.drawing.trace import END, Bubble, chrome_trace
from autopipe.cli.output import Output, plain_table, seconds_text, write_texts
from autopipe.cli.plan_folder import open_prediction
from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.ir.plan_file import plan_digest

_WORST = 6


@dataclass(frozen=True, slots=True)
class ProfiledSteps:
    """The steps `first` to `last`, and the folder for a trace a rank and for `timeline.json`."""

    first: int
    last: int
    folder: Path

    @staticmethod
    def of(text: str, folder: Path) -> ProfiledSteps:
        """Of `3` or `3-5`. Raises click's BadParameter for anything else."""
        first, dash, last = text.partition("-")
        try:
            found = ProfiledSteps(int(first), int(last if dash else first), folder)
        except ValueError:
            found = ProfiledSteps(0, -1, folder)
        if not 0 <= found.first <= found.last:
            raise click.BadParameter(f"{text!r} is neither a step nor steps such as 3-5", param_hint="--profile")
        return found

    def check(self, steps: int) -> None:
        """Raise ConfigurationError where a run up to `steps` steps has none of these."""
        if self.first >= steps:
            hint = f"the steps are 0 to {steps - 1}; --steps sets their number"
            raise ConfigurationError(f"there is no step {self.first} to profile", hint, where="--profile")

    def arguments(self, times: Path) -> dict[str, object]:
        """Flags of the ranks, which leave the times of their tasks in the folder `times`."""
        return {
            "profile": self.folder.absolute(),
            "profile_times": times,
            "profile_from": self.first,
            "profile_to": self.last,
        }

    def finish(self, times: Path, manifest: Manifest, output: Output) -> None:
        """Write `timeline.json` from what the ranks left in `times`, and show where their time went."""
        measured = measured_steps(read_times(times))
        if not measured.tasks:
            return
        picture = _predicted(manifest, output)
        path = self.folder / "timeline.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        write_texts({path: chrome_trace(picture, measured.tasks, measured.bubbles)})
        if not output.as_json:
            for part in _screen(measured, picture):
                output.line(part)
        output.note(f"timeline in {path}, torch's profile of each rank beside it: open them in ui.perfetto.dev")


def _predicted(manifest: Manifest, output: Output) -> Picture | None:
    """The picture of the plan that the program was made from; None where that is not in the folder above it."""
    try:
        plan, timeline = open_prediction(manifest.folder.parent)
    except AutopipeError:
        plan = None
    if plan is None or plan_digest(plan) != manifest.plan:
        output.note(f"no predicted timeline: the plan of the program is not in {manifest.folder.parent}")
        return None
    return plan_picture(plan, timeline)


def _screen(measured: MeasuredSteps, picture: Picture | None) -> Iterator[RenderableType]:
    steps, predicted = measured.steps, {} if picture is None else predicted_bubbles(picture)
    which = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    yield f"bubbles of {which}: a step's, by rank, and the largest"
    yield _by_rank(measured.bubbles, len(steps), predicted)
    table = plain_table("rank", "step", "before", "measured", "predicted", "waited for", right=3, no_wrap=True)
    table.columns[-1].justify = "left"
    for bubble in worst_bubbles(measured.bubbles, _WORST):
        before = "the end" if bubble.before == END else bubble.before
        expected = _predicted_text(predicted.get((bubble.rank, bubble.before)))
        row = str(bubble.rank), str(bubble.step), before, seconds_text(bubble.duration / 1e6), expected
        table.add_row(*row, _blamed(bubble))
    yield table


def _by_rank(bubbles: Sequence[Bubble], steps: int, predicted: Mapping[tuple[int, str], float]) -> Table:
    """The mean step's bubbles of each rank, and what they went to."""
    table = plain_table("rank", "bubbles", "predicted", "late messages", "update", "the rest", right=1, no_wrap=True)
    for rank in sorted({bubble.rank for bubble in bubbles}):
        own = [bubble for bubble in bubbles if bubble.rank == rank]
        idle, late = sum(each.duration for each in own), sum(each.late for each in own)
        update = sum(each.duration for each in own if each.before == END)
        parts = (seconds_text(each / 1e6 / steps) for each in (late, update, idle - late - update))
        expected = sum(length for (device, _), length in predicted.items() if device == rank) if predicted else None
        table.add_row(str(rank), seconds_text(idle / 1e6 / steps), _predicted_text(expected), *parts)
    return table


def _predicted_text(seconds: float | None) -> str:
    return "" if seconds is None else seconds_text(seconds) if seconds > 1e-9 else "0 s"


def _blamed(bubble: Bubble) -> str:
    if bubble.before == END:
        return "gradients, the update, other ranks"
    if (worst := bubble.worst) is None:
        return ""
    return f"rank {worst.peer}, channel {worst.channel}: {seconds_text(worst.duration / 1e6)}"
