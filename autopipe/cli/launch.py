"""`autopipe launch`: run the ranks of a program."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from autopipe.api.program_folder import flag_words, open_program
from autopipe.backends.torch import fake_cuda
from autopipe.backends.torch.checkpoint import (
    check_free,
    check_savable,
    check_unused,
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
from autopipe.backends.torch.runtime.data.sample_order import START, Position
from autopipe.backends.torch.runtime.data.sources import check_data
from autopipe.backends.torch.runtime.job import Job, job_of
from autopipe.backends.torch.runtime.manifest import Manifest, remove_partial
from autopipe.backends.torch.runtime.watch.heartbeat import Timeouts
from autopipe.cli.launch_display import ProfiledSteps, Run, StepDisplay, show_measured
from autopipe.cli.options import FORCE, MODEL, PATH, stepwise_options
from autopipe.cli.output import Output, count_text, write_texts
from autopipe.cli.plan_report import update_line
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.output_files import followed, scratch_folder
from autopipe.ir.output_kinds import NPY, NPZ, TRACE, OutputFile
from autopipe.ir.training import DataSettings
from autopipe.ir.words import plural

_KEY_BYTES = 32
_NO_END = 2**40
"""Steps of a run that ends where its data does."""
_SECONDS = click.FloatRange(min=0, min_open=True)
_SOURCES = (
    "FILE.npz, FILE.bin of tokens, a table or folder (docs/guides/data.md) or module:function; random "
    "data without it"
)


def _interval(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> tuple[int, float] | None:
    """Steps as `50`, or minutes as `30m`: (steps, minutes), one of them 0."""
    if text is None:
        return None
    try:
        found = (0, float(text[:-1])) if text.endswith("m") else (int(text), 0.0)
    except ValueError:
        found = (0, 0.0)
    if not 0 < sum(found) < math.inf:
        raise click.BadParameter(
            f"{text!r} is neither a number of steps nor minutes as 30m", context, parameter
        )
    return found


DATA = click.option("--data", metavar="SOURCE", help=f"{_SOURCES} [data.path].")
_RANDOM = "Seed of random data, of Dropout, and of weights that the model does not store."
SEED = click.option("--seed", type=click.IntRange(min=0), help=_RANDOM)

COMPILE = click.option(
    "--compile", is_flag=True, help="Compile stages with torch.compile, before the first step."
)


@click.command()
@click.argument("program", type=PATH)
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu", "meta"]),
    default="auto",
    help=(
        "Where to run; with --dry-run meta is on no device, shapes and types alone, and cuda need "
        "not be there."
    ),
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Steps in all [1; in inference over a file all of it].",
)
@click.option(
    "--epochs", type=click.IntRange(min=1), help="Passes through the data, in place of --steps."
)
@MODEL
@click.option("--shuffle/--no-shuffle", default=None, help="Shuffle each epoch by the seed.")
@DATA
@click.option(
    "--eval-data", help="Data to validate on, as --data takes it [eval.data of the plan]."
)
@click.option(
    "--eval-interval",
    type=click.IntRange(min=1),
    help="Steps between validations [only one, the last].",
)
@SEED
@click.option(
    "--nnodes",
    metavar="N|MIN:MAX",
    help="Number of machines [1; under srun and in a PyTorchJob theirs].",
)
@click.option(
    "--node-rank",
    type=click.IntRange(min=0),
    help="Number of this machine, which orders ranks [by address].",
)
@click.option(
    "--nproc-per-node", type=click.IntRange(min=1), help="Ranks on each machine [an equal share]."
)
@click.option(
    "--rdzv-endpoint",
    default="",
    metavar="HOST:PORT",
    help="Where several machines meet, alike on all.",
)
@click.option(
    "--local-addr",
    default="",
    metavar="ADDRESS",
    help="Where ranks listen [the way to --rdzv-endpoint].",
)
@click.option(
    "--rdzv-id", default="", help="Name of the run, alike on all machines [from the plan]."
)
@click.option(
    "--rdzv-key",
    metavar="FILE",
    help="Key of the run, 32 bytes or more, on all machines and for none else.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    help="Times to start again [3 with --checkpoint, else 0].",
)
@click.option("--checkpoint", type=PATH, metavar="DIR", help="Where to save the training state.")
@click.option(
    "--checkpoint-every",
    callback=_interval,
    metavar="K|Km",
    help="Steps between two, or minutes, as 30m [only the last].",
)
@click.option(
    "--keep-latest-k",
    type=click.IntRange(min=0),
    metavar="K",
    help="Checkpoints that stay [2; 0: all].",
)
@click.option(
    "--keep-every",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep those after each N steps, too.",
)
@click.option(
    "--resume", is_flag=True, help="Go on from the newest checkpoint in --checkpoint DIR."
)
@click.option(
    "--start-timeout",
    type=_SECONDS,
    default=1800,
    show_default=True,
    help="Seconds to join and load.",
)
@click.option(
    "--step-timeout",
    type=_SECONDS,
    default=600,
    show_default=True,
    help="Seconds for a task of a step.",
)
@click.option(
    "--checkpoint-timeout",
    type=_SECONDS,
    default=7200,
    show_default=True,
    help="Seconds to write or read.",
)
@click.option(
    "--log", type=PATH, metavar="DIR", help="Write each step's figures to DIR/metrics.jsonl."
)
@click.option(
    "--log-every",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Steps from line to line.",
)
@click.option(
    "--wandb",
    metavar="PROJECT",
    envvar="WANDB_PROJECT",
    help="With --log: W&B, too [WANDB_PROJECT].",
)
@click.option("--profile", metavar="K|K-L", help="With --log: profile steps K to L.")
@click.option("--trace", type=PATH, metavar="FILE", help="Chrome trace of this node's ranks.")
@click.option(
    "--outputs",
    type=PATH,
    metavar="FILE.npz|.npy",
    help="Outputs of inference, under their own names.",
)
@FORCE
@click.option(
    "--mode", type=click.Choice(["train", "infer"]), help="Refuse a program of another mode."
)
@COMPILE
@click.option(
    "--cuda-graphs/--no-cuda-graphs",
    default=None,
    help=(
        "Replay stages as CUDA graphs from the second step on [stages that the host bounds, on "
        "CUDA]."
    ),
)
@click.option(
    "--blocking", is_flag=True, help="Overlap no message with a task, to see what that is worth."
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Run one step of one rank without the others, and say what it does.",
)
@click.option("--rank", type=click.IntRange(min=0), help="Which rank --dry-run runs [0].")
@stepwise_options
def launch(
    output: Output,
    /,
    program: Path,
    nnodes: str | None,
    node_rank: int | None,
    nproc_per_node: int | None,
    rdzv_endpoint: str,
    local_addr: str,
    rdzv_id: str,
    rdzv_key: str | None,
    max_restarts: int | None,
    start_timeout: float,
    step_timeout: float,
    checkpoint_timeout: float,
    log: Path | None,
    log_every: int,
    wandb: str | None,
    profile: str | None,
    dry_run: bool,
    rank: int | None,
    mode: str | None,
    model: Path | None,
    **flags: Any,
) -> None:
    """Run the ranks of PROGRAM, a folder that codegen wrote.

    A rank that does not get on for longer than a time-out, in seconds, while it waits for no other,
    is named with its task, and all are stopped.

    \b
    Example:
      autopipe launch gpt.plan/program --steps 10 --checkpoint ckpt --checkpoint-every 5
    """
    # Rendezvous on a free port logs warnings from C++ that say nothing to a user; torch reads this
    # when it is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    if profile is not None and log is None:
        raise click.UsageError("--profile goes with --log DIR, where its files go")
    logged = None if log is None else LogSettings(log, log_every, wandb)
    profiled = (
        None if profile is None or log is None else ProfiledSteps.of(profile, log / "profile")
    )
    run = Launch(
        open_program(program, model, flags["device"] != "meta"),
        model,
        logged,
        log_every,
        profiled,
        **flags,
    )
    _check_mode(run.manifest, mode)
    job = job_of(os.environ) if nnodes is None else None
    if job is None:
        job = Job("", nnodes or "1", None, "")
    elif job.nodes != "1":
        output.note(
            f"{job.manager} runs {job.nodes} nodes, which meet at {rdzv_endpoint or job.endpoint}"
        )
    config = LaunchConfig(
        nodes=_nodes(job.nodes),
        ranks_per_node=nproc_per_node or job.ranks_per_node,
        rendezvous_endpoint=rdzv_endpoint or job.endpoint,
        node=job.node if node_rank is None else node_rank,
        local_address=local_addr,
        hosts=job.hosts,
        rendezvous_id=rdzv_id or job.name,
        rendezvous_key=b"" if rdzv_key is None else _key(Path(rdzv_key)),
        max_restarts=max_restarts
        if max_restarts is not None
        else 3
        if run.checkpoint is not None
        else 0,
        timeouts=Timeouts(start_timeout, step_timeout, checkpoint_timeout),
        live=not output.as_json,
        saves=run.checkpoint is not None,
        debug=bool(click.get_current_context().params["debug"]),
    )
    if dry_run and (run.blocking or run.compile):
        raise click.UsageError(
            f"--dry-run times nothing: leave out --{'blocking' if run.blocking else 'compile'}"
        )
    if run.device == "meta" and not dry_run:
        raise click.UsageError("--device meta computes nothing: it goes with --dry-run")
    if dry_run:
        report = run.rehearse(rank or 0)
        output.result(report, rehearsal_table(report))
        return
    if rank is not None:
        raise click.UsageError("--rank goes with --dry-run")
    try:
        steps, evaluations = run.start(config, output)
    except KeyboardInterrupt:
        if run.checkpoint is not None:
            words = [*sys.argv[1:], *([] if run.resume else ["--resume"])]
            output.note(f"to go on: {shlex.join(['autopipe', *words])}")
        raise
    output.result(
        {
            "program": program,
            "steps": steps,
            **({"evaluations": evaluations} if evaluations else {}),
        }
    )


def _check_mode(manifest: Manifest, mode: str | None) -> None:
    """Raise ConfigurationError for a program of another mode than is asked for."""
    if mode not in (None, "train" if manifest.train else "infer"):
        other = "train" if mode == "infer" else "infer"
        hint = f"autopipe plan MODEL --mode {mode}, then autopipe codegen"
        raise ConfigurationError(f"the program is to {other}", hint, f"--mode {mode}")


def _key(path: Path) -> bytes:
    """The key in a file that nobody else may read."""
    try:
        others = path.stat().st_mode & 0o077
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(
            f"the key cannot be read: {error.strerror}", where=str(path)
        ) from error
    if others:
        raise ConfigurationError(
            "others may read the key", hint=f"chmod 600 {path}", where=str(path)
        )
    if len(key) < _KEY_BYTES:
        hint = f"openssl rand -hex {_KEY_BYTES} makes one"
        raise ConfigurationError(
            f"the key has {len(key)} {plural(len(key), 'byte')}, not {_KEY_BYTES} or more",
            hint=hint,
            where=str(path),
        )
    return key


def _nodes(text: str) -> tuple[int, int]:
    """`2` or `1:4` as fewest and most."""
    low, _, high = text.partition(":")
    try:
        found = int(low), int(high or low)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is neither a number nor MIN:MAX", param_hint="--nnodes"
        ) from None
    if not 1 <= found[0] <= found[1]:
        raise click.BadParameter(
            f"{text!r} must be at least 1, and MIN at most MAX", param_hint="--nnodes"
        )
    return found


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a program: the flags of the command that its ranks see."""

    manifest: Manifest
    model: Path | None
    """The ONNX file in place of the planned one; None for that."""
    log: LogSettings | None
    log_every: int
    """Steps from one line of the terminal to the next."""
    profiled: ProfiledSteps | None
    device: str
    steps: int | None
    """One where not given, in inference over a file all that its samples fill."""
    epochs: int | None
    shuffle: bool | None
    data: str | None
    eval_data: str | None
    eval_interval: int | None
    seed: int | None
    checkpoint: Path | None
    checkpoint_every: tuple[int, float] | None
    """Steps, or minutes, from one to the next."""
    keep_latest_k: int | None
    keep_every: int | None
    resume: bool
    trace: Path | None
    outputs: Path | None
    force: bool
    blocking: bool
    compile: bool
    cuda_graphs: bool | None

    def start(
        self, config: LaunchConfig, output: Output
    ) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
        """Run the ranks, show and log their steps, and return the reports of all, and of
        validations. Raises as `launch_program`, and ConfigurationError for data that does not fit.
        """
        self._check()
        with fork_server() as server:
            return self._start_ranks(config, output, server)

    def _start_ranks(
        self, config: LaunchConfig, output: Output, server: ForkServer
    ) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
        """Continue `start` while the fork server imports torch."""
        notes = list[str]()
        steps, epochs = self._read_data(notes.append)
        if 0 < steps <= (done := self._position().steps):
            more = "--steps or --epochs goes further"
            output.note(
                f"training has ended: {self.checkpoint} holds {done} {plural(done, 'step')} of "
                f"{steps}; {more}"
            )
            return [], []
        self._check_held_out(notes.append)
        if self.profiled is not None:
            self.profiled.check(steps)
        ranks = local_ranks(self.manifest, config)[1]
        for line in (
            *notes,
            placement_note(self.device, ranks),
        ):  # An error of the flags comes without them.
            output.note(line)
        if self.manifest.train:
            optimizer = self.manifest.optimizer
            output.note(
                update_line(
                    optimizer["name"],
                    optimizer["lr"],
                    self.manifest.lr_scheduler,
                    self.manifest.training,
                )
            )
        config = replace(config, gpus=visible_gpus(self.device))
        shown = Run(self.manifest, None if steps == _NO_END else steps, ranks, config.gpus)
        with scratch_folder("launch") as name:
            scratch = Path(name)
            arguments = self._arguments(scratch, steps, epochs, config)
            try:
                with (
                    output.progress_lines("steps", shown.steps) as lines,
                    StepDisplay(shown, output, self.log_every, lines) as display,
                    self._open_log(output) as log,
                ):
                    lines.reach(self._position().steps)
                    follower = ReportFollower(scratch / "report.jsonl", (display.take, log.add))
                    launch_program(
                        self.manifest, arguments, config, display.note, follower.poll, server
                    )
            finally:
                if self.outputs is not None:
                    remove_partial(followed(self.outputs))
                self._write_trace(scratch / "spans")
            if self.profiled is not None:
                self.profiled.finish(scratch / "profile", self.manifest, output)
            found, evaluations = (
                read(scratch / "report.jsonl") for read in (read_reports, read_evaluations)
            )
        show_measured(shown, found, output)
        return found, evaluations

    def _write_trace(self, times: Path) -> None:
        """Write the tasks of this node's ranks, whose times lie in the folder `times`, where a
        trace is asked for.
        """
        if self.trace is None:
            return
        from autopipe.cli.drawing.bubbles import measured_steps
        from autopipe.cli.drawing.trace import chrome_trace

        write_texts(
            {
                next(self._output_files()): chrome_trace(
                    None, measured_steps(read_times(times)).tasks
                )
            }
        )

    def _open_log(self, output: Output) -> MetricsLog:
        if self.log is None:
            return MetricsLog([], self.log_every, output.warn)
        of_run = {
            name: getattr(self.manifest, name)
            for name in ("plan", "precision", "optimizer", "batch_size", "world_size")
        }
        return self.log.open(of_run, output.warn)

    def _read_data(self, note: Callable[[str], None]) -> tuple[int, int | None]:
        """Look at the data as far as the steps read them. Returns the number of steps, and that of
        epochs where it alone says when the data ends.
        """
        train = self.manifest.train
        settings = self.manifest.data
        data = settings.path if self.data is None else self.data
        if data is None and (self.epochs is not None or self.shuffle):
            flag = "--shuffle" if self.epochs is None else "--epochs"
            raise ConfigurationError(
                f"{flag}: random data have neither order nor end", hint="name others with --data"
            )
        if data is None:
            note("the data is random; --data names other data")
        shuffle = settings.shuffle if self.shuffle is None else self.shuffle
        epochs = self.epochs or (
            settings.epochs if self.steps is None and train and data is not None else None
        )
        settings = replace(settings, epochs=epochs, shuffle=shuffle)
        steps = self.steps or (1 if train and epochs is None else None)
        begin = self._position()
        source, unchecked = check_data(
            self.manifest, data, None if self.resume else steps, settings, begin
        )
        if source is None:
            if epochs and self.manifest.lr_scheduler.needs_steps:
                message = (
                    "the learning rate decays over steps whose number nothing says before the data "
                    "ends"
                )
                raise ConfigurationError(
                    message, hint="give --steps, or plan with lr_scheduler.total_steps"
                )
            return steps or (_NO_END if epochs else 1), epochs
        steps = steps or source.end or 1
        for line in filter(None, (*source.notes(steps), unchecked)):
            note(line)
        return steps, None

    def _position(self) -> Position:
        """How far the run has come that this one goes on from."""
        if (
            not self.resume
            or self.checkpoint is None
            or not (saved := committed_steps(self.checkpoint))
        ):
            return START
        newest = read_checkpoint(checkpoint_path(self.checkpoint, saved[-1]))
        return Position(newest.step, newest.samples)

    def _check_held_out(self, note: Callable[[str], None]) -> None:
        """Look at all of the data to validate on."""
        once = replace(self.manifest, train=False)
        held_out = self.manifest.evaluation.data if self.eval_data is None else self.eval_data
        settings = DataSettings(sequence_length=self.manifest.data.sequence_length)
        if unchecked := check_data(once, held_out, None, settings)[1]:
            note(unchecked)

    def rehearse(self, rank: int) -> dict[str, object]:
        """Run one step of one rank's program without the others and return what it did."""
        world_size = self.manifest.world_size
        if not 0 <= rank < world_size:
            raise ConfigurationError(
                f"there is no rank {rank}", hint=f"the program has ranks 0 to {world_size - 1}"
            )
        if not self._has(rank):
            raise ConfigurationError(
                f"rank {rank} was not generated", hint=f"autopipe codegen PLAN --ranks {rank}"
            )
        self._read_data(lambda line: None)
        with scratch_folder("launch") as name:
            report = Path(name) / "report.json"
            own = {name: getattr(self, name) for name in ("device", "data", "seed")}
            arguments = flag_words(
                dry_run=True, steps=1, report=report, model=_absolute(self.model), **own
            )
            run_alone(self.manifest.folder, arguments, rank, world_size, self._fake_cuda())
            found: dict[str, object] = json.loads(report.read_text(encoding="utf-8"))
            return found

    def _fake_cuda(self) -> Path | None:
        """The library of the device that stands in for CUDA in a dry run, where there is none.
        Raises ConfigurationError where it cannot be built.
        """
        if self.device != "cuda":
            return None
        import torch

        from autopipe.passes.auto.plan_cache import cache_folder

        return None if torch.cuda.is_available() else fake_cuda.build(cache_folder())

    def _has(self, rank: int) -> bool:
        """True if the rank's program was written: `codegen --ranks` leaves others out."""
        return (self.manifest.folder / f"{rank_module(rank)}.py").is_file()

    def _check(self) -> None:
        train = self.manifest.train
        checkpoint = self.checkpoint
        if self.epochs is not None and (self.steps is not None or not train):
            why = "inference takes its data once" if not train else "--steps says when to end"
            raise click.UsageError(f"--epochs: {why}")
        missing = [rank for rank in range(self.manifest.world_size) if not self._has(rank)]
        if missing:
            of_all = (
                f"{len(missing)} of {self.manifest.world_size} "
                f"{plural(self.manifest.world_size, 'rank')}"
            )
            hint = "autopipe codegen PLAN, without --ranks, writes all"
            raise ConfigurationError(
                f"{of_all} were not generated, the first is {missing[0]}", hint
            )
        needing = ("resume", "checkpoint_every", "keep_latest_k", "keep_every")
        given = [name for name in needing if getattr(self, name) not in (None, False)]
        if checkpoint is None and given:
            flag = f"--{given[0].replace('_', '-')}"
            raise ConfigurationError(f"{flag} needs a folder", hint="give it with --checkpoint DIR")
        if checkpoint is not None and not train:
            raise ConfigurationError(
                "a program for inference has nothing to save", hint="leave out --checkpoint"
            )
        if checkpoint is not None:
            check_savable(checkpoint)
        if checkpoint is not None and not self.resume:
            check_free(checkpoint)
            check_unused(checkpoint)
        if (self.eval_data or self.eval_interval) and not train:
            raise ConfigurationError(
                "a program for inference has no loss", hint="leave out --eval-data"
            )
        if self.eval_interval and (self.eval_data or self.manifest.evaluation.data) is None:
            raise ConfigurationError(
                "--eval-interval needs data to validate on", hint="give it with --eval-data FILE"
            )
        if self.log is not None:
            self.log.check(self.resume)
        if self.outputs is not None and train:
            hint = "plan with --mode infer, or leave out --outputs"
            raise ConfigurationError("a program for training collects no outputs", hint=hint)
        if self.outputs is not None and self.outputs.suffix not in (".npz", ".npy"):
            raise ConfigurationError(
                f"outputs do not go to {self.outputs}", hint="name a .npz file, or a .npy file"
            )
        if (
            self.outputs is not None
            and self.outputs.suffix == ".npy"
            and len(self.manifest.outputs) > 1
        ):
            names = ", ".join(output.value.name for output in self.manifest.outputs)
            raise ConfigurationError(
                f"the program has several outputs: {names}", hint="name a .npz file"
            )
        for each in self._output_files():
            each.check()

    def _output_files(self) -> Iterator[OutputFile]:
        """Yield the files that the launch writes at its end: the trace first, if there is one."""
        sources = (
            self.data,
            self.eval_data,
            self.manifest.data.path,
            self.manifest.evaluation.data,
        )
        paths = tuple(Path(each) for each in sources if each is not None)
        read = (self.manifest.folder, self.manifest.model, *paths)
        if self.trace is not None:
            yield OutputFile(self.trace, TRACE, read, self.force)
        if self.outputs is not None:
            yield OutputFile(
                self.outputs, NPY if self.outputs.suffix == ".npy" else NPZ, read, self.force
            )

    def _arguments(
        self, scratch: Path, steps: int, epochs: int | None, config: LaunchConfig
    ) -> list[str]:
        timeouts = config.timeouts
        steps_between, minutes_between = self.checkpoint_every or (0, 0.0)
        own = {
            name: getattr(self, name)
            for name in (
                "device",
                "blocking",
                "compile",
                "cuda_graphs",
                "data",
                "shuffle",
                "eval_data",
                "eval_interval",
                "seed",
                "keep_latest_k",
                "keep_every",
            )
        }
        return flag_words(
            **own,
            no_shuffle=self.shuffle is False,
            no_cuda_graphs=self.cuda_graphs is False,
            model=_absolute(self.model),
            steps=steps,
            epochs=epochs,
            report=scratch / "report.jsonl",
            checkpoint=self.checkpoint and self.checkpoint.absolute(),
            checkpoint_every=steps_between or None,
            checkpoint_minutes=minutes_between or None,
            run=None if self.checkpoint is None or self.resume else _run_name(config),
            resume=self.checkpoint
            is not None,  # A rank that is started again goes on from the newest checkpoint.
            trace=self.trace and scratch / "spans",
            **({} if self.profiled is None else self.profiled.arguments(scratch / "profile")),
            outputs=self.outputs and self.outputs.absolute(),
            start_timeout=timeouts.start_s,
            step_timeout=timeouts.step_s,
            checkpoint_timeout=timeouts.checkpoint_s,
        )


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


