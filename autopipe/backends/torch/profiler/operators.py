"""Measurement of operators (forward and backward), and of the overhead of a rank's tasks. Operators
run as in generated programs.

A measurement consists of laps, one after the other. A lap runs all operators of a model in the
model's order, each as often as it occurs: first all forwards, then all backwards. The order affects
the caches: a small operator that runs repeatedly in isolation takes half of its time in a model; an
operator that runs only once in a sequence of different operators takes twice that time.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from autopipe.backends.torch.codegen.stage_file import emit_stage
from autopipe.backends.torch.profiler.timed_program import (
    Stopwatch,
    average_timings,
    measure_in_process,
    repeat_timed,
)
from autopipe.backends.torch.runtime.communication.transport import PendingRecv, Transport
from autopipe.backends.torch.runtime.host import keep_freed_memory
from autopipe.backends.torch.runtime.random_numbers.random_streams import RandomStreams
from autopipe.backends.torch.runtime.state.arguments import Arguments
from autopipe.backends.torch.runtime.state.parameters import torch_dtype
from autopipe.backends.torch.runtime.state.running_statistics import RunningStatistics
from autopipe.backends.torch.runtime.step.gradients import GradientReduction
from autopipe.backends.torch.runtime.step.precision import autocast, set_matmul_precision
from autopipe.backends.torch.runtime.step.weight_gradients import WeightGradQueue
from autopipe.backends.torch.runtime.watch.clock import TimeMark
from autopipe.ir.errors import CodegenError
from autopipe.ir.graph import DType, Value
from autopipe.ir.layout import mesh_axes_of
from autopipe.ir.measured_costs import (
    Operation,
    OperationCost,
    OperationSample,
    TaskCosts,
    TensorCosts,
)
from autopipe.ir.program import Bucket, BucketShard, Compute, StageCode

_FREED_GRADIENT_BYTES = 2**16
"""Minimum size, in bytes, of an activation whose gradient is freed at once during a measurement. In
a model, the gradients of the next operator reuse this memory.
"""

Tensors = tuple[torch.Tensor, ...]
TensorPool = dict[tuple[DType, tuple[int, ...], int | None], torch.Tensor]
"""Operand tensors by (type, shape, limit): all values of a tensor are below its limit; None for no
limit. Operators share the tensors, so that a tensor is in the caches as in a model.
"""


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand of a measured operation: its values, and whether its gradient is computed
    (`wanted`).
    """

    numbers: torch.Tensor
    wanted: bool
    parameter: bool
    """True for a parameter. Each use of a parameter gets its own copy, because each layer of a
    model has its own parameters. Other operands share one tensor, so that it is in the caches: in a
    model, the previous operator has just written it.
    """

    def leaf(self) -> torch.Tensor:
        """Return a leaf tensor for one use of the operand. If the gradient of an activation is
        large, a hook replaces it with a small tensor, so that its memory is freed.
        """
        tensor = (self.numbers.clone() if self.parameter else self.numbers.detach()).requires_grad_(
            self.wanted
        )
        if self.wanted and not self.parameter and tensor.nbytes >= _FREED_GRADIENT_BYTES:
            filler = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand_as(tensor)
            tensor.register_hook(lambda _: filler)
        return tensor


