"""Command `launch`: run the ranks of a program."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from autopipe.api.events import Events, SilentEvents
from autopipe.api.launch_checks import (
    check_dry_run_settings,
    check_launch,
    check_mode,
    output_files,
)
from autopipe.api.launch_config import launch_config, placement_note, run_name, visible_gpus
from autopipe.api.launch_data import (
    UNKNOWN_STEPS,
    check_training_data,
    check_validation_data,
    start_position,
)
from autopipe.api.launch_profile import ProfiledSteps, StepProfile
from autopipe.api.launch_settings import LaunchSettings, SettingError
from autopipe.api.program_folder import open_program, rank_arguments
from autopipe.api.summary_text import update_text
from autopipe.backends.torch.fork_server import ForkServer, fork_server
from autopipe.backends.torch.launcher import (
    LaunchConfig,
    ReportFollower,
    launch_program,
    local_ranks,
    read_evaluations,
    read_reports,
    read_times,
)
from autopipe.backends.torch.metrics import LogSettings, MetricsLog
from autopipe.backends.torch.runtime.manifest import Manifest, remove_partial_outputs
from autopipe.ir.output_files import follow_links, scratch_folder
from autopipe.ir.output_kinds import write_texts
from autopipe.ir.words import count_text

Record = Mapping[str, Any]
"""A record of the report file that rank 0 writes: a note, a step or a validation."""


@dataclass(frozen=True, slots=True)
class Run:
    """The properties of a launch that a display of its steps needs."""

    manifest: Manifest
    steps: int | None
    """Number of the step at which the launch ends, None if it is unknown."""
    ranks: int
    """Number of ranks on this node."""
    gpus: int
    """Number of GPUs of this node that its ranks use."""
    done: int = 0
    """Number of steps that the checkpoint contains from which the launch resumes."""


@dataclass(frozen=True, slots=True)
class Launched:
    """The results of a launch."""

    steps: list[dict[str, Any]]
    """One report per step."""
    evaluations: list[dict[str, Any]]
    """One report per validation."""
    run: Run | None
    """None if no rank was started, because the checkpoint already contains all steps."""
    profile: StepProfile | None
    """The timeline of the profiled steps, None if no step was profiled."""


class StepObserver(Protocol):
    """Receives the records of a launch while its ranks run."""

    def note(self, text: str) -> None:
        """Receive a text about a restart of the ranks."""

    def take(self, record: Record) -> None:
        """Receive a record of the report file."""


class _NoObserver:
    def note(self, text: str) -> None:
        pass

    def take(self, record: Record) -> None:
        pass


@contextmanager
def unobserved(run: Run) -> Iterator[StepObserver]:
    """Yield an observer that ignores the steps of `run`."""
    yield _NoObserver()


def open_launch(
    program: Path,
    settings: LaunchSettings,
    *,
    live: bool = False,
    debug: bool = False,
    events: Events | None = None,
) -> Launch:
    """Return the launch of the program in the folder `program`, whose ranks have not started.

    With `live`, rank 0 writes to the stdout of this process. With `debug`, torch's log lines are
    shown. Raises SettingError for settings that contradict each other, and ConfigurationError if
    there is no program, or if its mode or its ONNX file is not the expected one.
    """
    # This variable hides warnings of torch's C++ rendezvous code that do not help a user. It must
    # be set before the import of torch, which reads it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    events = events or SilentEvents()
    log = settings.log
    if settings.profile is not None and log is None:
        raise SettingError("--profile requires --log DIR, the folder of its files")
    logged = None if log is None else LogSettings(log, settings.log_every, settings.wandb)
    profiled = None
    if settings.profile is not None and log is not None:
        profiled = ProfiledSteps.of(settings.profile, log / "profile")
    manifest = open_program(program, settings.model, settings.device != "meta")
    check_mode(manifest, settings.mode)
    config = launch_config(settings, live, debug, events)
    check_dry_run_settings(settings)
    return Launch(manifest, settings, config, logged, profiled, events)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a program."""

    manifest: Manifest
    settings: LaunchSettings
    config: LaunchConfig
    log: LogSettings | None
    """The log to write, None for none."""
    profiled: ProfiledSteps | None
    """The steps to profile, None for none."""
    events: Events

    def start(
        self, observe: Callable[[Run], AbstractContextManager[StepObserver]] = unobserved
    ) -> Launched:
        """Run the ranks until they end, write the log and the files of the launch, and return the
        reports.

        `observe` is called before the ranks start and yields the observer of the steps. Raises the
        errors of `launch_program`, SettingError for settings that contradict each other, and
        ConfigurationError for data or files that do not fit the program.
        """
        check_launch(self.manifest, self.settings)
        if self.log is not None:
            self.log.check(self.settings.resume)
        with fork_server() as server:
            return self._start_ranks(observe, server)

    def _start_ranks(
        self,
        observe: Callable[[Run], AbstractContextManager[StepObserver]],
        server: ForkServer,
    ) -> Launched:
        """Continue `start`: check the data while the fork server `server` imports torch, then run
        the ranks.
        """
        notes = list[str]()
        steps, epochs = check_training_data(self.manifest, self.settings, notes.append)
        done = start_position(self.settings).steps
        if 0 < steps <= done:
            self.events.note(
                f"nothing to do: the newest checkpoint in {self.settings.checkpoint} is after "
                f"{count_text(done, 'step')}, and training ends after {steps} (set a larger number "
                "with --steps or --epochs)"
            )
            return Launched([], [], None, None)
        check_validation_data(self.manifest, self.settings, notes.append)
        if self.profiled is not None:
            self.profiled.check(steps)
        ranks = local_ranks(self.manifest, self.config)[1]
        # The notes are printed after all checks of the settings, so that no note precedes an error
        # in the settings.
        for line in (*notes, placement_note(self.settings.device, ranks)):
            self.events.note(line)
        if self.manifest.train:
            optimizer = self.manifest.optimizer
            self.events.note(
                update_text(
                    optimizer["name"],
                    optimizer["lr"],
                    self.manifest.lr_scheduler,
                    self.manifest.training,
                )
            )
        config = replace(self.config, gpus=visible_gpus(self.settings.device))
        run = Run(
            self.manifest, None if steps == UNKNOWN_STEPS else steps, ranks, config.gpus, done
        )
        profile = None
        with scratch_folder("launch") as name:
            scratch = Path(name)
            arguments = self._arguments(scratch, steps, epochs, config)
            try:
                with observe(run) as observer, self._open_log() as log:
                    follower = ReportFollower(scratch / "report.jsonl", (observer.take, log.add))
                    launch_program(
                        self.manifest, arguments, config, observer.note, follower.poll, server
                    )
            finally:
                if self.settings.outputs is not None:
                    remove_partial_outputs(follow_links(self.settings.outputs))
                self._write_trace(scratch / "spans")
            if self.profiled is not None:
                profile = self.profiled.finish(scratch / "profile", self.manifest, self.events)
            found, evaluations = (
                read(scratch / "report.jsonl") for read in (read_reports, read_evaluations)
            )
        return Launched(found, evaluations, run, profile)

    def _write_trace(self, times: Path) -> None:
        """Write a Chrome trace of the tasks of this node's ranks from their times in the folder
        `times`, if the launch has a trace.
        """
        if self.settings.trace is None:
            return
        from autopipe.api.measured_steps import measured_steps
        from autopipe.api.timeline_files import chrome_trace

        trace = chrome_trace(None, measured_steps(read_times(times)).tasks)
        write_texts({next(output_files(self.manifest, self.settings)): trace})

    def _open_log(self) -> MetricsLog:
        if self.log is None:
            return MetricsLog([], self.settings.log_every, self.events.warn)
        of_run = {
            name: getattr(self.manifest, name)
            for name in ("plan", "precision", "optimizer", "batch_size", "world_size")
        }
        return self.log.open(of_run, self.events.warn)

    def _arguments(
        self, scratch: Path, steps: int, epochs: int | None, config: LaunchConfig
    ) -> list[str]:
        timeouts = config.timeouts
        steps_between, minutes_between = self.settings.checkpoint_every or (0, 0.0)
        return rank_arguments(
            **self.settings.for_ranks(),
            no_shuffle=self.settings.shuffle is False,
            no_cuda_graphs=self.settings.cuda_graphs is False,
            model=_absolute(self.settings.model),
            steps=steps,
            epochs=epochs,
            report=scratch / "report.jsonl",
            checkpoint=self.settings.checkpoint and self.settings.checkpoint.absolute(),
            checkpoint_every=steps_between or None,
            checkpoint_minutes=minutes_between or None,
            run=None
            if self.settings.checkpoint is None or self.settings.resume
            else run_name(config),
            # With `resume`, a rank that is restarted with these arguments continues from the newest
            # checkpoint.
            resume=self.settings.checkpoint is not None,
            trace=self.settings.trace and scratch / "spans",
            **({} if self.profiled is None else self.profiled.arguments(scratch / "profile")),
            outputs=self.settings.outputs and self.settings.outputs.absolute(),
            start_timeout=timeouts.start_s,
            step_timeout=timeouts.step_s,
            checkpoint_timeout=timeouts.checkpoint_s,
        )


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()
