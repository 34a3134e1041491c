"""Times of a step and its tasks: host clock on a CPU, CUDA events on a GPU, read after the step;
and torch's profiler for some steps of a rank.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from autopipe.backends.torch.runtime.watch.heartbeat import Heartbeat

TimeMark = float | torch.cuda.Event
"""A time: seconds of the host clock, or an event of a CUDA stream."""


def seconds_between(first: TimeMark, second: TimeMark) -> float:
    if isinstance(first, float):
        assert isinstance(second, float)
        return second - first
    assert not isinstance(second, float)
    return float(first.elapsed_time(second)) / 1000.0


@dataclass(frozen=True, slots=True)
class MeasuredSpan:
    """Start and end of a task's computation, in seconds since the start of the step."""

    task: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class LateMessage:
    """Start and end of a task's wait for a received tensor, in seconds since the start of the
    step.
    """

    task: str
    peer: int
    """The sending rank."""
    channel: int
    start: float
    end: float


class StepTimes:
    """Start and end of a step and its tasks on the device. Times may be read after `wait`."""

    def __init__(self, begin: TimeMark, previous: StepTimes | None) -> None:
        self.began = time.time()
        """Start of the step in seconds since 1970, which puts the steps of several ranks on one
        time axis.
        """
        self.begin = self._end = begin
        self._tasks: list[tuple[str, TimeMark, TimeMark]] = []
        self._waits: list[tuple[str, int, int, TimeMark, TimeMark]] = []
        self._previous = previous

    def add(self, task: str, start: TimeMark, end: TimeMark) -> None:
        self._tasks.append((task, start, end))

    def add_wait(self, task: str, peer: int, channel: int, start: TimeMark, end: TimeMark) -> None:
        self._waits.append((task, peer, channel, start, end))

    def end(self, mark: TimeMark) -> None:
        self._end = mark

    def wait(self) -> None:
        """Wait until the device has ended the step. Kernels launched later may still run."""
        if not isinstance(self._end, float):
            self._end.synchronize()
            # The device may begin a step long after the host.
            if self._previous is not None:
                since = seconds_between(self._previous.begin, self.begin)
                self.began = max(self.began, self._previous.began + since)
        self._previous = None

    @property
    def seconds(self) -> float:
        return seconds_between(self.begin, self._end)

    def spans(self) -> list[MeasuredSpan]:
        since = partial(seconds_between, self.begin)
        return [MeasuredSpan(task, since(start), since(end)) for task, start, end in self._tasks]

    def waits(self) -> list[LateMessage]:
        since = partial(seconds_between, self.begin)
        return [
            LateMessage(task, peer, channel, since(start), since(end))
            for task, peer, channel, start, end in self._waits
        ]


class Clock:
    """Records times of the current step. On a GPU these are events, so the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.keeps_waits = False
        """True if waits for received tensors are recorded, which takes two more events per tensor
        on a GPU.
        """
        self.step = StepTimes(0.0, None)

    def mark(self) -> TimeMark:
        """Return the present time; on a GPU, an event on the current stream."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin_step(self) -> None:
        before = self.step if self._cuda and not isinstance(self.step.begin, float) else None
        self.step = StepTimes(self.mark(), before)

    def add(self, task: str, start: TimeMark) -> None:
        """Record a task that started at `start` and ends now."""
        self.step.add(task, start, self.mark())

    @contextmanager
    def waiting(self, task: str, peer: int, channel: int) -> Iterator[None]:
        """Record the block as a wait of a task for a tensor from rank `peer`, if waits are
        recorded.
        """
        if not self.keeps_waits:
            yield
            return
        start = self.mark()
        yield
        self.step.add_wait(task, peer, channel, start, self.mark())

    def end_step(self) -> StepTimes:
        """End the step after all kernels launched so far. Return its times."""
        self.step.end(self.mark())
        return self.step


class StepProfiler:
    """Profiles `steps` with torch's profiler and writes `rank_NNN.json` into `folder`. Does nothing
    if `folder` is None. Changes of the heartbeat's task delimit the tasks in the profile.
    """

    def __init__(
        self,
        steps: range,
        folder: Path | None,
        rank: int,
        device: torch.device,
        heartbeat: Heartbeat,
    ) -> None:
        self._steps = steps
        self._folder = folder
        self._heartbeat = heartbeat
        self._name = f"rank_{rank:03d}.json"
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profiler: profile | None = None
        self._task: record_function | None = None

    def begin_step(self, step: int) -> None:
        if self._folder is None or step not in self._steps:
            return
        if self._profiler is None:
            self._profiler = profile(activities=self._activities)
            self._profiler.start()
        self._heartbeat.on_task = self._mark

    def end_step(self, step: int) -> None:
        """Stop recording tasks; write the profile if the next step is not profiled."""
        self._heartbeat.on_task = None
        self._unmark()
        if step + 1 not in self._steps:
            self.close()

    def close(self) -> None:
        """Write the profile unless it has been written."""
        if self._profiler is None or self._folder is None:
            return
        self._profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._folder / self._name))
        self._profiler = None

    def _mark(self, task: str) -> None:
        """End the current task and begin `task` in the profile."""
        self._unmark()
        self._task = record_function(task)
        self._task.__enter__()

    def _unmark(self) -> None:
        if self._task is not None:
            self._task.__exit__(None, None, None)
            self._task = None
