"""`launch --profile`: which steps, and the one file of measured and predicted timelines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autopipe.backends.torch.launcher import read_times
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.cli.output import Output, write_texts
from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.ir.plan_file import plan_digest

if TYPE_CHECKING:
    from autopipe.cli.drawing.picture import Picture


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
        from autopipe.cli.drawing.bubbles import bubble_screen, measured_steps
        from autopipe.cli.drawing.trace import chrome_trace

        by_rank = read_times(times)
        measured = measured_steps(by_rank)
        if not measured.tasks:
            return
        picture = _predicted(manifest, output)
        # Nodes may share the folder, and each knows its own ranks.
        own = "" if len(by_rank) == manifest.world_size else f"_{min(by_rank):03d}-{max(by_rank):03d}"
        path = self.folder / f"timeline{own}.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        write_texts({path: chrome_trace(picture, measured.tasks, measured.bubbles)})
        if not output.as_json:
            for part in bubble_screen(measured, picture):
                output.line(part)
        output.note(f"{path.name}, and torch's profile of each rank, in {self.folder}: see ui.perfetto.dev")


def _predicted(manifest: Manifest, output: Output) -> Picture | None:
    """The picture of the plan that the program was made from; None where that is not in the folder above it."""
    from autopipe.cli.drawing.picture import plan_picture
    from autopipe.cli.plan_folder import open_prediction

    try:
        plan, timeline = open_prediction(manifest.folder.parent)
    except AutopipeError:
        plan = None
    if plan is None or plan_digest(plan) != manifest.plan:
        output.note(f"no predicted timeline: the plan of the program is not in {manifest.folder.parent}")
        return None
    return plan_picture(plan, timeline)
