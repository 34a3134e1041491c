"""Seconds in which the host starts a stage's operators one by one: an eager program cannot run
faster than that.

The device waits if the host starts kernels more slowly than the device computes them. So a task
takes the longer of the host's time and the device's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopipe.ir.problem import Work


def host_seconds(work: Sequence[Work], launch_s: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the host's seconds of forward and of backward of each node: its operators times
    `launch_s`.

    An operator is a statement of the generated forward. A view counts, since Python calls it too. A
    bias that its product's statement adds does not. Splitting a node changes nothing: each device's
    host starts the whole operator.
    """
    forward = np.array([each.operators for each in work], dtype=float)
    backward = np.array([each.backward_operators for each in work], dtype=float)
    return forward * launch_s, backward * launch_s
