"""The default solver."""

from __future__ import annotations

from autopipe.passes.solvers.min_sum.answer import Answer
from autopipe.passes.solvers.min_sum.elimination import eliminate
from autopipe.passes.solvers.min_sum.model import MinSum, Number


def solve(model: MinSum, memory_limit: Number | None = None, time_limit: float | None = None) -> Answer:
    """The best choice whose memory is within the limit."""
    answer = eliminate(model)
    if memory_limit is not None and answer.memory > memory_limit:
        raise NotImplementedError
    return answer
