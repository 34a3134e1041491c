"""A step's time is what the device took, and is read without the device running out of work."""

from __future__ import annotations

import pytest
import torch

from autopipe.backends.torch.runtime.watch.clock import Clock
from tests.backends.torch.runtime.stand_in_cuda import Device


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    made.install(monkeypatch)
    return made


def launch(clock: Clock, device: Device, seconds: float) -> None:
    """One task that the host launches in a millisecond."""
    clock.begin_step()
    start = clock.mark()
    device.host += 1e-3
    device.work(seconds)
    clock.add("0F0", start)
    clock.end_step()


def test_a_step_takes_what_the_device_takes(device: Device) -> None:
    clock = Clock(torch.device("cuda"))
    launch(clock, device, 0.5)
    with pytest.raises(RuntimeError, match="must be completed"):
        assert clock.step.seconds
    clock.step.wait()
    assert clock.step.seconds == pytest.approx(0.501)
    (span,) = clock.step.spans()
    assert (span.task, span.start, span.end) == ("0F0", 0.0, pytest.approx(0.501))


def test_to_wait_for_a_step_leaves_the_next_one_running(device: Device) -> None:
    clock = Clock(torch.device("cuda"))
    launch(clock, device, 0.5)
    first = clock.step
    launch(clock, device, 0.25)
    second = clock.step
    first.wait()
    assert not device.drained and device.busy_until - device.host == pytest.approx(0.25)
    second.wait()
    assert device.drained == 1 and second.seconds == pytest.approx(0.25)


def test_a_step_began_when_the_device_began_it(device: Device) -> None:
    clock = Clock(torch.device("cuda"))
    began = device.host
    times = []
    for _ in range(3):
        launch(clock, device, 0.5)
        times.append(clock.step)
    for each in times:
        each.wait()
    assert [each.began - began for each in times] == pytest.approx([0, 0.501, 1.001])
    device.host += 60
    launch(clock, device, 0.5)
    clock.step.wait()
    assert clock.step.began - began == pytest.approx(61.501), "the device waited for the host"
