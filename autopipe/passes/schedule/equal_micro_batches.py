"""The demand of most schedulers that a step has one size of micro-batch."""

from __future__ import annotations

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem


def require_equal_micro_batches(scheduler: str, problem: Problem, placement: Placement) -> None:
    """Raise InfeasibleError unless all stages run the problem's micro-batches."""
    for index, stage in enumerate(placement.stages):
        if stage.micro_batch_size != problem.micro_batch_size:
            raise InfeasibleError(
                f"{scheduler} runs all stages on equal micro-batches, but stage {index} has {stage.micro_batch_size} "
                f"samples a micro-batch where the step has {problem.micro_batch_size}",
                hint="schedules kfkb and tessel take stages with micro-batches of their own",
            )
