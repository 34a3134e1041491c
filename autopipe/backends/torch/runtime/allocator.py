"""Memory that stays with the process from step to step."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Let glibc keep what tensors on the CPU free, up to a GiB at the heap's end.

    Else it gives large blocks back to the system at every step, and gets them anew, cleared: a stage of convolutions
    took 1.8 times as long forward. Blocks of all sizes come from the heap, since others go back as soon as they are
    freed. Other libraries' allocators are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
