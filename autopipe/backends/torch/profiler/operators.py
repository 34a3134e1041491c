"""What operations take, forward and backward, as generated code runs them: each a stage of one node.

Several are run in turns, all forwards and then all backwards, as in a model: run again and again by itself, an operator
finds its code and its operands in the caches, and small ones take half of what they take in a model.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from autopipe.backends.torch.emission.stage import emit_stage
from autopipe.backends.torch.profiler.watch import Mark, Watch, repeated
from autopipe.backends.torch.runtime.later import Later
from autopipe.backends.torch.runtime.parameters import Arguments, torch_dtype
from autopipe.ir.costs import OperationCost, Sample
from autopipe.ir.errors import CodegenError
from autopipe.ir.graph import Constant, Value
from autopipe.ir.layout import mesh_of
from autopipe.ir.program import Compute, StageCode

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LARGE_BYTES = 2**16
"""Gradients of activations from this size on are freed at once, as in a model, where the next operator uses their
memory again."""

Tensors = tuple[torch.Tensor, ...]


def measure_operations(
    samples: Sequence[Sample], watch: Watch, folder: Path, train: bool, seconds: float
) -> tuple[tuple[OperationCost, ...], tuple[str, ...]]:
    """What each of `samples` took, for at most about `seconds` in all, and why some could not be run by themselves.

    Backward is measured with `train`, where gradients flow. Generated files go to `folder`.
    """
    runnable: list[tuple[Sample, _Operator]] = []
    refused: list[str] = []
    for sample in samples:
        try:
            runnable.append((sample, _operator(sample, watch, folder, train)))
        except CodegenError as error:
            refused.append(error.message)
    if not runnable:
        return (), tuple(refused)
    operators = [operator for _, operator in runnable]
    precision = samples[0].operation.precision
    with _as_run(precision, watch.device):
        timings = repeated(lambda: _in_turns(operators, watch), seconds)
    forward, backward = timings[: len(operators)], timings[len(operators) :]
    found = (
        sample.cost(ahead, back if operator.trains else None)
        for (sample, operator), ahead, back in zip(runnable, forward, backward, strict=True)
    )
    return tuple(found), tuple(refused)


@dataclass(frozen=True, slots=True)
class _Operator:
    """The generated forward of one operator, and its arguments."""

    forward: Callable[..., Tensors]
    place: Arguments
    arguments: Tensors

    @property
    def trains(self) -> bool:
        """Whether there is a backward."""
        return any(each.requires_grad for each in self.arguments)

    def run(self) -> Tensors:
        """The results."""
        return self.forward(self.place, *self.arguments)


def _in_turns(operators: Sequence[_Operator], watch: Watch) -> list[float]:
    """Seconds of every operator's forward, then of every one's backward (0 where there is none)."""
    results: list[Tensors] = []
    marks = [watch.mark()]
    for operator in operators:
        with torch.set_grad_enabled(operator.trains):
            results.append(operator.run())
        marks.append(watch.mark())
    backward = _backwards(results, watch)
    for operator in operators:
        for each in operator.arguments:
            each.grad = None
    return watch.spans(marks) + backward


def _backwards(results: Sequence[Tensors], watch: Watch) -> list[float]:
    """Run all backwards at once. Autograd takes the latest operator first, so each ends where the next one begins."""
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
        if own:
            latest = max((result.grad_fn for result in own if result.grad_fn), key=lambda node: node._sequence_nr())
            latest.register_prehook(begins(index))
    found = [0.0] * len(results)
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(each) for each in ends])
        marks.append(watch.mark())
        for index, seconds in zip(order, watch.spans(marks), strict=True):
            found[index] += seconds
    return found


def _operator(sample: Sample, watch: Watch, folder: Path, train: bool) -> _Operator:
    """The sample ready to run, which has been tried. Raises CodegenError, saying why, where it cannot be."""
    stage = _stage_of(sample)
    forward = _generated(emit_stage(stage, "One operator."), folder)
    operator = _Operator(forward, _place(stage, watch.device), _arguments(sample, stage, watch.device, train))
    try:
        with _as_run(sample.operation.precision, watch.device):
            _in_turns([operator], watch)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CodegenError(f"{sample.operation.operator} does not run by itself: {reason}") from error
    return operator


def _stage_of(sample: Sample) -> StageCode:
    """The operation as a stage, all of whose operands but known numbers are arguments."""
    signature = sample.signature
    known = {
        value.name: Constant(value, array)
        for value, array in zip(signature.operands, signature.constants, strict=True)
        if value is not None and array is not None
    }
    inputs = {value.name: value for value in signature.operands if value is not None and value.name not in known}
    devices = math.prod(split.degree for split in sample.splits)
    return StageCode(
        stage=0,
        devices=tuple(range(devices)),
        inputs=tuple(inputs.values()),
        outputs=tuple(value for value in signature.results if value is not None),
        parameters=(),
        constants=tuple(enumerate(known.values())),
        operations=(Compute(0, signature, sample.splits, mesh_of(sample.splits, devices)),),
    )


def _generated(text: str, folder: Path) -> Callable[..., Tensors]:
    """The forward of a generated file."""
    if "p.group" in text:
        raise CodegenError("a share of this operator needs the other shares")
    name = f"operator_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    forward: Callable[..., Tensors] = module.forward
    return forward


def _place(stage: StageCode, device: torch.device) -> Arguments:
    """What the forward reaches as `p`."""
    place = Arguments(device=device, group=None, later=Later(()))
    for index, constant in stage.constants:
        setattr(place, f"c{index}", torch.from_numpy(constant.array.copy()).to(device))
    return place


def _arguments(sample: Sample, stage: StageCode, device: torch.device, train: bool) -> Tensors:
    """Numbers for the stage's inputs, with gradients where they are wanted."""
    names = sample.signature.node.inputs
    wanted = {names[place] for place in sample.operation.gradients} if train else set()
    below = dict(zip(names, sample.below, strict=True))
    kept = {names[place] for place in sample.parameters}
    generator = torch.Generator().manual_seed(0)
    found = []
    for value in stage.inputs:
        tensor = _numbers(value, below.get(value.name), generator).to(device).requires_grad_(value.name in wanted)
        if tensor.requires_grad and value.name not in kept and tensor.nbytes >= _LARGE_BYTES:
            tensor.register_post_accumulate_grad_hook(_free)
        found.append(tensor)
    return tuple(found)


def _free(tensor: torch.Tensor) -> None:
    tensor.grad = None


def _numbers(value: Value, below: int | None, generator: torch.Generator) -> torch.Tensor:
    """Indices below their limit; of all else, numbers for which every operator is defined."""
    dtype = torch_dtype(value.dtype.value)
    if below is not None:
        return torch.randint(below, value.shape, generator=generator).to(dtype)
    if value.dtype.is_floating:
        return (torch.rand(value.shape, generator=generator) + 0.5).to(dtype)
    return torch.ones(value.shape, dtype=dtype)


@contextlib.contextmanager
def _as_run(precision: str, device: torch.device) -> Iterator[None]:
    """The context in which a rank runs its forwards."""
    dtype = _AUTOCAST.get(precision)
    with contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype):
        yield
