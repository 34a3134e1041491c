"""One operation ready to run: a generated stage of one node, and numbers for its operands."""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from autopipe.backends.torch.emission.stage import emit_stage
from autopipe.backends.torch.runtime.later import WeightGradQueue
from autopipe.backends.torch.runtime.parameters import Arguments, torch_dtype
from autopipe.backends.torch.runtime.random_streams import Random
from autopipe.ir.errors import CodegenError
from autopipe.ir.graph import Constant, DType, Value
from autopipe.ir.layout import mesh_of
from autopipe.ir.measured_costs import Sample
from autopipe.ir.program import Compute, StageCode

_LARGE_BYTES = 2**16
"""Gradients of activations from this size on are freed at once, as in a model, where the next operator's take their
memory."""

Tensors = tuple[torch.Tensor, ...]
Pool = dict[tuple[DType, tuple[int, ...], int | None], torch.Tensor]
"""Numbers by type, shape and limit: operators that follow one another share them."""


@dataclass(frozen=True, slots=True)
class Operand:
    """The numbers of an operand, and whether a gradient is asked for."""

    numbers: torch.Tensor
    wanted: bool
    parameter: bool
    """True if each layer has numbers of its own; the others find theirs in the caches, as in a model, where the
    operator before has just written them.
    """

    def leaf(self) -> torch.Tensor:
        """The numbers as a tensor of its own."""
        tensor = (self.numbers.clone() if self.parameter else self.numbers.detach()).requires_grad_(self.wanted)
        if self.wanted and not self.parameter and tensor.nbytes >= _LARGE_BYTES:
            filler = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand_as(tensor)
            tensor.register_hook(lambda _: filler)
        return tensor


@dataclass(frozen=True, slots=True)
class Runnable:
    """The generated forward of one operation, what it reaches as `p`, and its operands."""

    forward: Callable[..., Tensors]
    place: Arguments
    operands: tuple[Operand, ...]

    @staticmethod
    def of(sample: Sample, device: torch.device, folder: Path, train: bool, pool: Pool) -> Runnable:
        """The sample on a device; the generated file goes to `folder`. Raises CodegenError where it needs a group."""
        stage = _stage_of(sample)
        forward = _generated(emit_stage(stage, "One operator."), folder)
        place = Arguments(device=device, group=None, weight_grads=WeightGradQueue(()), random=Random(device))
        for index, constant in stage.constants:
            setattr(place, f"c{index}", torch.from_numpy(constant.array.copy()).to(device))
        return Runnable(forward, place, _operands(sample, stage, device, train, pool))

    @property
    def trains(self) -> bool:
        """True if there is a backward."""
        return any(each.wanted for each in self.operands)

    def leaves(self) -> Tensors:
        """Operands of its own, as every layer of a model has them."""
        return tuple(each.leaf() for each in self.operands)


def _stage_of(sample: Sample) -> StageCode:
    """The operation as a stage, all of whose operands but known numbers are arguments."""
    operands = [
        (value, array)
        for signature in sample.signatures
        for value, array in zip(signature.operands, signature.constants, strict=True)
        if value is not None
    ]
    written = {value.name for signature in sample.signatures for value in signature.results if value is not None}
    known = {value.name: Constant(value, array) for value, array in operands if array is not None}
    inputs = {value.name: value for value, _ in operands if value.name not in known and value.name not in written}
    devices = math.prod(split.degree for split in sample.splits)
    mesh = mesh_of(sample.splits, devices)
    first, *rest = sample.signatures
    return StageCode(
        stage=0,
        devices=tuple(range(devices)),
        inputs=tuple(inputs.values()),
        outputs=tuple(value for value in sample.signatures[-1].results if value is not None),
        parameters=(),
        constants=tuple(enumerate(known.values())),
        operations=(Compute(0, first, sample.splits, mesh), *(Compute(1, each) for each in rest)),
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


def _operands(sample: Sample, stage: StageCode, device: torch.device, train: bool, pool: Pool) -> tuple[Operand, ...]:
    """Numbers for the stage's inputs."""
    below = dict(sample.below)
    generator = torch.Generator().manual_seed(0)
    found = []
    for value in stage.inputs:
        key = value.dtype, value.shape, below.get(value.name)
        if key not in pool:
            pool[key] = _numbers(value, below.get(value.name), generator).to(device)
        wanted = train and bool(sample.operation.gradients) and value.name in sample.wanted
        found.append(Operand(pool[key], wanted, value.name in sample.parameters))
    return tuple(found)


def _numbers(value: Value, below: int | None, generator: torch.Generator) -> torch.Tensor:
    """Indices below their limit; of all else, numbers for which every operator is defined."""
    dtype = torch_dtype(value.dtype.value)
    if below is not None:
        return torch.randint(below, value.shape, generator=generator).to(dtype)
    if value.dtype.is_floating:
        return (torch.rand(value.shape, generator=generator) + 0.5).to(dtype)
    return torch.ones(value.shape, dtype=dtype)
