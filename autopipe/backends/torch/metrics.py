"""The metrics log of a run: `metrics.jsonl` with a line every N steps, TensorBoard events, and a
W&B run. The launcher writes the log from the reports of rank 0, so that no rank waits for it.
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
"""Seconds between two flushes of TensorBoard's events. A flush at each step can take longer than
the step.
"""
_RATE_METRICS = ("samples_per_s", "tokens_per_s", "tflops_per_device", "mfu", "bubble_rate")


class MetricsWriter(Protocol):
    """Writes records, which come in the order of their steps. After a restart, steps are repeated.
    Their records replace the earlier records of these steps and of later ones.
    """

    @property
    def path(self) -> Path:
        """The file or folder that the log is written to."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """A file with one JSON object per line."""

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
        lines = self.path.read_bytes().splitlines(keepends=True)
        with open_replacement_file(self.path) as file:
            file.writelines(line for line in lines if json.loads(line)["step"] < step)

    def close(self) -> None:
        """Nothing to do: each line has been written to the file already."""


def _steps_of_log(path: Path) -> Iterator[int]:
    """Yield the steps of a log. Raise ConfigurationError for a file that autopipe did not write."""
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
"""Beginning of each line of a log."""


def _invalid_line_error(path: Path, number: int) -> ConfigurationError:
    return ConfigurationError(
        f"line {number} is not an entry of a step",
        "move the file, or choose another folder",
        str(path),
    )


def _step_of_unfinished_line(line: str) -> int | None:
    """Return the step of a last line that lacks only its line break; None if a part of its JSON
    object is missing.
    """
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return None


def _complete_last_line(path: Path, content: bytes) -> None:
    """Complete the last line of a log with a line break, or remove the line if a part is missing,
    for example because the machine stopped.
    """
    end = content.rfind(b"\n") + 1
    if _step_of_unfinished_line(content[end:].decode(errors="replace")) is None:
        os.truncate(path, end)
        return
    with add_path_to_errors(path), path.open("ab") as file:
        file.write(b"\n")


class TensorBoard:
    """A TensorBoard event file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._writer: Any = None
        self._last = -1

    def write(self, record: Record) -> None:
        step = record["step"]
        if self._writer is None or step < self._last:
            self.close()
            # TensorBoard no longer shows what an earlier start has written for these steps.
            module: Any = import_module("torch.utils.tensorboard")
            self._writer = module.SummaryWriter(
                str(self.path), purge_step=step, flush_secs=_FLUSH_INTERVAL_S
            )
        self._last = step
        for name, figure in scalars(record):
            self._writer.add_scalar(name, figure, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases:
    """A W&B run, whose files are in `folder`."""

    def __init__(self, project: str, folder: Path, settings: Record) -> None:
        """`settings` are stored as the configuration of the run."""
        self.path = folder
        self._start = {"project": project, "dir": str(folder), "config": dict(settings)}
        self._run: Any = None

    def write(self, record: Record) -> None:
        if self._run is None:
            wandb: Any = import_module("wandb")
            self._run = wandb.init(**self._start, settings=wandb.Settings(silent=True))
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        self._run.log({"step": record["step"], **dict(scalars(record))})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """Yield the values of a record with the names under which TensorBoard and W&B show them, for
    example `train/loss`.
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
    """Passes the record of every N-th step to the writers. Loss, learning rate and gradient norm
    are those of that step; times and rates are means over the steps since the previous record. A
    writer that fails is removed, and the run continues.
    """

    def __init__(
        self, writers: list[MetricsWriter], every: int, warn: Callable[[str], None]
    ) -> None:
        self._writers = writers
        self._every = every
        self._warn = warn
        self._since: list[Record] = []

    def add(self, record: Record) -> None:
        """Process a record of the report file. A record without a step is ignored."""
        if "step_time_s" not in record:
            if "step" in record:
                self._write(record)
            return
        self._since.append(record)
        if record["step"] % self._every == 0:
            self._write(mean_of_steps(self._since))
            self._since = []

    def _write(self, record: Record) -> None:
        finite = {name: _finite_or_none(value) for name, value in record.items()}
        for writer in list(self._writers):
            self._call_writer(writer, partial(writer.write, finite))

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        """Write the remaining steps and close the writers."""
        if self._since:
            self._write(mean_of_steps(self._since))
            self._since = []
        for writer in list(self._writers):
            self._call_writer(writer, writer.close)

    def _call_writer(self, writer: MetricsWriter, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - a service's own errors, and a full disk
            self._writers.remove(writer)
            self._warn(
                f"{type(writer).__name__} writes no more to {_write_error_text(error, writer.path)}"
            )


def _write_error_text(error: Exception, path: Path) -> str:
    """Return, on one line, the file that cannot be written and the reason. The file is `path`
    unless the error names another one.
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or path}: {error.strerror}"
    return " ".join(f"{path}: {type(error).__name__}: {error}".split())


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def mean_of_steps(records: list[Record]) -> dict[str, Any]:
    """Return the last of some consecutive records, with the mean of the step times, and rates
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
    """Folder and interval of the log of a launch."""

    folder: Path
    every: int = 1
    wandb_project: str | None = None

    def check(self, resume: bool) -> None:
        """Raise ConfigurationError if the log cannot be written, or if the folder has the log of
        another run and `resume` is not set. Nothing is written.
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
        """Create the folder and the log in it. W&B stores `run` as the configuration of the run.
        Raise ConfigurationError if the folder cannot be created or the last line of the file cannot
        be completed.
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