@dataclass(frozen=True, slots=True)
class RunnableOperation:
    """A measured operation: its generated forward function, bound to the argument `p` of generated
    functions, and its operands.
    """

    forward: Callable[..., Tensors]
    operands: tuple[Operand, ...]

    @staticmethod
    def of(
        sample: OperationSample, watch: Stopwatch, folder: Path, train: bool, pool: TensorPool
    ) -> RunnableOperation:
        """Generate the code of the operation `sample`, run it once on the device of `watch`, and
        return it. The generated file is written to `folder`; operands come from `pool`. With
        `train`, operands get gradients.

        Raise CodegenError with the reason if the operation fails, or if it communicates in a
        process group.
        """
        known, inputs = sample.operands()
        group = math.prod(split.degree for split in sample.splits)
        first, *rest = sample.signatures
        stage = StageCode(
            stage=0,
            devices=tuple(range(group)),
            inputs=tuple(inputs.values()),
            outputs=tuple(value for value in sample.signatures[-1].results if value is not None),
            parameters=(),
            constants=tuple(enumerate(known.values())),
            operations=(
                Compute(0, first, sample.splits, mesh_axes_of(sample.splits, group)),
                *(Compute(1, each) for each in rest),
            ),
        )
        text = emit_stage(stage, "One operator.").text
        device = watch.device
        if "p.group" in text:
            raise CodegenError("a shard of this operator cannot run without the other shards")
        path = folder / f"operator_{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
        path.write_text(text, encoding="utf-8")
        place = Arguments(
            device=device,
            group=None,
            weight_grads=WeightGradQueue(()),
            random=RandomStreams(device),
            running=RunningStatistics(),
            training=True,
        )
        for index, constant in stage.constants:
            setattr(place, f"c{index}", torch.from_numpy(constant.array.copy()).to(device))
        operands = _make_operands(sample, stage.inputs, device, train, pool)
        runnable = RunnableOperation(partial(runpy.run_path(str(path))["forward"], place), operands)
        try:
            with _forward_context(sample.operation.precision, device):
                _time_lap([runnable.step()], watch, 0.0)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise CodegenError(
                f"operator {sample.operation.operator} cannot run in isolation: {reason}"
            ) from error
        return runnable

    @property
    def trains(self) -> bool:
        """True if the operation has a backward."""
        return any(each.wanted for each in self.operands)

    def step(self) -> tuple[RunnableOperation, Tensors]:
        """Return (this operation, new operand tensors) for one use of the operation in a
        measurement, because each layer of a model has its own operands.
        """
        return self, tuple(each.leaf() for each in self.operands)


def _make_operands(
    sample: OperationSample,
    inputs: Sequence[Value],
    device: torch.device,
    train: bool,
    pool: TensorPool,
) -> tuple[Operand, ...]:
    """Return the operands `inputs` of an operation, with random data on `device`. Tensors are taken
    from `pool`, to which missing ones are added. With `train`, operands get gradients as in the
    model.
    """
    limits = dict(sample.below)
    generator = np.random.default_rng(0)
    found = []
    for value in inputs:
        key = value.dtype, value.shape, limits.get(value.name)
        if key not in pool:
            pool[key] = (
                torch.from_numpy(sample.random_data(value, generator))
                .to(torch_dtype(value.dtype))
                .to(device)
            )
        wanted = train and bool(sample.operation.gradients) and value.name in sample.wanted
        found.append(Operand(pool[key], wanted, value.name in sample.parameters))
    return tuple(found)


_HOOK_CHAIN_LENGTH = 64
"""Number of autograd nodes in the measurement of a hook's overhead. The hook marks the start of a
node's backward.
"""
_HOOK_MEASUREMENT_S = 0.05
"""Seconds that the measurement of a hook's overhead takes."""


