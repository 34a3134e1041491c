"""Tasks as ranks measured them: what `launch --trace` wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from autopipe.ir.codec import JsonRecord
from autopipe.ir.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class MeasuredTask:
    """A task of one rank in one step, in microseconds from the start of the run."""

    rank: int
    step: int
    name: str
    start: float
    duration: float


def read_measured(path: Path) -> tuple[MeasuredTask, ...]:
    """The tasks in a trace of `launch --trace`, in the file's order. Raises ConfigurationError for any other file."""
    try:
        record = JsonRecord(json.loads(path.read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        hint = "launch --trace FILE writes one"
        raise ConfigurationError("the file is no trace: it is not JSON", hint, str(path)) from error
    found = tuple(_task(event) for event in record.at("traceEvents").items() if event.at("ph").text() == "X")
    if not found:
        raise ConfigurationError("the trace holds no tasks", hint="launch --trace FILE writes them", where=str(path))
    return found


def _task(event: JsonRecord) -> MeasuredTask:
    return MeasuredTask(
        rank=event.at("tid").integer(),
        step=event.at("args").at("step").integer(),
        name=event.at("name").text(),
        start=event.at("ts").number(),
        duration=event.at("dur").number(),
    )
