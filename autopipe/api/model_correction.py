"""Correction of the measured times of operators by a run of the full model.

Times of single operators differ from their times in the model: in the model, an operator finds its
operands in the caches because the previous operator has just written them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autopipe.api.model_programs import write_timed
from autopipe.api.profile_samples import is_small, samples_of
from autopipe.api.synthetic_programs import SHORT_STEP_MICRO_BATCHES
from autopipe.backends.torch.profiler.operators import TaskStartOverhead
from autopipe.backends.torch.profiler.timed_program import measure_in_process
from autopipe.ir.errors import AutopipeError
from autopipe.ir.measured_costs import (
    OperationCost,
    TaskCosts,
    Timing,
)
from autopipe.ir.problem import Mode
from autopipe.passes.frontend import Model
from autopipe.passes.lower.lower import one_device_program

_MAX_START_FRACTION = 0.6
"""Maximum fraction of a task's time that its start overhead takes. Start overheads are measured on
tasks that are larger than the smallest tasks that occur.
"""


@dataclass(frozen=True, slots=True)
class ModelCorrection:
    """Factors by which operators are slower in the model than one by one, and the time of tasks
    besides their operators.
    """

    forward: float = 1.0
    backward: float = 1.0
    forward_s: float = 0.0
    """Seconds of a forward task besides its operators, including the start overhead."""
    backward_s: float = 0.0
    """Seconds of a backward task besides its operators, including the start overhead."""

    def tasks(self, costs: TaskCosts) -> TaskCosts:
        return replace(costs, forward_s=self.forward_s, backward_s=self.backward_s)

    def of(self, cost: OperationCost) -> OperationCost:
        forward = cost.forward
        backward = cost.backward
        if backward is not None:
            backward = replace(backward, seconds=backward.seconds * self.backward)
        return replace(
            cost,
            forward=replace(forward, seconds=forward.seconds * self.forward),
            backward=backward,
        )


def measure_whole(
    model: Model,
    precision: str,
    costs: Iterable[OperationCost],
    tasks: TaskCosts | None,
    starts: TaskStartOverhead,
    device: str,
    folder: Path,
    seconds: float,
) -> ModelCorrection | None:
    """Run the model for about `seconds` and compare its times with the sums of its operators'
    times.

    `costs` are the measured times of its operations and `starts` the start overhead of a task.
    Files go to `folder`. Return None if some operation of the model was not measured, or if the
    model is too large or does not run in one process.
    """
    samples = tuple(samples_of(model, precision))
    known = {each.operation: each for each in costs}
    own = [known[sample.operation] for sample in samples if sample.operation in known]
    if len(own) < len(samples) or not is_small(model, precision):
        return None
    # The program runs several forwards and backwards in sequence. A single forward would find the
    # caches in the state that the update has produced.
    loss = model.loss if model.mode is Mode.TRAIN else None
    try:
        program = one_device_program(model.graph, SHORT_STEP_MICRO_BATCHES, model.batch or 1, loss)
        write_timed(model, precision, program, folder)
        forward, backward, around_forward, around_backward = measure_in_process(
            "whole", folder, device, seconds
        )
    except AutopipeError:
        return None
    if tasks is not None:
        # All backwards of a step except the first add their gradients to earlier gradients. This
        # time is subtracted, because `tasks.accumulate` describes it separately.
        sizes = [each.value.bytes for each in model.graph.parameters if each.trainable]
        backward -= (1 - 1 / SHORT_STEP_MICRO_BATCHES) * tasks.accumulate.seconds(
            len(sizes), sum(sizes)
        )
    first = min(starts.forward_s, _MAX_START_FRACTION * forward)
    last = min(starts.backward_s, _MAX_START_FRACTION * max(0.0, backward))
    return ModelCorrection(
        _slowdown(forward - first, [each.forward for each in own]),
        _slowdown(backward - last, [each.backward for each in own if each.backward is not None]),
        around_forward + first,
        around_backward + last,
    )


def _slowdown(whole: float, parts: Sequence[Timing]) -> float:
    """Return `whole`, in seconds, divided by the sum of the times of its parts; 1 if either is not
    positive.
    """
    total = sum(each.seconds for each in parts)
    return whole / total if total > 0 and whole > 0 else 1.0
