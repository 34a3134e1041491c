"""That gloo's threads preempt nobody."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SCRIPT = """
import os
import sys
from pathlib import Path
import torch.distributed as dist
from autopipe.backends.torch.runtime.host import non_preempting_threads

before = set(os.listdir("/proc/self/task"))
with non_preempting_threads():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for thread in set(os.listdir("/proc/self/task")) - before:
    print("gloo", os.sched_getscheduler(int(thread)))
print("own", os.sched_getscheduler(0))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux's schedulers")
def test_gloos_threads_are_started_to_preempt_nobody_and_the_ranks_own_stays_as_it_is() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True
    )
    found = sorted({tuple(line.split()) for line in done.stdout.splitlines()})
    assert found == [("gloo", str(os.SCHED_BATCH)), ("own", str(os.SCHED_OTHER))]
