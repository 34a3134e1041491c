"""How a rank's thread and those in which gloo moves messages share processors.

A thread of gloo's that has something to do for a connection tries its lock, and where another thread holds it asks the
system for the same event again, at once: it spins. Messages between processes of one machine wake it on the processor
of the rank's thread, which it preempts, mostly while that one holds the lock. Both then wait for the system's next
tick, some milliseconds. So gloo's threads shall preempt none, and a rank's thread gives way where it has started an
exchange. Not where ranks take a processor in turn: there another rank would compute for a turn of the system's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def patient_threads() -> Iterator[None]:
    """Threads that are started in the block preempt no others (Linux alone has that): they take over how this one is
    scheduled meanwhile."""
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def give_way() -> None:
    """Let another thread that waits for this one's processor have it."""
    if hasattr(os, "sched_yield"):
        os.sched_yield()
