"""Time operators, forward and backward, as generated code runs them.

They run one after the other as often and in the order in which the model has them, all forwards and then all backwards:
run again and again by itself, an operator finds its code and its operands in the caches, and a small one takes half of
its time in a model; run once among all the others, it takes twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from autopipe.backends.torch.profiler.runnable import Pool, Runnable, Tensors
from autopipe.backends.torch.profiler.watch import Mark, Stopwatch, averaged, repeated
from autopipe.backends.torch.runtime.allocator import keep_freed_memory
from autopipe.ir.errors import CodegenError
from autopipe.ir.measured_costs import Operation, OperationCost, Sample

_CHAIN, _CHAIN_S = 64, 0.05
"""Nodes of a backward by which it is measured what noting them takes, and how long for."""
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def measure_operations(
    lap: Sequence[Sample], watch: Stopwatch, folder: Path, train: bool, seconds: float
) -> tuple[tuple[OperationCost, ...], tuple[str, ...]]:
    """Measure the samples of `lap` for at most about `seconds` in all, and say why some could not run.

    `lap` has them as often and in the order in which they run. Backward is measured with `train`, where gradients flow.
    Generated files go to `folder`.
    """
    if watch.device.type == "cpu":
        keep_freed_memory()  # as ranks do
    known: dict[Operation, Runnable] = {}
    pool: Pool = {}
    refused: dict[Operation, str] = {}
    for sample in lap:
        if sample.operation not in known and sample.operation not in refused:
            try:
                known[sample.operation] = _make_runnable(sample, watch, folder, train, pool)
            except CodegenError as error:
                refused[sample.operation] = error.message
    if not known:
        return (), tuple(refused.values())
    run = [sample for sample in lap if sample.operation in known]
    steps = [_Step.of(known[sample.operation]) for sample in run]
    noting = _noting_seconds(watch)
    with _as_run(lap[0].operation.precision, watch.device):
        timings = repeated(lambda: _run(steps, watch, noting), seconds)
    places: dict[Operation, list[int]] = {}
    for place, sample in enumerate(run):
        places.setdefault(sample.operation, []).append(place)
    found = []
    for operation, own in places.items():
        forward, backward = (averaged([timings[first + place] for place in own]) for first in (0, len(run)))
        found.append(run[own[0]].cost(forward, backward if known[operation].trains else None))
    return tuple(found), tuple(refused.values())


@dataclass(frozen=True, slots=True)
class _Step:
    """One operation at one place of a lap."""

    runnable: Runnable
    leaves: Tensors

    @staticmethod
    def of(runnable: Runnable) -> _Step:
        return _Step(runnable, runnable.leaves())


def _run(steps: Sequence[_Step], watch: Stopwatch, noting: float) -> list[float]:
    """Seconds of every step's forward, then of every one's backward (0 where there is none).

    `noting` is what noting the begin of a backward takes.
    """
    results: list[Tensors] = []
    marks = [watch.mark()]
    for step in steps:
        results.append(step.runnable.forward(step.runnable.place, *step.leaves))
        marks.append(watch.mark())
    backward = _backwards(results, [leaf for step in steps for leaf in step.leaves], watch)
    return watch.spans(marks) + [max(0.0, each - noting) for each in backward]


def _backwards(results: Sequence[Tensors], leaves: Sequence[torch.Tensor], watch: Stopwatch) -> list[float]:
    """Run all backwards at once. Autograd takes the latest operator first, so each ends where the next one begins.

    Gradients are asked for rather than added to leaves, which would copy some of them: in a model they go on to the
    next operator.
    """
    marks: list[Mark] = []
    order: list[int] = []
    ends: list[torch.Tensor] = []

    def begins(index: int) -> Callable[[object], None]:
        def note(_: object) -> None:
            order.append(index)
            marks.append(watch.mark())

        return note

    for index, each in enumerate(results):
        own = [result for result in each if result.requires_grad]
        ends += own
        nodes = [result.grad_fn for result in own if result.grad_fn is not None]
        if nodes:
            max(nodes, key=lambda node: node._sequence_nr()).register_prehook(begins(index))
    found = [0.0] * len(results)
    if ends:
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        torch.autograd.grad(ends, wanted, _seeds(ends), allow_unused=True)
        marks.append(watch.mark())
        for index, seconds in zip(order, watch.spans(marks), strict=True):
            found[index] += seconds
    return found


def _noting_seconds(watch: Stopwatch) -> float:
    """Seconds of the Python hook that marks where a backward begins."""
    if watch.device.type != "cpu":
        return 0.0  # The device does not wait for that.

    def run() -> list[float]:
        spans = []
        for noted in (False, True):
            end = torch.ones(8, requires_grad=True)
            seen: list[Mark] = []
            for _ in range(_CHAIN):
                end = -end
                if noted and end.grad_fn is not None:
                    end.grad_fn.register_prehook(lambda _: seen.append(watch.mark()))  # noqa: B023 - called in this turn
            marks = [watch.mark()]
            torch.autograd.backward(end, torch.ones_like(end))
            spans += watch.spans([*marks, watch.mark()])
        return [(spans[1] - spans[0]) / _CHAIN]

    return max(0.0, repeated(run, _CHAIN_S)[0].seconds)


def _seeds(ends: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A gradient for each result, one for all of a kind: in a model the operator behind has just written it."""
    known: dict[tuple[torch.dtype, torch.Size], torch.Tensor] = {}
    for each in ends:
        if (each.dtype, each.shape) not in known:
            known[each.dtype, each.shape] = torch.ones_like(each, memory_format=torch.contiguous_format)
    return [known[each.dtype, each.shape] for each in ends]


def _make_runnable(sample: Sample, watch: Stopwatch, folder: Path, train: bool, pool: Pool) -> Runnable:
    """The sample ready to run, run once. Raises CodegenError, saying why, where it cannot be."""
    runnable = Runnable.of(sample, watch.device, folder, train, pool)
    try:
        with _as_run(sample.operation.precision, watch.device):
            _run([_Step.of(runnable)], watch, 0.0)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CodegenError(f"{sample.operation.operator} does not run by itself: {reason}") from error
    return runnable


@contextlib.contextmanager
def _as_run(precision: str, device: torch.device) -> Iterator[None]:
    """The context in which a rank runs its forwards."""
    dtype = _AUTOCAST.get(precision)
    with contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype):
        yield