def _run_name(config: LaunchConfig) -> str:
    """Return a name of the launch that is the same on all nodes: of several, their meeting point's
    and the run's.
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
    """Where the ranks of this node run, in one line; on GPUs they say themselves what they talk
    over. Raises ConfigurationError where CUDA is asked for and there is none.
    """
    gpus = visible_gpus(device)
    if not gpus and device == "cuda":
        raise ConfigurationError(
            "no CUDA device is at hand", hint="use --device cpu", where="--device cuda"
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


def rehearsal_table(report: Mapping[str, Any]) -> Table:
    table = Table("one step of", f"rank {report['rank']} of {report['world_size']}")
    table.add_row("stages", ", ".join(map(str, report["stages"])))
    table.add_row("tasks", " ".join(report["tasks"]))
    for way in ("sent", "received"):
        for rank, size in report[f"{way}_bytes"].items():
            table.add_row(
                f"{way} {'to' if way == 'sent' else 'from'} rank {rank}",
                f"{size:,} {plural(size, 'byte')}",
            )
    for kind, size in report["communication_bytes"].items():
        if size and kind != "send":  # Messages are listed by rank.
            table.add_row(kind.replace("_", "-"), f"{size:,} {plural(size, 'byte')}")
    table.add_row(
        "parameters", f"{report['parameters']:,} ({report['parameter_bytes'] / 2**20:.1f} MiB)"
    )
    table.add_row("peak memory", f"{report['peak_memory_bytes'] / 2**20:.0f} MiB")
    return table
