"""The model as a whole, by which what its operators take one by one is set right.

One by one they find operands in the caches, and gradients leave them, otherwise than in the model, where the operator
before has just written what the next one reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autopipe.backends.torch.profiler.operators import TaskStartOverhead
from autopipe.backends.torch.profiler.timed_program import numbers_of
from autopipe.cli.profiling.samples import samples_of
from autopipe.cli.profiling.timed import is_small, write_timed
from autopipe.ir.errors import AutopipeError
from autopipe.ir.graph import Graph
from autopipe.ir.measured_costs import OperationCost, TaskCosts, Timing
from autopipe.ir.problem import Mode
from autopipe.passes.frontend import Model
from autopipe.passes.lower.lower import one_device_program

_MICRO_BATCHES = 4
_MOST = 0.6
"""Part of a task that its start takes at most: starts are measured of larger tasks than the smallest there are."""


@dataclass(frozen=True, slots=True)
class ModelCorrection:
    """How much longer operators take in the model than one by one."""

    forward: float = 1.0
    backward: float = 1.0
    forward_s: float = 0.0
    """Seconds of a forward besides its operators, with the extra of the first ones."""
    backward_s: float = 0.0
    """Seconds of a backward besides its operators."""

    def tasks(self, costs: TaskCosts) -> TaskCosts:
        """Task costs of the model's size."""
        return replace(costs, forward_s=self.forward_s, backward_s=self.backward_s)

    def of(self, cost: OperationCost) -> OperationCost:
        """Cost of the operator in the model."""
        backward = None if cost.backward is None else _times(cost.backward, self.backward)
        return replace(cost, forward=_times(cost.forward, self.forward), backward=backward)


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
    """Run the model for about `seconds` and compare; `costs` are what its operations took, `starts` what the first ones
    of a task take more. Files go to `folder`.

    None where something of it was not measured, or where it is too large or does not run in one process.
    """
    samples = tuple(samples_of(model, precision))
    known = {each.operation: each for each in costs}
    own = [known[sample.operation] for sample in samples if sample.operation in known]
    program = whole_program(model, precision, folder) if len(own) == len(samples) else None
    if program is None:
        return None
    try:
        forward, backward, around_forward, around_backward = numbers_of("whole_worker", program, device, seconds)
    except AutopipeError:
        return None
    if tasks is not None:
        backward -= _adding_seconds(model.graph, tasks)
    first, last = min(starts.forward_s, _MOST * forward), min(starts.backward_s, _MOST * max(0.0, backward))
    backwards = [each.backward for each in own if each.backward is not None]
    return ModelCorrection(
        _ratio(forward - first, [each.forward for each in own]),
        _ratio(backward - last, backwards),
        around_forward + first,
        around_backward + last,
    )


def whole_program(model: Model, precision: str, folder: Path) -> Path | None:
    """Write a one-device program to `folder`; None where that cannot be, or the model is too large.

    It runs some forwards and backwards, one after the other: by itself one would find the caches as the update left
    them.
    """
    if not is_small(model, precision):
        return None
    loss = model.loss if model.mode is Mode.TRAIN else None
    try:
        program = one_device_program(model.graph, _MICRO_BATCHES, model.batch or 1, loss)
        write_timed(model, precision, program, folder)
    except AutopipeError:
        return None
    return folder


def _adding_seconds(graph: Graph, tasks: TaskCosts) -> float:
    """Average seconds of a backward, over a step, for adding its gradients to earlier ones."""
    sizes = [each.value.bytes for each in graph.parameters if each.trainable]
    return (1 - 1 / _MICRO_BATCHES) * tasks.accumulate.seconds(len(sizes), sum(sizes))


def _ratio(whole: float, parts: Sequence[Timing]) -> float:
    total = sum(each.seconds for each in parts)
    return whole / total if total > 0 and whole > 0 else 1.0


def _times(timing: Timing, factor: float) -> Timing:
    return replace(timing, seconds=timing.seconds * factor)
