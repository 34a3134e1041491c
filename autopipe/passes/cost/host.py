"""The seconds that the host needs to start the operators of a stage one by one.

In an eager program the device waits if the host starts kernels more slowly than the device computes
them. The time of a task is therefore the maximum of the host's and the device's time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopipe.ir.problem import NodeCost


def host_seconds(work: Sequence[NodeCost], launch_s: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (forward, backward): for each node, the seconds in which the host starts the operators
    of its forward and of its backward. One operator takes `launch_s` seconds.

    An operator is a statement of the generated forward, and a view is one because its Python call
    takes time. The addition of a bias does not count if the call of its matmul includes it. Splits
    of nodes do not change the result, because the host of each device starts all operators.
    """
    forward = np.array([each.operators for each in work], dtype=float)
    backward = np.array([each.backward_operators for each in work], dtype=float)
    return forward * launch_s, backward * launch_s
