"""Threads that carry messages, run as soon as there is something to carry.

Gloo moves messages in threads of its own. Where ranks keep all cores busy, Linux lets such a thread wait until the
running one has used up its slice, a millisecond or more, and a rank waits with it. Since 6.12 a thread that asks for a
shorter slice than the running one's need not wait for that; it gets no larger share of the core.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SLICE_NS = 100_000
"""The shortest there is."""
_SYSTEM_CALL = {"x86_64": 314, "aarch64": 274}
"""Number of sched_setattr, by processor."""
_ATTRIBUTES = "IIQiIQQQ"
"""Of `struct sched_attr`: size, policy, flags, nice, priority, runtime (here the slice), deadline, period."""


@contextmanager
def prompt_threads() -> Iterator[None]:
    """Threads that are started within ask for short slices; nothing else changes where the system knows none."""
    _ask_for(_SLICE_NS)
    try:
        yield
    finally:
        _ask_for(0)


def _ask_for(slice_ns: int) -> None:
    """The slice of this thread and of those that it starts from now on; 0 for the usual one."""
    number = _SYSTEM_CALL.get(platform.machine())
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)  # It is set along with the slice.
    size = struct.calcsize(_ATTRIBUTES)
    attributes = struct.pack(_ATTRIBUTES, size, os.SCHED_OTHER, 0, nice, 0, slice_ns, 0, 0)
    ctypes.CDLL(None).syscall(number, 0, ctypes.create_string_buffer(attributes, size), 0)
