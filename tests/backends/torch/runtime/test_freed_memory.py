"""That freed memory stays with a rank's process."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest

_SCRIPT = """
import resource
import torch
from autopipe.backends.torch.runtime.host import keep_freed_memory

keep_freed_memory()
for step in range(16):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for megabytes in (1, 24, 48, 96):
        torch.ones(megabytes * 2**18)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_blocks_of_any_size_are_asked_of_the_system_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True
    )
    # Where the heap begins is drawn at random: blocks may take a few steps to find the places that
    # they then keep.
    faults = [int(line) for line in done.stdout.split()]
    pages = 96 * 2**20 // resource.getpagesize()
    assert faults[0] >= pages
    assert max(faults[8:]) < pages / 100
