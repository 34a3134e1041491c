"""How a rank uses its machine: CPU cores, gloo's threads, memory.

Gloo receives tensors on threads. Without pinning, Linux wakes a gloo thread on the core of the rank
that sent the tensor. There the thread waits behind that rank's computation, for up to one scheduler
tick (4 ms). So each rank is pinned, with its gloo threads, to cores that other ranks do not use.

On these cores, a woken gloo thread would preempt the rank's main thread, often while the main
thread holds the lock of the connection. The gloo thread would then spin until the next tick. So
gloo threads get a scheduling policy under which they preempt no thread, and the main thread yields
its core after it has started a transfer. If there are more ranks than cores, the main thread does
not yield, because another rank would run first.

A rank with a GPU is pinned to the cores near the GPU, because copies and kernel launches from other
cores cross between CPU sockets.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from autopipe.backends.torch.runtime.job import parse_number_ranges
from autopipe.ir.cluster import usable_cpu_cores


@contextmanager
def non_preempting_threads() -> Iterator[None]:
    """Give threads that are started in the block the scheduling policy SCHED_BATCH, under which a
    woken thread preempts no other thread. Does nothing on systems other than Linux, or if this
    thread does not have the default policy.
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
    """Return the CPU cores for rank number `rank` of the `ranks` ranks on a machine. `processors`
    are the machine's usable cores in ascending order. They are divided into contiguous parts, as
    evenly as possible. If there are more ranks than cores, a rank gets one core, which it shares
    with other ranks.
    """
    count = len(processors)
    if count < ranks:
        return frozenset((processors[rank % count],))
    return frozenset(processors[rank * count // ranks : (rank + 1) * count // ranks])


def _allowed_cores(process: int = 0) -> set[int]:
    """Return the cores on which the process with id `process` may run; 0 means this process. Empty
    if the system does not say, for example outside of Linux.
    """
    try:
        return os.sched_getaffinity(process)
    except (AttributeError, OSError):
        return set()


def _is_bound_by_job_manager() -> bool:
    """Return True if this thread and its parent process may run on different cores. The reason is
    then that a job manager has bound the rank to cores. Also True if the parent's cores are
    unknown.
    """
    return _allowed_cores() != _allowed_cores(os.getppid())


def pin_to_cores(rank: int, ranks: int) -> None:
    """Pin this thread, and threads that it starts later, to the cores of local rank `rank` of the
    `ranks` ranks on this machine. Does nothing if there is only one rank, or if a job manager has
    already bound this rank to cores.
    """
    if ranks > 1 and (processors := _allowed_cores()) and not _is_bound_by_job_manager():
        os.sched_setaffinity(0, cores_of_rank(rank, ranks, sorted(processors)))


def cores_near_device(bus_id: str, system: Path = Path("/sys")) -> frozenset[int]:
    """Return the cores of the NUMA node of the PCI device `bus_id`, for example `0000:cd:00.0`;
    empty if unknown. `system` is the root of Linux's sysfs.
    """
    try:
        node = int((system / "bus/pci/devices" / bus_id / "numa_node").read_text(encoding="ascii"))
        cores = (
            (system / f"devices/system/node/node{node}/cpulist").read_text(encoding="ascii").strip()
        )
    except (OSError, ValueError):
        return frozenset()
    return frozenset(map(int, parse_number_ranges(cores))) if cores else frozenset()


def pin_near_device(bus_id: str, system: Path = Path("/sys")) -> None:
    """Pin this thread, and threads that it starts later, to the cores of the NUMA node of the GPU
    with the PCI address `bus_id`. Host memory then comes from this node too, because Linux
    allocates a page on the node of the thread that first writes it. Does nothing if a job manager
    has already bound this rank, or if this process may not run on any of these cores.
    """
    if not _is_bound_by_job_manager() and (
        near := cores_near_device(bus_id, system) & _allowed_cores()
    ):
        os.sched_setaffinity(0, near)


def has_more_ranks_than_cores(ranks: int) -> bool:
    """Return True if `ranks`, the number of ranks on this machine, exceeds the number of cores on
    which the parent process may run. False if that number is unknown.
    """
    return 0 < len(_allowed_cores(os.getppid())) < ranks


def core_count_of_this_rank() -> int:
    """Return the number of cores for computations of this rank, at least 1. If a job manager has
    bound the rank to cores, these are all cores on which it may run. Otherwise they are the usable
    cores of the machine, divided by the number of its ranks.
    """
    if _is_bound_by_job_manager():
        return usable_cpu_cores()
    return max(1, usable_cpu_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_KEPT_HEAP_BYTES = 1 << 30
"""Maximum free bytes at the end of the heap that glibc does not return to the system (1 GiB)."""


def keep_freed_memory() -> None:
    """Make glibc keep the memory of freed CPU tensors, up to `_KEPT_HEAP_BYTES` at the end of the
    heap.

    By default glibc returns large blocks to the system, and for new blocks in the next step the
    system must clear pages: the forward of a stage of convolutions took 1.8 times as long. With
    these settings all blocks come from the heap, because glibc returns a block from mmap to the
    system at once when it is freed. Allocators other than glibc's are not affected.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_HEAP_BYTES)
