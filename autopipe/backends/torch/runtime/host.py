"""How a rank uses its machine: processors, threads of gloo's, memory.

Left to itself the system wakes a thread of gloo's that has a message for one rank on the processor
of the rank that sent it, behind what that one computes: a tick of up to four milliseconds. So each
rank keeps to processors of its own, gloo's threads with it. There such a thread preempts the rank's
own, mostly while that one holds the connection's lock, and spins until the next tick. So gloo's
threads preempt none, and a rank's thread gives way where it has started an exchange; not where
ranks take a processor in turn, since another rank would compute first.

A rank with a GPU keeps to the processors next to it, as copies and launches from elsewhere cross
between sockets.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from autopipe.backends.torch.runtime.job import numbers_of


@contextmanager
def patient_threads() -> Iterator[None]:
    """Threads that are started in the block preempt no others (Linux alone has that): they take
    over how this one is scheduled meanwhile.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def processors_of(rank: int, ranks: int, processors: Sequence[int]) -> frozenset[int]:
    """Cores of one of a machine's ranks: neighbours, in shares as equal as can be."""
    count = len(processors)
    if count < ranks:
        return frozenset((processors[rank % count],))
    return frozenset(processors[rank * count // ranks : (rank + 1) * count // ranks])


def _allowed(process: int = 0) -> set[int]:
    """Processors on which a process (0: this one) may run; empty where the system, other than
    Linux, does not tell.
    """
    try:
        return os.sched_getaffinity(process)
    except (AttributeError, OSError):
        return set()


def _has_own() -> bool:
    """True if this thread may not run wherever its parent may, since job managers bind what they
    start; also where the system does not tell of a parent.
    """
    return _allowed() != _allowed(os.getppid())


def pin_to_cores(rank: int, ranks: int) -> None:
    """Keep this thread, and those that it starts from now on, to the processors of one of a
    machine's ranks. Nothing changes for a rank alone, nor where who started it has given it
    processors of its own.
    """
    if ranks > 1 and (processors := _allowed()) and not _has_own():
        os.sched_setaffinity(0, processors_of(rank, ranks, sorted(processors)))


def processors_near(bus_id: str, system: Path = Path("/sys")) -> frozenset[int]:
    """Processors of the NUMA node where the device with this PCI address is; none where the system
    does not tell.
    """
    try:
        node = int((system / "bus/pci/devices" / bus_id / "numa_node").read_text(encoding="ascii"))
        cores = (
            (system / f"devices/system/node/node{node}/cpulist").read_text(encoding="ascii").strip()
        )
    except (OSError, ValueError):
        return frozenset()
    return frozenset(map(int, numbers_of(cores))) if cores else frozenset()


def pin_near(bus_id: str, system: Path = Path("/sys")) -> None:
    """Keep this thread, and those that it starts from now on, to the processors of a GPU's NUMA
    node. Memory is then of that node, too: Linux takes it where the thread runs that first writes
    there. Nothing changes where who started this rank has given it processors of its own, nor where
    none of its processors are near.
    """
    if not _has_own() and (near := processors_near(bus_id, system) & _allowed()):
        os.sched_setaffinity(0, near)


def has_more_ranks_than_cores(ranks: int) -> bool:
    """True if this machine runs more ranks than the process that started them has processors."""
    return 0 < len(_allowed(os.getppid())) < ranks


def processors_of_this_rank() -> int:
    """Processors that the rank's threads can be sure of."""
    if _has_own():
        return processor_count()
    return max(1, processor_count() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def processor_count() -> int:
    return len(_allowed()) or os.cpu_count() or 1


_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Let glibc keep what tensors on the CPU free, up to a GiB at the heap's end.

    Else it gives large blocks back to the system at every step, and gets them anew, cleared: a
    stage of convolutions took 1.8 times as long forward. Blocks of all sizes come from the heap,
    since others go back as soon as they are freed. Other libraries' allocators are left as they
    are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
