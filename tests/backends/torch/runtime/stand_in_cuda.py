"""A CUDA device that only keeps time: work that it is given takes simulated seconds, and to wait
for it takes the host as long. Its events and streams stand in for torch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class Device:
    """`host` is the host's clock; `busy_until` when the device has done all that it was given."""

    def __init__(self) -> None:
        self.host = 100.0
        self.busy_until = 0.0
        self.drained = 0
        """How often the host waited until the device had nothing left to do."""
        self.entered: list[Stream] = []
        self.pinned: list[tuple[int, ...]] = []
        """Shapes of the tensors made in pinned memory."""
        self.kept_for: list[Stream] = []
        """Streams that use tensors of another stream's memory."""

    def work(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.host) + seconds

    def wait_until(self, moment: float) -> None:
        if moment > self.host:
            self.drained += moment >= self.busy_until
            self.host = moment

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = self

        class BoundEvent(Event):
            def __init__(self, enable_timing: bool = False) -> None:
                super().__init__(device)

        class BoundStream(Stream):
            def __init__(self, *_: object) -> None:
                super().__init__(device)

        @contextlib.contextmanager
        def stream(entered: Stream) -> Iterator[None]:
            device.entered.append(entered)
            yield

        make = torch.empty

        def empty(*shape: Any, pin_memory: bool = False, **form: Any) -> torch.Tensor:
            made = make(*shape, **form)
            if pin_memory:
                device.pinned.append(tuple(made.shape))
            return made

        current = BoundStream()
        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda _, stream: device.kept_for.append(stream)
        )
        monkeypatch.setattr(torch.cuda, "set_device", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "Event", BoundEvent)
        monkeypatch.setattr(torch.cuda, "Stream", BoundStream)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current)
        monkeypatch.setattr(
            torch.cuda, "synchronize", lambda *_: device.wait_until(device.busy_until)
        )
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 0)
        monkeypatch.setattr(
            "autopipe.backends.torch.runtime.watch.clock.time",
            SimpleNamespace(time=lambda: device.host, perf_counter=lambda: device.host),
        )


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.at: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.at = max(self._device.busy_until, self._device.host)

    def synchronize(self) -> None:
        assert self.at is not None, "it was never recorded"
        self._device.wait_until(self.at)

    def elapsed_time(self, other: Event) -> float:
        assert self.at is not None and other.at is not None, "it was never recorded"
        if max(self.at, other.at) > self._device.host:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (other.at - self.at) * 1e3


class Stream:
    def __init__(self, _: Device) -> None:
        self.device = torch.device("cpu")
        self.waited_for: list[object] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)

    def wait_event(self, event: Event) -> None:
        self.waited_for.append(event)
