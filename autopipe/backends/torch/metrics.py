"""The metrics log of a run: the file `metrics.jsonl` with one line per N steps, TensorBoard events,
and a run of Weights & Biases (W&B). The launcher writes the log from the report file of rank 0, so
that no rank waits for it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.output_files import add_path_to_errors, open_replacement_file

Record = Mapping[str, Any]
METRICS_FILE = "metrics.jsonl"
_FLUSH_INTERVAL_S = 10
"""Seconds between two flushes of TensorBoard's events. They are not flushed at each step, because a
flush can take longer than a step.
"""
_RATE_METRICS = ("samples_per_s", "tokens_per_s", "tflops_per_device", "mfu", "bubble_rate")


class MetricsWriter(Protocol):
    """A destination of the metrics log. Records arrive in the order of their steps. After a
    restart, a run repeats steps; a repeated record replaces the earlier records of its step and of
    all later steps.
    """

    @property
    def path(self) -> Path:
        """The file or folder to which the log is written."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Writes the metrics log to a file with one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last = max(_steps_of_log(path), default=-1)
        if path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n"):
            _complete_last_line(path, content)

    def write(self, record: Record) -> None:
        if record["step"] < self._last or (
            record["step"] == self._last and "step_time_s" in record
        ):
            self._remove_steps_from(record["step"])
        self._last = record["step"]
        with add_path_to_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _remove_steps_from(self, step: int) -> None:
        """Remove the lines of step `step` and of later steps from the file."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        with open_replacement_file(self.path) as file:
            file.writelines(line for line in lines if json.loads(line)["step"] < step)

    def close(self) -> None:
        """Do nothing, because `write` has already written each line to the file."""


def _steps_of_log(path: Path) -> Iterator[int]:
    """Yield the step of each line of a metrics log. Raise ConfigurationError if a line is not an
    entry of a step. The last line may be incomplete; it is skipped in that case.
    """
    if not path.exists():
        return
    *lines, last = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            yield int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError) as error:
            raise _invalid_line_error(path, number) from error
    if not _LINE_START.startswith(last[: len(_LINE_START)]):
        raise _invalid_line_error(path, len(lines) + 1)
    if (whole := _step_of_unfinished_line(last)) is not None:
        yield whole


_LINE_START = '{"step": '
"""Beginning of each line of a metrics log."""


def _invalid_line_error(path: Path, number: int) -> ConfigurationError:
    """Return the error for line `number` of the file `path`, which is not an entry of a metrics
    log.
    """
    return ConfigurationError(
        f"line {number} is not an entry of a step",
        "move the file, or choose another folder",
        str(path),
    )


def _step_of_unfinished_line(line: str) -> int | None:
    """Return the step of a last line that is complete except for its line break. Return None if a
    part of its JSON object is missing.
    """
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return None


def _complete_last_line(path: Path, content: bytes) -> None:
    """Append a line break to the last line of a log with the given content. If a part of the line
    is missing, for example because the machine stopped, remove the line instead.
    """
    end = content.rfind(b"\n") + 1
    if _step_of_unfinished_line(content[end:].decode(errors="replace")) is None:
        os.truncate(path, end)
        return
    with add_path_to_errors(path), path.open("ab") as file:
        file.write(b"\n")


class TensorBoard:
    """Writes the metrics log as TensorBoard events to a folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._writer: Any = None
        self._last = -1

    def write(self, record: Record) -> None:
        step = record["step"]
        if self._writer is None or step < self._last:
            self.close()
            # A step number below the last number means that the run was restarted. With
            # `purge_step`, TensorBoard hides the events that were written for this step and later
            # steps before the restart.
            module: Any = import_module("torch.utils.tensorboard")
            self._writer = module.SummaryWriter(
                str(self.path), purge_step=step, flush_secs=_FLUSH_INTERVAL_S
            )
        self._last = step
        for name, figure in metric_scalars(record):
            self._writer.add_scalar(name, figure, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases:
    """Writes the metrics log to a run of Weights & Biases, whose files are in `folder`."""

    def __init__(self, project: str, folder: Path, settings: Record) -> None:
        """`project` is the project of the run. `settings` are stored as the configuration of the
        run. The run is created when the first record is written.
        """
        self.path = folder
        self._start = {"project": project, "dir": str(folder), "config": dict(settings)}
        self._run: Any = None

    def write(self, record: Record) -> None:
        if self._run is None:
            wandb: Any = import_module("wandb")
            self._run = wandb.init(**self._start, settings=wandb.Settings(silent=True))
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        self._run.log({"step": record["step"], **dict(metric_scalars(record))})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


def metric_scalars(record: Record) -> Iterator[tuple[str, float]]:
    """Yield (name, value) for each metric of a record. The names are those that TensorBoard and W&B
    show, for example `train/loss`.
    """
    for name in ("loss", "learning_rate", "grad_norm", "loss_scale"):
        if record.get(name) is not None:
            yield f"train/{name}", record[name]
    if record.get("eval_loss") is not None:
        yield "eval/loss", record["eval_loss"]
    for name in ("step_time_s", *_RATE_METRICS):
        if record.get(name) is not None:
            yield f"perf/{name}", record[name]
    if peaks := record.get("peak_memory_bytes"):
        yield "memory/peak_bytes", max(peaks)
    for kind, size in record.get("communication_bytes", {}).items():
        yield f"communication_bytes/{kind}", size


class MetricsLog:
    """Passes one record per `every` steps to the writers. Loss, learning rate and gradient norm in
    a record are those of its step; times and rates are means over the steps since the previous
    record. A writer that raises an error is removed after a warning, and the run continues.
    """

    def __init__(
        self, writers: list[MetricsWriter], every: int, warn: Callable[[str], None]
    ) -> None:
        self._writers = writers
        self._every = every
        self._warn = warn
        self._since: list[Record] = []

    def add(self, record: Record) -> None:
        """Process the next record of the report file. The record of a step counts towards the next
        line of the log; a record of a validation is written at once; a record without a step is
        ignored.
        """
        if "step_time_s" not in record:
            if "step" in record:
                self._write(record)
            return
        self._since.append(record)
        if record["step"] % self._every == 0:
            self._write(average_step_records(self._since))
            self._since = []

    def _write(self, record: Record) -> None:
        """Pass a record to all writers, with None in place of infinities and NaNs."""
        finite = {name: _finite_or_none(value) for name, value in record.items()}
        for writer in list(self._writers):
            self._call_writer(writer, partial(writer.write, finite))

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        """Write the steps since the last record, then close the writers."""
        if self._since:
            self._write(average_step_records(self._since))
            self._since = []
        for writer in list(self._writers):
            self._call_writer(writer, writer.close)

    def _call_writer(self, writer: MetricsWriter, act: Callable[[], None]) -> None:
        """Call `act`, which uses `writer`. If it raises an error, remove the writer and warn the
        user.
        """
        try:
            act()
        except Exception as error:  # noqa: BLE001 - a service's own errors, and a full disk
            self._writers.remove(writer)
            self._warn(
                f"{type(writer).__name__} writes no more to {_write_error_text(error, writer.path)}"
            )


def _write_error_text(error: Exception, path: Path) -> str:
    """Return the reason why a log cannot be written, with the name of the file, on one line. The
    file is that of the error or, if the error names none, `path`.
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or path}: {error.strerror}"
    return " ".join(f"{path}: {type(error).__name__}: {error}".split())


def _finite_or_none(value: Any) -> Any:
    """Return `value`, or None if it is an infinity or a NaN, which JSON cannot represent."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def average_step_records(records: list[Record]) -> dict[str, Any]:
    """Return the last record of consecutive steps, with the mean of the step times and with rates
    averaged over the total time.
    """
    found = dict(records[-1])
    if len(records) == 1:
        return found
    seconds = [each["step_time_s"] for each in records]
    for name in _RATE_METRICS:
        if found.get(name) is not None:
            rates = zip(records, seconds, strict=True)
            found[name] = sum(each[name] * own for each, own in rates) / sum(seconds)
    found["step_time_s"] = sum(seconds) / len(seconds)
    return found


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Settings of the metrics log of a launch: its folder, the number of steps per record
    (`every`), and the W&B project, if W&B is used.
    """

    folder: Path
    every: int = 1
    wandb_project: str | None = None

    def check(self, resume: bool) -> None:
        """Raise ConfigurationError if the log cannot be written, if the package wandb is required
        but missing, or if the folder has the log of another run and `resume` is not set. Write
        nothing.
        """
        path = self.folder / METRICS_FILE
        there = next(
            each
            for each in (self.folder.absolute(), *self.folder.absolute().parents)
            if each.exists()
        )
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise ConfigurationError(
                "the metrics log cannot be written",
                hint="choose another folder",
                where=str(self.folder),
            )
        if path.exists() and not path.is_file():
            raise ConfigurationError(
                f"{path} is not a regular file", hint="choose another folder with --log DIR"
            )
        if self.wandb_project is not None and find_spec("wandb") is None:
            raise ConfigurationError(
                "--wandb requires the package wandb, which is not installed",
                hint="pip install wandb",
                where="--wandb",
            )
        if list(_steps_of_log(path)) and not resume:
            hint = "choose another folder, or resume the run with --checkpoint DIR --resume"
            raise ConfigurationError(
                "the folder contains the metrics log of another run", hint, str(self.folder)
            )

    def open(self, run: Record, warn: Callable[[str], None]) -> MetricsLog:
        """Create the folder and return the log. W&B stores `run` as the configuration of the run;
        `warn` is called if a writer fails. Raise ConfigurationError if the folder cannot be created
        or the last line of an existing log cannot be completed.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            writers: list[MetricsWriter] = [JsonLines(self.folder / METRICS_FILE)]
        except OSError as error:
            message = f"the metrics log cannot be written: {error.strerror}"
            raise ConfigurationError(
                message, "choose another folder with --log DIR", str(error.filename)
            ) from error
        if find_spec("tensorboard") is not None:
            writers.append(TensorBoard(self.folder))
        if self.wandb_project is not None:
            writers.append(WeightsAndBiases(self.wandb_project, self.folder, run))
        return MetricsLog(writers, self.every, warn)
