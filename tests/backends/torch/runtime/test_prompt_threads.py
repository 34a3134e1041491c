"""Threads started in the block ask for short slices; the thread that starts them is as it was."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading

import pytest

from autopipe.backends.torch.runtime.prompt_threads import prompt_threads

_SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}
_KERNEL = tuple(int("".join(filter(str.isdigit, part))) for part in platform.release().split(".")[:2])


def slice_ns() -> int:
    """This thread's, as the kernel tells it."""
    found = ctypes.create_string_buffer(48)
    ctypes.CDLL(None).syscall(_SCHED_GETATTR[platform.machine()], 0, found, 48, 0)
    slice_ns: int = struct.unpack("IIQiIQQQ", found.raw)[5]
    return slice_ns


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in _SCHED_GETATTR or _KERNEL < (6, 12),
    reason="slices can be asked for since Linux 6.12",
)
def test_slices() -> None:
    before = slice_ns(), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
    found: list[int] = []
    with prompt_threads():
        thread = threading.Thread(target=lambda: found.append(slice_ns()))
        thread.start()
    thread.join()
    assert found == [100_000]
    assert (slice_ns(), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)) == before


def test_nothing_happens_where_the_system_knows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "another")
    with prompt_threads():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
