"""Times of a step and its tasks, from the host clock on a CPU and from CUDA events on a GPU; and
torch's profiler for some steps of a rank.

A task is one forward or backward pass, or half of a split backward pass, of one micro-batch on one
stage.
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
"""A point in time: seconds of the host's performance counter, or an event of a CUDA stream."""


def seconds_between(first: TimeMark, second: TimeMark) -> float:
    """Return the seconds from `first` to `second`, which must be of the same kind. Events must have
    been reached by the device.
    """
    if isinstance(first, float):
        assert isinstance(second, float)
        return second - first
    assert not isinstance(second, float)
    return float(first.elapsed_time(second)) / 1000.0


@dataclass(frozen=True, slots=True)
class MeasuredSpan:
    """Start and end of the computation of a task, in seconds since the start of the step."""

    task: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class TensorWait:
    """A wait of a task for a tensor from another rank: start and end in seconds since the start of
    the step. `channel` is the number of the channel.
    """

    task: str
    peer: int
    """The rank that sends the tensor."""
    channel: int
    start: float
    end: float


class StepTimes:
    """Times of a step and its tasks on the device. They may be read after `wait`."""

    def __init__(self, begin: TimeMark, previous: StepTimes | None) -> None:
        """`begin` is the start of the step; `previous` are the times of the previous step on a GPU,
        otherwise None.
        """
        self.began = time.time()
        """Start of the step in seconds since 1970, so that the steps of several ranks can be shown
        on one time axis.
        """
        self.begin = self._end = begin
        self._tasks: list[tuple[str, TimeMark, TimeMark]] = []
        self._waits: list[tuple[str, int, int, TimeMark, TimeMark]] = []
        self._previous = previous

    def add(self, task: str, start: TimeMark, end: TimeMark) -> None:
        """Record a task from `start` to `end`."""
        self._tasks.append((task, start, end))

    def add_wait(self, task: str, peer: int, channel: int, start: TimeMark, end: TimeMark) -> None:
        """Record a wait of a task, from `start` to `end`, for a tensor from rank `peer` on a
        channel.
        """
        self._waits.append((task, peer, channel, start, end))

    def end(self, mark: TimeMark) -> None:
        """Record the end of the step."""
        self._end = mark

    def wait(self) -> None:
        """Wait until the device has reached the end of the step. Kernels launched after the end may
        still run.
        """
        if not isinstance(self._end, float):
            self._end.synchronize()
            # `began` is the time at which the host launched the step. The device may begin the step
            # long after, so the start is corrected by the device time since the start of the
            # previous step.
            if self._previous is not None:
                since = seconds_between(self._previous.begin, self.begin)
                self.began = max(self.began, self._previous.began + since)
        self._previous = None

    @property
    def seconds(self) -> float:
        """Duration of the step in seconds."""
        return seconds_between(self.begin, self._end)

    def spans(self) -> list[MeasuredSpan]:
        """Return the computation times of all tasks, in the order of their recording."""
        since = partial(seconds_between, self.begin)
        return [MeasuredSpan(task, since(start), since(end)) for task, start, end in self._tasks]

    def waits(self) -> list[TensorWait]:
        """Return all waits for tensors from other ranks, in the order of their recording."""
        since = partial(seconds_between, self.begin)
        return [
            TensorWait(task, peer, channel, since(start), since(end))
            for task, peer, channel, start, end in self._waits
        ]


class Clock:
    """Records the times of the current step. On a GPU the times are events in a stream, so the host
    does not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.keeps_waits = False
        """True if waits for tensors from other ranks are recorded. On a GPU this takes two more
        events per tensor.
        """
        self.step = StepTimes(0.0, None)

    def mark(self) -> TimeMark:
        """Return the present time. On a GPU, return an event that the current stream reaches after
        the work launched so far.
        """
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin_step(self) -> None:
        """Start the times of a new step."""
        before = self.step if self._cuda and not isinstance(self.step.begin, float) else None
        self.step = StepTimes(self.mark(), before)

    def add(self, task: str, start: TimeMark) -> None:
        """Record a task from `start` to now."""
        self.step.add(task, start, self.mark())

    @contextmanager
    def record_wait(self, task: str, peer: int, channel: int) -> Iterator[None]:
        """Record the time of the block as a wait of a task for a tensor from rank `peer`, if
        `keeps_waits` is True.
        """
        if not self.keeps_waits:
            yield
            return
        start = self.mark()
        yield
        self.step.add_wait(task, peer, channel, start, self.mark())

    def end_step(self) -> StepTimes:
        """End the current step, after all kernels launched so far, and return its times."""
        self.step.end(self.mark())
        return self.step


class StepProfiler:
    """Profiles the steps `steps` of a rank with torch's profiler, and writes the profile to
    `rank_NNN.json` in `folder`. Does nothing if `folder` is None. The profile contains a range for
    each task, because the heartbeat reports when a task begins.
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
        """Start the profiler before the first profiled step, and the ranges of tasks in each
        profiled step.
        """
        if self._folder is None or step not in self._steps:
            return
        if self._profiler is None:
            self._profiler = profile(activities=self._activities)
            self._profiler.start()
        self._heartbeat.on_task = self._begin_task

    def end_step(self, step: int) -> None:
        """End the range of the last task. Write the profile if the next step is not profiled."""
        self._heartbeat.on_task = None
        self._end_task()
        if step + 1 not in self._steps:
            self.close()

    def close(self) -> None:
        """Write the profile, unless it has been written."""
        if self._profiler is None or self._folder is None:
            return
        self._profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._folder / self._name))
        self._profiler = None

    def _begin_task(self, task: str) -> None:
        """End the range of the current task and begin the range of `task`."""
        self._end_task()
        self._task = record_function(task)
        self._task.__enter__()

    def _end_task(self) -> None:
        """End the range of the current task, if there is one."""
        if self._task is not None:
            self._task.__exit__(None, None, None)
            self._task = None
