"""Command `launch`: run the ranks of a program, or one step of one rank without the others."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from autopipe.api.events import Events, SilentEvents
from autopipe.api.launch_profile import ProfiledSteps, StepProfile
from autopipe.api.launch_settings import LaunchSettings, SettingError
from autopipe.api.program_folder import open_program, rank_arguments
from autopipe.api.summary_text import update_text
from autopipe.backends.torch import fake_cuda
from autopipe.backends.torch.checkpoint import (
    check_can_save,
    check_has_no_checkpoints,
    check_not_in_use,
    checkpoint_path,
    committed_steps,
    read_checkpoint,
)
from autopipe.backends.torch.codegen.rank import rank_module
from autopipe.backends.torch.fork_server import ForkServer, fork_server
from autopipe.backends.torch.launcher import (
    LaunchConfig,
    ReportFollower,
    launch_program,
    local_ranks,
    read_evaluations,
    read_reports,
    read_times,
    run_alone,
)
from autopipe.backends.torch.metrics import LogSettings, MetricsLog
from autopipe.backends.torch.runtime.data.sample_order import START_OF_RUN, RunProgress
from autopipe.backends.torch.runtime.data.sources import check_data
from autopipe.backends.torch.runtime.job import ManagedJob, detect_job
from autopipe.backends.torch.runtime.manifest import Manifest, remove_partial
from autopipe.backends.torch.runtime.watch.heartbeat import Timeouts
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.output_files import follow_links, scratch_folder
from autopipe.ir.output_kinds import NPY, NPZ, TRACE, OutputFile, write_texts
from autopipe.ir.training import DataSettings
from autopipe.ir.words import count_text, plural

Record = Mapping[str, Any]
"""A record of the report file that rank 0 writes: a note, a step or a validation."""
_KEY_BYTES = 32
_NO_END = 2**40
"""Steps of a run that ends where its data does."""
_RESTARTS = 3
"""Default number of restarts of a launch that saves checkpoints."""


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
    # Rendezvous on a free port logs warnings from C++ that say nothing to a user; torch reads this
    # when it is imported.
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
    _check_mode(manifest, settings.mode)
    config = _launch_config(settings, live, debug, events)
    if settings.dry_run and (settings.blocking or settings.compile):
        raise SettingError(
            f"--dry-run measures no times: omit --{'blocking' if settings.blocking else 'compile'}"
        )
    if settings.device == "meta" and not settings.dry_run:
        raise SettingError("--device meta computes no values and requires --dry-run")
    if settings.rank is not None and not settings.dry_run:
        raise SettingError("--rank requires --dry-run")
    return Launch(manifest, settings, config, logged, profiled, events)


def _launch_config(
    settings: LaunchSettings, live: bool, debug: bool, events: Events
) -> LaunchConfig:
    """Return the configuration of the launcher. Settings that are open follow from the job of a job
    manager, if this process belongs to one.
    """
    job = detect_job(os.environ) if settings.nnodes is None else None
    if job is None:
        job = ManagedJob("", settings.nnodes or "1", None, "")
    elif job.nodes != "1":
        events.note(
            f"{job.manager} runs {job.nodes} nodes, which meet at "
            f"{settings.rdzv_endpoint or job.endpoint}"
        )
    restarts = settings.max_restarts
    if restarts is None:
        restarts = 0 if settings.checkpoint is None else _RESTARTS
    return LaunchConfig(
        nodes=_nodes(job.nodes),
        ranks_per_node=settings.nproc_per_node or job.ranks_per_node,
        rendezvous_endpoint=settings.rdzv_endpoint or job.endpoint,
        node=job.node if settings.node_rank is None else settings.node_rank,
        local_address=settings.local_addr,
        hosts=job.hosts,
        rendezvous_id=settings.rdzv_id or job.name,
        rendezvous_key=b"" if settings.rdzv_key is None else _key(Path(settings.rdzv_key)),
        max_restarts=restarts,
        timeouts=Timeouts(
            settings.start_timeout, settings.step_timeout, settings.checkpoint_timeout
        ),
        live=live,
        saves=settings.checkpoint is not None,
        debug=debug,
    )


def _check_mode(manifest: Manifest, mode: str | None) -> None:
    """Raise ConfigurationError if the program does not have the mode, unless `mode` is None."""
    if mode not in (None, "train" if manifest.train else "infer"):
        other = "train" if mode == "infer" else "infer"
        hint = f"plan with autopipe plan MODEL --mode {mode}, then run autopipe codegen"
        raise ConfigurationError(
            f"the program is for mode {other}, but --mode is {mode}", hint, f"--mode {mode}"
        )


def _key(path: Path) -> bytes:
    """Return the key in the file `path`. Raises ConfigurationError if other users may read it."""
    try:
        others = path.stat().st_mode & 0o077
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(
            f"the rendezvous key cannot be read: {error.strerror}", where=str(path)
        ) from error
    if others:
        raise ConfigurationError(
            "other users can read the rendezvous key", hint=f"run chmod 600 {path}", where=str(path)
        )
    if len(key) < _KEY_BYTES:
        hint = f"create a key with openssl rand -hex {_KEY_BYTES}"
        raise ConfigurationError(
            f"the rendezvous key has {len(key)} {plural(len(key), 'byte')}, expected "
            f"{_KEY_BYTES} or more",
            hint=hint,
            where=str(path),
        )
    return key


def _nodes(text: str) -> tuple[int, int]:
    """Return (minimum, maximum) for a text such as `2` or `1:4`."""
    low, _, high = text.partition(":")
    try:
        found = int(low), int(high or low)
    except ValueError:
        raise SettingError(f"{text!r} is neither a number nor MIN:MAX", "nnodes") from None
    if not 1 <= found[0] <= found[1]:
        raise SettingError(f"{text!r} must be at least 1, and MIN at most MAX", "nnodes")
    return found


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

        `observe` is called before the ranks start and yields the observer of the steps. Raises as
        `launch_program`, SettingError for settings that contradict each other, and
        ConfigurationError for data or files that do not fit the program.
        """
        self._check()
        with fork_server() as server:
            return self._start_ranks(observe, server)

    def _start_ranks(
        self,
        observe: Callable[[Run], AbstractContextManager[StepObserver]],
        server: ForkServer,
    ) -> Launched:
        """Continue `start` while the fork server imports torch."""
        notes = list[str]()
        steps, epochs = self._read_data(notes.append)
        done = self._position().steps
        if 0 < steps <= done:
            more = "--steps or --epochs goes further"
            self.events.note(
                f"training has ended: {self.settings.checkpoint} holds {done} "
                f"{plural(done, 'step')} of "
                f"{steps}; {more}"
            )
            return Launched([], [], None, None)
        self._check_held_out(notes.append)
        if self.profiled is not None:
            self.profiled.check(steps)
        ranks = local_ranks(self.manifest, self.config)[1]
        # An error of the settings is reported without these notes.
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
        run = Run(self.manifest, None if steps == _NO_END else steps, ranks, config.gpus, done)
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
                    remove_partial(follow_links(self.settings.outputs))
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
        write_texts({next(self._output_files()): trace})

    def _open_log(self) -> MetricsLog:
        if self.log is None:
            return MetricsLog([], self.settings.log_every, self.events.warn)
        of_run = {
            name: getattr(self.manifest, name)
            for name in ("plan", "precision", "optimizer", "batch_size", "world_size")
        }
        return self.log.open(of_run, self.events.warn)

    def _read_data(self, note: Callable[[str], None]) -> tuple[int, int | None]:
        """Check the data that the steps read, and return (steps, epochs). `epochs` is None unless
        the run ends with its data, whose number of samples is unknown.
        """
        train = self.manifest.train
        settings = self.manifest.data
        data = settings.path if self.settings.data is None else self.settings.data
        if data is None and (self.settings.epochs is not None or self.settings.shuffle):
            flag = "--shuffle" if self.settings.epochs is None else "--epochs"
            raise ConfigurationError(
                f"{flag} requires data with an order and an end, but the data are random",
                hint="set the data with --data",
            )
        if data is None:
            note("the data is random; --data names other data")
        shuffle = settings.shuffle if self.settings.shuffle is None else self.settings.shuffle
        epochs = self.settings.epochs or (
            settings.epochs if self.settings.steps is None and train and data is not None else None
        )
        settings = replace(settings, epochs=epochs, shuffle=shuffle)
        steps = self.settings.steps or (1 if train and epochs is None else None)
        begin = self._position()
        source, unchecked = check_data(
            self.manifest, data, None if self.settings.resume else steps, settings, begin
        )
        if source is None:
            if epochs and self.manifest.lr_scheduler.needs_steps:
                message = (
                    "the learning rate decays over the number of steps, which is unknown before "
                    "the data end"
                )
                raise ConfigurationError(
                    message, hint="set --steps, or plan with lr_scheduler.total_steps"
                )
            return steps or (_NO_END if epochs else 1), epochs
        steps = steps or source.end or 1
        for line in filter(None, (*source.notes(steps), unchecked)):
            note(line)
        return steps, None

    def _position(self) -> RunProgress:
        """Return the position in the data at which the run starts: after the newest checkpoint if
        it resumes, otherwise the start.
        """
        if (
            not self.settings.resume
            or self.settings.checkpoint is None
            or not (saved := committed_steps(self.settings.checkpoint))
        ):
            return START_OF_RUN
        newest = read_checkpoint(checkpoint_path(self.settings.checkpoint, saved[-1]))
        return RunProgress(newest.step, newest.samples)

    def _check_held_out(self, note: Callable[[str], None]) -> None:
        """Check all of the validation data."""
        once = replace(self.manifest, train=False)
        held_out = (
            self.manifest.evaluation.data
            if self.settings.eval_data is None
            else self.settings.eval_data
        )
        settings = DataSettings(sequence_length=self.manifest.data.sequence_length)
        if unchecked := check_data(once, held_out, None, settings)[1]:
            note(unchecked)

    def rehearse(self) -> dict[str, Any]:
        """Run one step of rank `settings.rank` (0 if it is None) without the other ranks, and
        return its report. Raises ConfigurationError if there is no program of this rank.
        """
        rank = self.settings.rank or 0
        world_size = self.manifest.world_size
        if not 0 <= rank < world_size:
            raise ConfigurationError(
                f"rank {rank} does not exist",
                hint=f"use ranks 0 to {world_size - 1} of the program",
            )
        if not self._has(rank):
            raise ConfigurationError(
                f"the program lacks the file of rank {rank}",
                hint=f"run autopipe codegen PLAN --ranks {rank}",
            )
        self._read_data(lambda line: None)
        with scratch_folder("launch") as name:
            report = Path(name) / "report.json"
            own = {name: getattr(self.settings, name) for name in ("device", "data", "seed")}
            arguments = rank_arguments(
                dry_run=True, steps=1, report=report, model=_absolute(self.settings.model), **own
            )
            run_alone(self.manifest.folder, arguments, rank, world_size, self._fake_cuda())
            found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
            return found

    def _fake_cuda(self) -> Path | None:
        """Return the library that emulates CUDA in a dry run, None if it is not required. Raises
        ConfigurationError if the library cannot be built.
        """
        if self.settings.device != "cuda":
            return None
        import torch

        from autopipe.passes.auto.plan_cache import cache_folder

        return None if torch.cuda.is_available() else fake_cuda.build(cache_folder())

    def _has(self, rank: int) -> bool:
        """Return True if the folder contains the program of the rank. `codegen --ranks` omits
        some.
        """
        return (self.manifest.folder / f"{rank_module(rank)}.py").is_file()

    def _check(self) -> None:
        train = self.manifest.train
        checkpoint = self.settings.checkpoint
        if self.settings.epochs is not None and (self.settings.steps is not None or not train):
            why = "inference reads its data once" if not train else "--steps already sets the end"
            raise SettingError(f"--epochs: {why}")
        missing = [rank for rank in range(self.manifest.world_size) if not self._has(rank)]
        if missing:
            of_all = (
                f"{len(missing)} of {self.manifest.world_size} "
                f"{plural(self.manifest.world_size, 'rank')}"
            )
            hint = "write all ranks with autopipe codegen PLAN, without --ranks"
            raise ConfigurationError(
                f"{of_all} were not generated, the first is {missing[0]}", hint
            )
        needing = ("resume", "checkpoint_every", "keep_latest_k", "keep_every")
        given = [name for name in needing if getattr(self.settings, name) not in (None, False)]
        if checkpoint is None and given:
            flag = f"--{given[0].replace('_', '-')}"
            raise ConfigurationError(
                f"{flag} requires a checkpoint folder", hint="set the folder with --checkpoint DIR"
            )
        if checkpoint is not None and not train:
            raise ConfigurationError(
                "a program for inference has no state to save", hint="omit --checkpoint"
            )
        if checkpoint is not None:
            check_can_save(checkpoint)
        if checkpoint is not None and not self.settings.resume:
            check_not_in_use(checkpoint)
            check_has_no_checkpoints(checkpoint)
        if (self.settings.eval_data or self.settings.eval_interval) and not train:
            raise ConfigurationError(
                "a program for inference has no loss", hint="omit --eval-data and --eval-interval"
            )
        if (
            self.settings.eval_interval
            and (self.settings.eval_data or self.manifest.evaluation.data) is None
        ):
            raise ConfigurationError(
                "--eval-interval requires validation data",
                hint="set the data with --eval-data FILE",
            )
        if self.log is not None:
            self.log.check(self.settings.resume)
        if self.settings.outputs is not None and train:
            hint = "plan with --mode infer, or omit --outputs"
            raise ConfigurationError("a program for training cannot write outputs", hint=hint)
        if self.settings.outputs is not None and self.settings.outputs.suffix not in (
            ".npz",
            ".npy",
        ):
            raise ConfigurationError(
                f"the outputs file is {self.settings.outputs}, expected .npz or .npy",
                hint="choose a .npz file, or a .npy file",
            )
        if (
            self.settings.outputs is not None
            and self.settings.outputs.suffix == ".npy"
            and len(self.manifest.outputs) > 1
        ):
            names = ", ".join(output.value.name for output in self.manifest.outputs)
            raise ConfigurationError(
                f"the program has several outputs: {names}", hint="choose a .npz file"
            )
        for each in self._output_files():
            each.check()

    def _output_files(self) -> Iterator[OutputFile]:
        """Yield the files that the launch writes at its end: the trace first, if there is one."""
        sources = (
            self.settings.data,
            self.settings.eval_data,
            self.manifest.data.path,
            self.manifest.evaluation.data,
        )
        paths = tuple(Path(each) for each in sources if each is not None)
        read = (self.manifest.folder, self.manifest.model, *paths)
        if self.settings.trace is not None:
            yield OutputFile(self.settings.trace, TRACE, read, self.settings.force)
        if self.settings.outputs is not None:
            yield OutputFile(
                self.settings.outputs,
                NPY if self.settings.outputs.suffix == ".npy" else NPZ,
                read,
                self.settings.force,
            )

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
            else _run_name(config),
            resume=self.settings.checkpoint
            is not None,  # A rank that is started again goes on from the newest checkpoint.
            trace=self.settings.trace and scratch / "spans",
            **({} if self.profiled is None else self.profiled.arguments(scratch / "profile")),
            outputs=self.settings.outputs and self.settings.outputs.absolute(),
            start_timeout=timeouts.start_s,
            step_timeout=timeouts.step_s,
            checkpoint_timeout=timeouts.checkpoint_s,
        )


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


def _run_name(config: LaunchConfig) -> str:
    """Return a name of the launch that is equal on all nodes: the rendezvous endpoint and the name
    of the run if there are several nodes, otherwise a random name.
    """
    if config.nodes == (1, 1):
        return uuid.uuid4().hex
    return f"{config.rendezvous_endpoint} {config.rendezvous_id}"


def visible_gpus(device: str) -> int:
    """Return the number of this node's GPUs that ranks on `device` may use."""
    if device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def placement_note(device: str, ranks: int) -> str:
    """Return one line about the devices on which the ranks of this node run. Raises
    ConfigurationError if `device` is "cuda" and there is no CUDA device.
    """
    gpus = visible_gpus(device)
    if not gpus and device == "cuda":
        raise ConfigurationError(
            "this machine lacks a CUDA device", hint="set --device cpu", where="--device cuda"
        )
    placed = count_text(ranks, "rank")
    if not gpus:
        why = "" if device == "cpu" else "no CUDA device: "
        return f"{why}{placed} on the CPU, over gloo"
    return (
        f"{placed} on {count_text(ranks, 'GPU')}"
        if ranks <= gpus
        else f"{placed} share {count_text(gpus, 'GPU')}"
    )
