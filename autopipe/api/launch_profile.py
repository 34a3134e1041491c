"""The profile of steps of a launch: which steps are profiled, and their timeline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autopipe.api.events import Events
from autopipe.api.launch_settings import SettingError
from autopipe.backends.torch.launcher import read_times
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.ir.output_kinds import TRACE, OutputFile, write_texts
from autopipe.ir.plan import plan_digest

if TYPE_CHECKING:
    from autopipe.api.measured_steps import MeasuredSteps
    from autopipe.api.timeline_figure import Picture


@dataclass(frozen=True, slots=True)
class StepProfile:
    """The timeline of profiled steps."""

    path: Path
    """The trace `timeline.json` that was written."""
    measured: MeasuredSteps
    predicted: Picture | None
    """The predicted step of the plan, None if the plan was not found."""


@dataclass(frozen=True, slots=True)
class ProfiledSteps:
    """The steps `first` to `last` (inclusive) that are profiled, and the folder for one trace per
    rank and for `timeline.json`.
    """

    first: int
    last: int
    folder: Path

    @staticmethod
    def of(text: str, folder: Path) -> ProfiledSteps:
        """Parse `3` or `3-5`. Raises SettingError for any other text."""
        first, dash, last = text.partition("-")
        try:
            found = ProfiledSteps(int(first), int(last if dash else first), folder)
        except ValueError:
            found = ProfiledSteps(0, -1, folder)
        if not 0 <= found.first <= found.last:
            raise SettingError(f"{text!r} is neither a step nor steps such as 3-5", "profile")
        return found

    def check(self, steps: int) -> None:
        """Raise ConfigurationError if a run of `steps` steps ends before the first profiled
        step.
        """
        if self.first >= steps:
            hint = f"choose a step from 0 to {steps - 1}, or set more steps with --steps"
            raise ConfigurationError(
                f"the first profiled step is {self.first}, but the last step of the run is "
                f"{steps - 1}",
                hint,
                where="--profile",
            )

    def arguments(self, times: Path) -> dict[str, object]:
        """Return the flags for the ranks. The ranks write the times of their tasks to the folder
        `times`.
        """
        return {
            "profile": self.folder.absolute(),
            "profile_times": times,
            "profile_from": self.first,
            "profile_to": self.last,
        }

    def finish(self, times: Path, manifest: Manifest, events: Events) -> StepProfile | None:
        """Write `timeline.json` from the task times in the folder `times`, and return the measured
        and the predicted step. Return None if there are no task times.
        """
        from autopipe.api.measured_steps import measured_steps
        from autopipe.api.timeline_files import chrome_trace

        by_rank = read_times(times)
        measured = measured_steps(by_rank)
        if not measured.tasks:
            return None
        picture = _predicted(manifest, events)
        # Several nodes may share the folder, but each node has only the times of its ranks. So the
        # file name contains the node's first and last rank.
        own = (
            "" if len(by_rank) == manifest.world_size else f"_{min(by_rank):03d}-{max(by_rank):03d}"
        )
        path = self.folder / f"timeline{own}.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        write_texts(
            {OutputFile(path, TRACE): chrome_trace(picture, measured.tasks, measured.bubbles)}
        )
        return StepProfile(path, measured, picture)


def _predicted(manifest: Manifest, events: Events) -> Picture | None:
    """Return the predicted timeline of the plan that the program was generated from, or None if the
    folder above the program does not contain that plan.
    """
    from autopipe.api.plan_folder import open_prediction
    from autopipe.api.timeline_figure import plan_picture

    try:
        plan, timeline = open_prediction(manifest.folder.parent)
    except AutopipeError:
        plan = None
    if plan is None or plan_digest(plan) != manifest.plan:
        events.note(
            f"no predicted timeline: the plan of the program is not in {manifest.folder.parent}"
        )
        return None
    return plan_picture(plan, timeline)