def measure_operations(
    lap: Sequence[OperationSample], watch: Stopwatch, folder: Path, train: bool, seconds: float
) -> tuple[tuple[OperationCost, ...], tuple[str, ...]]:
    """Measure the operations of `lap` for about `seconds` in all. Return (costs, reasons): one cost
    per distinct operation, and one message per operation that could not run.

    `lap` lists the operations of the model in order, with repetitions. With `train`, the backward
    of operations with gradients is measured too. Generated files are written to `folder`.
    """
    if watch.device.type == "cpu":
        # The process reuses freed memory, because the ranks of a program do so too and the times
        # must be comparable.
        keep_freed_memory()
    known: dict[Operation, RunnableOperation] = {}
    pool: TensorPool = {}
    refused: dict[Operation, str] = {}
    for sample in lap:
        if sample.operation not in known and sample.operation not in refused:
            try:
                known[sample.operation] = RunnableOperation.of(sample, watch, folder, train, pool)
            except CodegenError as error:
                refused[sample.operation] = error.message
    if not known:
        return (), tuple(refused.values())
    run = [sample for sample in lap if sample.operation in known]
    steps = [known[sample.operation].step() for sample in run]
    noting = _hook_seconds(watch)
    with _forward_context(lap[0].operation.precision, watch.device):
        timings = repeat_timed(lambda: _time_lap(steps, watch, noting), seconds)
    places: dict[Operation, list[int]] = {}
    for place, sample in enumerate(run):
        places.setdefault(sample.operation, []).append(place)
    found = []
    for operation, own in places.items():
        forward, backward = (
            average_timings([timings[first + place] for place in own]) for first in (0, len(run))
        )
        found.append(run[own[0]].cost(forward, backward if known[operation].trains else None))
    return tuple(found), tuple(refused.values())


def _time_lap(
    steps: Sequence[tuple[RunnableOperation, Tensors]], watch: Stopwatch, noting: float
) -> list[float]:
    """Run one lap: the forwards of all `steps`, then their backwards. Return the seconds of each
    forward, then the seconds of each backward (0 if an operation has none). `noting` is the
    overhead, in seconds, of marking the start of a backward; it is subtracted.
    """
    results: list[Tensors] = []
    marks = [watch.mark()]
    for runnable, leaves in steps:
        results.append(runnable.forward(*leaves))
        marks.append(watch.mark())
    backward = _time_backwards(results, [leaf for _, leaves in steps for leaf in leaves], watch)
    return watch.spans(marks) + [max(0.0, each - noting) for each in backward]


def _time_backwards(
    results: Sequence[Tensors], leaves: Sequence[torch.Tensor], watch: Stopwatch
) -> list[float]:
    """Run the backwards of all `results` in one call of autograd and return the seconds of each
    one.

    Autograd runs the backward of the latest operator first, so each backward ends at the start of
    the next one. The call returns the gradients of `leaves` instead of accumulating them, because
    accumulation would copy some of them, whereas a model passes them to the next operator.
    """
    marks: list[TimeMark] = []
    order: list[int] = []
    ends: list[torch.Tensor] = []

    def note(index: int, _: object) -> None:
        order.append(index)
        marks.append(watch.mark())

    for index, each in enumerate(results):
        own = [result for result in each if result.requires_grad]
        ends += own
        nodes = [result.grad_fn for result in own if result.grad_fn is not None]
        if nodes:
            max(nodes, key=lambda node: node._sequence_nr()).register_prehook(partial(note, index))
    found = [0.0] * len(results)
    if ends:
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        # Results of equal type and shape share one incoming gradient, so that the caches contain
        # it. In a model they do too, because the backward of the following operator has just
        # written the gradient.
        kinds = {(each.dtype, each.shape): each for each in ends}
        seeds = {
            kind: torch.ones_like(each, memory_format=torch.contiguous_format)
            for kind, each in kinds.items()
        }
        torch.autograd.grad(
            ends, wanted, [seeds[each.dtype, each.shape] for each in ends], allow_unused=True
        )
        marks.append(watch.mark())
        for index, seconds in zip(order, watch.spans(marks), strict=True):
            found[index] += seconds
    return found


def _hook_seconds(watch: Stopwatch) -> float:
    """Return the seconds that a Python hook of an autograd node takes to mark the start of the
    node's backward; 0 on a GPU, where the hook runs while the device computes.
    """
    if watch.device.type != "cpu":
        # On a GPU, the hook runs on the host while the device computes, so it adds no device time.
        return 0.0

    def run() -> list[float]:
        spans = []
        for noted in (False, True):
            end = torch.ones(8, requires_grad=True)
            seen: list[TimeMark] = []
            for _ in range(_HOOK_CHAIN_LENGTH):
                end = -end
                if noted and end.grad_fn is not None:
                    # The hook may refer to the loop variable `seen`, because backward calls the
                    # hook before the next iteration replaces `seen`.
                    end.grad_fn.register_prehook(lambda _: seen.append(watch.mark()))  # noqa: B023
            spans.append(watch.seconds(partial(torch.autograd.backward, end, torch.ones_like(end))))
        return [(spans[1] - spans[0]) / _HOOK_CHAIN_LENGTH]

    return max(0.0, repeat_timed(run, _HOOK_MEASUREMENT_S)[0].seconds)


