"""All ranks telling one another what came of something, on a process group that nothing else uses.

So it may go on beside a step, on another thread, without its messages getting between those of the step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from threading import current_thread, main_thread
from typing import Any

import torch
import torch.distributed as dist

from autopipe.backends.torch.runtime.heartbeat import Heartbeat
from autopipe.backends.torch.runtime.host import patient_threads
from autopipe.ir.errors import AutopipeError, ConfigurationError, LaunchError


class ControlGroup:
    """The ranks of a world, or the only one."""

    def __init__(self, rank: int, world_size: int, patience_s: float, heartbeat: Heartbeat) -> None:
        """All ranks make it together. Who has not come after `patience_s` seconds is given up."""
        self.rank = rank
        self.world_size = world_size
        self.waits = False
        """True if this rank has come and others have not."""
        self._pulse = heartbeat
        self._group = None
        if world_size > 1:
            with heartbeat.waiting(), patient_threads():
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience_s))

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank."""
        if self.world_size == 1:
            return [data]
        # The pulse is the main thread's: who waits for another thread says so there.
        with self._pulse.waiting() if current_thread() is main_thread() else nullcontext():
            self.waits = True
            found = self._exchanged(data)
            self.waits = False
        return found

    def _exchanged(self, data: bytes) -> list[bytes]:
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
        own = torch.zeros(max(1, *(int(size) for size in sizes)), dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else own[:0]
        parts = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(parts, own, group=self._group)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def together(self, task: str, act: Callable[[], Any]) -> list[Any]:
        """Every rank does its part of a task; what came of each, by rank, as JSON carries it.

        Where a rank's part ends in an AutopipeError, all ranks raise it, the first by rank, as that rank's.
        """
        try:
            outcome = {"done": act()}
        except AutopipeError as error:
            words = {"message": error.message, "hint": error.hint, "where": error.where}
            outcome = {"failed": words | {"exit_code": error.exit_code}}
        outcomes = [json.loads(each) for each in self.gather(json.dumps(outcome).encode())]
        for rank, each in enumerate(outcomes):
            if "failed" in each:
                raise _error(rank, task, each["failed"])
        return [each["done"] for each in outcomes]

    def close(self) -> None:
        """Leave; all ranks together."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def _error(rank: int, task: str, failed: dict[str, Any]) -> AutopipeError:
    if failed["exit_code"] == ConfigurationError.exit_code:
        return ConfigurationError(failed["message"], failed["hint"], failed["where"])
    where = f"rank {rank}, task {task}" + (f": {failed['where']}" if failed["where"] else "")
    return LaunchError(failed["message"], failed["hint"], where)
