"""True if memory can decide anything."""

from __future__ import annotations

from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.cost.memory import static_memory
from autopipe.passes.cost.stages import stage_costs

_MARGIN = 2
"""Times as much as one device needs for all: with more of them, buffers of messages and of collectives come on top."""


def may_be_short(problem: Problem) -> bool:
    """True if there may be a placement that a device's memory does not hold.

    There is none where each device has room for the whole model and all that a step keeps of its batch, with a margin.
    """
    placement = Placement((Stage(tuple(range(len(problem.graph.nodes))), (0,), problem.micro_batch_size),))
    (cost,) = stage_costs(problem, placement)
    kept = cost.kept_bytes * (problem.micro_batches if problem.train else 1)
    need = static_memory(problem, placement)[0] + cost.buffer_bytes + kept + cost.transient_bytes
    return _MARGIN * need > min(map(problem.memory_of, range(problem.cluster.size)))