def _forward_context(
    precision: str, device: torch.device
) -> contextlib.AbstractContextManager[object]:
    """Return the context in which ranks run forwards: autocast for `precision`. Also set torch's
    matmul precision.
    """
    set_matmul_precision(precision)
    return autocast(precision, device)


_TIMED_TENSORS = 16
_ELEMENTS_PER_TENSOR = (2**8, 2**18)
"""Number of elements of each tensor in two measurements: few elements, for the time per tensor, and
many elements, for the time per byte.
"""
_OPTIMIZERS_BY_STATES: Sequence[Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = (
    lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    torch.optim.AdamW,
)
"""Constructors of optimizers by the number of optimizer states per parameter: 0, 1 and 2."""


@dataclass(frozen=True, slots=True)
class TaskStartOverhead:
    """Additional seconds of the first operators of a task. They are slower because the previous
    task has replaced their code and data in the caches.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0

    def added_to(self, tasks: TaskCosts) -> TaskCosts:
        """Return `tasks` with this overhead added to its times per task."""
        forward = tasks.forward_s + self.forward_s
        backward = tasks.backward_s + self.backward_s
        return replace(tasks, forward_s=forward, backward_s=backward)


def measure_task_start_overhead(
    watch: Stopwatch, short: Path, long: Path, longer: int, seconds: float
) -> TaskStartOverhead:
    """Return the part of a task's operator time that does not depend on the number of its
    operators. `short` and `long` are folders of programs with one stage on one device; `long` has
    `longer` times as many operators as `short`. The measurement takes about `seconds`. Raise
    LaunchError if a program fails.
    """
    few, many = (
        measure_in_process("whole", each, watch.device.type, seconds / 2)[:2]
        for each in (short, long)
    )
    return TaskStartOverhead(
        *(
            max(0.0, (longer * one - all_) / (longer - 1))
            for one, all_ in zip(few, many, strict=True)
        )
    )


def measure_tasks(watch: Stopwatch, program: Path, waiting: int, seconds: float) -> TaskCosts:
    """Return the costs of a step except its operators: of tasks (without `TaskStartOverhead`), of
    optimizer updates, and of accumulating and bucketing gradients.

    `program` is the folder of a program of two equal stages with a few small operators, on one
    device. The backward of its second stage is split, and `waiting` operators of this stage compute
    their weight gradients in the second half. The measurement takes about `seconds`. Raise
    LaunchError if the program fails.
    """
    forward, backward, split, update = measure_in_process(
        "tasks", program, watch.device.type, seconds / 2
    )
    sums, buckets = (
        _fit_tensor_costs(watch, timed, seconds / 16)
        for timed in (_make_accumulation_timer, _make_bucketing_timer)
    )
    updates = tuple(
        _fit_tensor_costs(watch, partial(_make_update_timer, make), seconds / 24)
        for make in _OPTIMIZERS_BY_STATES
    )
    return TaskCosts(forward, backward, split / waiting, update, sums, buckets, updates)


MakeTimedFunction = Callable[[Stopwatch, int], Callable[[], float]]
"""Function of a stopwatch and a number of elements. It returns a function that performs some work
on `_TIMED_TENSORS` tensors with this number of elements each, and returns the seconds of the work.
"""


def _seconds_per_tensor(run: Callable[[], float], seconds: float) -> float:
    """Return the median time in seconds of a call of `run`, divided by the number of its tensors.
    The measurement takes about `seconds`.
    """
    return repeat_timed(lambda: [run()], seconds)[0].seconds / _TIMED_TENSORS


def _fit_tensor_costs(watch: Stopwatch, timed: MakeTimedFunction, seconds: float) -> TensorCosts:
    """Return the time per tensor and per byte of some work. `timed` returns a function that
    performs the work on tensors of a given size and returns its seconds. The result is derived from
    a measurement with small tensors and one with large tensors, which take about `seconds` each.
    """
    runs = (timed(watch, count) for count in _ELEMENTS_PER_TENSOR)
    few, many = (_seconds_per_tensor(run, seconds) for run in runs)
    per_byte = max(0.0, (many - few) / (4 * (_ELEMENTS_PER_TENSOR[1] - _ELEMENTS_PER_TENSOR[0])))
    return TensorCosts(max(0.0, few - 4 * _ELEMENTS_PER_TENSOR[0] * per_byte), per_byte)


def _make_parameters(watch: Stopwatch, count: int) -> list[torch.Tensor]:
    """Return `_TIMED_TENSORS` parameters with `count` elements each."""
    return [
        torch.ones(count, device=watch.device, requires_grad=True) for _ in range(_TIMED_TENSORS)
    ]


def _make_gradients(watch: Stopwatch, count: int) -> list[torch.Tensor]:
    """Return `_TIMED_TENSORS` tensors with `count` elements each, in the role of gradients."""
    return [torch.full((count,), 1e-6, device=watch.device) for _ in range(_TIMED_TENSORS)]


def _make_update_timer(
    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], watch: Stopwatch, count: int
) -> Callable[[], float]:
    """Return a function that runs an optimizer update and the reset of the gradients, as ranks do,
    and returns the seconds. `make` creates the optimizer of parameters with `count` elements each.
    """
    parameters = _make_parameters(watch, count)
    gradients = _make_gradients(watch, count)
    optimizer = make(parameters)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def run() -> float:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        return watch.seconds(update)

    return run


def _make_accumulation_timer(watch: Stopwatch, count: int) -> Callable[[], float]:
    """Return a function that adds the gradients of a micro-batch to accumulated gradients and
    returns the seconds. Each gradient has `count` elements.
    """
    sums = _make_gradients(watch, count)
    gradients = _make_gradients(watch, count)

    def add() -> None:
        for total, gradient in zip(sums, gradients, strict=True):
            total.add_(gradient)

    return partial(watch.seconds, add)


class _SingleRankTransport(Transport):
    """Transport without communication. Its all-reduce returns the tensor unchanged, so that only
    the work around the collective is measured.
    """

    def start_all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> PendingRecv:
        return PendingRecv(None, tensor, tensor.device)


def _make_bucketing_timer(watch: Stopwatch, count: int) -> Callable[[], float]:
    """Return a function that measures gradient bucketing: the seconds by which a backward that
    copies gradients into buckets, reduces them and copies the sums back takes longer than a plain
    backward. Each gradient has `count` elements.
    """
    own = _make_parameters(watch, count)
    shared = _make_parameters(watch, count)
    gradients = _make_gradients(watch, count)
    blocks = tuple(
        BucketShard(index, count, "fp32", 4, (0, 1), 0) for index in range(_TIMED_TENSORS)
    )
    reduction = GradientReduction(
        _SingleRankTransport(watch.device.type),
        dict(enumerate(shared)),
        [Bucket(blocks)],
        shared=False,
    )

    def backward(parameters: Sequence[torch.Tensor]) -> None:
        torch.autograd.backward([each.neg() for each in parameters], gradients)

    def bucketed() -> None:
        reduction.start_during_backward(0, {})
        backward(shared)
        reduction.finish()

    def run() -> float:
        plain = watch.seconds(partial(backward, own))
        more = watch.seconds(bucketed) - plain
        for parameter in (*own, *shared):
            parameter.grad = None
        return max(0.0, more)

    return run
