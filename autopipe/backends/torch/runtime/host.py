"""How a rank uses its machine: CPU cores, gloo's threads, memory.

Without pinning, Linux wakes a gloo thread with a received tensor on the core of the sending rank.
There the thread waits behind that rank's computation, for up to one scheduler tick (4 ms). So each
rank and its gloo threads are pinned to separate cores.

On these cores, a woken gloo thread would preempt the rank's main thread, often while the main
thread holds the lock of the connection. The gloo thread would then spin until the next tick. So
gloo threads get a scheduling policy without preemption, and the main thread yields its core after
it has started a transfer. If ranks take turns on a core, the main thread does not yield, because
another rank would run first.

A rank with a GPU is pinned to the cores near the GPU, because copies and launches from other cores
cross between sockets.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from autopipe.backends.torch.runtime.job import parse_number_ranges


@contextmanager
def non_preempting_threads() -> Iterator[None]:
    """Give threads that are started in the block the scheduling policy SCHED_BATCH, under which
    they preempt no other thread. Does nothing on systems other than Linux.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def cores_of_rank(rank: int, ranks: int, processors: Sequence[int]) -> frozenset[int]:
    """Return the cores of one of a machine's ranks: neighbours, divided as evenly as possible. If
    there are more ranks than cores, several ranks get the same core.
    """
    count = len(processors)
    if count < ranks:
        return frozenset((processors[rank % count],))
    return frozenset(processors[rank * count // ranks : (rank + 1) * count // ranks])


def _allowed_cores(process: int = 0) -> set[int]:
    """Return the cores on which a process (0: this one) may run; empty on systems other than
    Linux.
    """
    try:
        return os.sched_getaffinity(process)
    except (AttributeError, OSError):
        return set()


def _is_bound_by_job_manager() -> bool:
    """Return True if this thread may run on other cores than its parent process: a job manager has
    bound it. Also True if the parent's cores are unknown.
    """
    return _allowed_cores() != _allowed_cores(os.getppid())


def pin_to_cores(rank: int, ranks: int) -> None:
    """Pin this thread, and threads that it starts later, to the cores of one of a machine's ranks.
    Does nothing for a single rank, or if a job manager has already bound it.
    """
    if ranks > 1 and (processors := _allowed_cores()) and not _is_bound_by_job_manager():
        os.sched_setaffinity(0, cores_of_rank(rank, ranks, sorted(processors)))


def cores_near_device(bus_id: str, system: Path = Path("/sys")) -> frozenset[int]:
    """Return the cores of the NUMA node of the PCI device with this address; empty if unknown."""
    try:
        node = int((system / "bus/pci/devices" / bus_id / "numa_node").read_text(encoding="ascii"))
        cores = (
            (system / f"devices/system/node/node{node}/cpulist").read_text(encoding="ascii").strip()
        )
    except (OSError, ValueError):
        return frozenset()
    return frozenset(map(int, parse_number_ranges(cores))) if cores else frozenset()


def pin_near_device(bus_id: str, system: Path = Path("/sys")) -> None:
    """Pin this thread, and threads that it starts later, to the cores of a GPU's NUMA node. Memory
    then comes from this node too, because Linux allocates it where a thread first writes it. Does
    nothing if a job manager has already bound the rank, or if none of its cores is near.
    """
    if not _is_bound_by_job_manager() and (
        near := cores_near_device(bus_id, system) & _allowed_cores()
    ):
        os.sched_setaffinity(0, near)


def has_more_ranks_than_cores(ranks: int) -> bool:
    """Return True if this machine runs more ranks than the process that started them has cores."""
    return 0 < len(_allowed_cores(os.getppid())) < ranks


def core_count_of_this_rank() -> int:
    """Return the number of cores that the rank's threads can use without sharing them with other
    ranks.
    """
    if _is_bound_by_job_manager():
        return usable_core_count()
    return max(1, usable_core_count() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def usable_core_count() -> int:
    """Return the number of cores on which this process may run."""
    return len(_allowed_cores()) or os.cpu_count() or 1


_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_KEPT_HEAP_BYTES = 1 << 30
"""Free bytes at the end of the heap that glibc keeps (1 GiB)."""


def keep_freed_memory() -> None:
    """Make glibc keep memory of freed CPU tensors, up to 1 GiB at the end of the heap.

    By default glibc returns large blocks to the system, and gets cleared pages for new ones in the
    next step: the forward of a stage of convolutions took 1.8 times as long. All blocks come from
    the heap, because glibc returns blocks from mmap at once. Allocators of other libraries are not
    affected.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_HEAP_BYTES)
