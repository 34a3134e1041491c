"""Time of a rank's step besides its operators: starting tasks, adding up gradients, copying them to buckets, updating
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from autopipe.backends.torch.profiler.bucketing import bucketing_seconds
from autopipe.backends.torch.profiler.watch import Stopwatch, repeated
from autopipe.backends.torch.profiler.worker import numbers_of
from autopipe.ir.measured_costs import TaskCosts, TensorCosts

_TENSORS = 16
_ELEMENTS = (2**8, 2**18)
"""Of each of the tensors: few, so that what a tensor takes shows, and many, so that a byte's share does."""
_OPTIMIZERS: Sequence[Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = (
    lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    torch.optim.AdamW,
)
"""By the number of states."""


@dataclass(frozen=True, slots=True)
class TaskStartOverhead:
    """How much longer a task's first operators take, in seconds: they find neither their code nor their data in the
    caches after those of another task."""

    forward_s: float = 0.0
    backward_s: float = 0.0

    def added_to(self, tasks: TaskCosts) -> TaskCosts:
        """Task costs with this overhead added."""
        forward, backward = tasks.forward_s + self.forward_s, tasks.backward_s + self.backward_s
        return replace(tasks, forward_s=forward, backward_s=backward)


def measure_starts(watch: Stopwatch, short: Path, long: Path, longer: int, seconds: float) -> TaskStartOverhead:
    """Measure the constant part of a task's operator time.

    The programs have one stage each on one device; `long` has `longer` times the operators of `short`. Raises
    LaunchError where one does not run.
    """
    few, many = (numbers_of("whole_worker", each, watch.device.type, seconds / 2)[:2] for each in (short, long))
    return TaskStartOverhead(
        *(max(0.0, (longer * one - all_) / (longer - 1)) for one, all_ in zip(few, many, strict=True))
    )


def measure_tasks(watch: Stopwatch, program: Path, waiting: int, seconds: float) -> TaskCosts:
    """Measure tasks without their start overhead, updates, and adding up gradients.

    `program` is a one-device program of two equal stages of a few small operators; the backward of the second is split,
    and `waiting` of its operators defer their weight gradients. Raises LaunchError where it does not run.
    """
    forward, backward, split, update = numbers_of("task_worker", program, watch.device.type, seconds / 2)
    sums, buckets = _accumulations(watch, seconds / 8), _bucketing(watch, seconds / 8)
    updates = _updates(watch, seconds / 4)
    return TaskCosts(forward, backward, split / waiting, update, sums, buckets, updates)


def _updates(watch: Stopwatch, seconds: float) -> tuple[TensorCosts, ...]:
    """Updates of optimizers without states, with one and with two, as a rank makes them, with what it does to the
    gradients."""
    return tuple(_by_tensor(partial(_update, watch, make, seconds / 6)) for make in _OPTIMIZERS)


def _accumulations(watch: Stopwatch, seconds: float) -> TensorCosts:
    """Adding a micro-batch's gradients to those before."""
    return _by_tensor(partial(_accumulation, watch, seconds / 2))


def _bucketing(watch: Stopwatch, seconds: float) -> TensorCosts:
    """Putting gradients into a bucket and having them back."""
    return _by_tensor(partial(bucketing_seconds, watch, seconds / 2, _TENSORS))


def _by_tensor(measure: Callable[[int], float]) -> TensorCosts:
    """From tensors of few and of many elements."""
    few, many = (measure(count) / _TENSORS for count in _ELEMENTS)
    per_byte = max(0.0, (many - few) / (4 * (_ELEMENTS[1] - _ELEMENTS[0])))
    return TensorCosts(max(0.0, few - 4 * _ELEMENTS[0] * per_byte), per_byte)


def _update(
    watch: Stopwatch, make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], seconds: float, count: int
) -> float:
    parameters = [torch.ones(count, device=watch.device, requires_grad=True) for _ in range(_TENSORS)]
    gradients = [torch.full((count,), 1e-6, device=watch.device) for _ in range(_TENSORS)]
    optimizer = make(parameters)

    def run() -> list[float]:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        marks = [watch.mark()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return watch.spans([*marks, watch.mark()])

    return repeated(run, seconds)[0].seconds


def _accumulation(watch: Stopwatch, seconds: float, count: int) -> float:
    sums = [torch.zeros(count, device=watch.device) for _ in range(_TENSORS)]
    gradients = [torch.full((count,), 1e-6, device=watch.device) for _ in range(_TENSORS)]

    def run() -> list[float]:
        start = watch.mark()
        for total, gradient in zip(sums, gradients, strict=True):
            total.add_(gradient)
        return watch.spans([start, watch.mark()])

    return repeated(run, seconds)[0].seconds
