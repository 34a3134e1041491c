"""Memory that stays with the process from step to step."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGEST_BYTES = 1 << 30, 32 << 20
"""How much free memory is kept, and the largest block in it: glibc takes no more for that."""


def keep_freed_memory() -> None:
    """Let glibc keep what tensors on the CPU free.

    Else it gives large blocks back to the system at every step, and gets them anew, cleared: a stage of convolutions
    took 1.8 times as long forward. Other libraries' allocators are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
