"""torch's profiler over some steps of a rank: a Chrome trace of its operators, kernels and tasks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from autopipe.backends.torch.runtime.heartbeat import Heartbeat


class StepProfiler:
    """Profiles `steps`, if any, and writes `rank_000.json` into `folder`. Tasks are marked by the heartbeat."""

    def __init__(
        self, steps: range, folder: Path | None, rank: int, device: torch.device, heartbeat: Heartbeat
    ) -> None:
        self._steps, self._folder, self._heartbeat = steps, folder, heartbeat
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
        """Write the trace after the last step."""
        self._heartbeat.on_task = None
        self._unmark()
        if step + 1 not in self._steps:
            self.close()

    def close(self) -> None:
        """Write what has been profiled, if it has not been written."""
        if self._profiler is None or self._folder is None:
            return
        self._profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._folder / self._name))
        self._profiler = None

    def _mark(self, task: str) -> None:
        """A task begins, and the one before has ended."""
        self._unmark()
        self._task = record_function(task)
        self._task.__enter__()

    def _unmark(self) -> None:
        if self._task is not None:
            self._task.__exit__(None, None, None)
            self._task = None
