"""Whether a row's notation is true: a node computed in parts, along each of its axes, gives what the whole gives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import torch

from autopipe.backends.torch.emission.stage import emit_forward
from autopipe.ir.graph import Constant, Graph, Node, Value
from autopipe.ir.ops import signature_of, space_of
from autopipe.ir.ops.row import Signature
from autopipe.ir.placement import Split
from autopipe.ir.program import Compute, StageCode
from autopipe.ir.space import Axis, AxisKind, Dimension, Space
from tests.conformance.adapter import forward_of, to_tensor
from tests.ir.ops.meeting import Member, together

Tensors = tuple[torch.Tensor, ...]
Words = tuple[Dimension, ...] | None


@dataclass(frozen=True, slots=True)
class Use:
    """One node with the numbers of its operands, by name."""

    graph: Graph
    node: Node
    arrays: dict[str, np.ndarray]

    @property
    def space(self) -> Space:
        """The node's iteration space."""
        return space_of(self.graph, self.node)


def divisible_axes(space: Space) -> Iterator[Axis]:
    """Axes that the row says can be split and that are long enough."""
    return (axis for axis in space.axes if axis.kind is not AxisKind.WHOLE and axis.extent > 1)


def smallest_factor(extent: int) -> int:
    """The smallest degree above one that divides an extent."""
    return next(factor for factor in range(2, extent + 1) if extent % factor == 0)


def computed(
    signature: Signature,
    tensors: dict[str, torch.Tensor],
    splits: tuple[Split, ...] = (),
    member: Member | None = None,
) -> Tensors:
    """The node's results from emitted text, as a member of a group where it is one."""
    constants = [
        Constant(value, array)
        for value, array in zip(signature.operands, signature.constants, strict=True)
        if value is not None and array is not None
    ]
    constants = list({each.value.name: each for each in constants}.values())
    known = {each.value.name for each in constants}
    inputs = {value.name: value for value in signature.operands if value is not None and value.name not in known}
    outputs = tuple(value for value in signature.results if value is not None)
    stage = StageCode(
        stage=0,
        devices=(0,),
        inputs=tuple(inputs.values()),
        outputs=outputs,
        parameters=(),
        constants=tuple(enumerate(constants)),
        operations=(Compute(0, signature, splits),),
    )
    held = {f"c{index}": to_tensor(each.array) for index, each in enumerate(constants)}
    place = SimpleNamespace(device=torch.device("cpu"), group=member, **held)
    results: Tensors = forward_of(emit_forward(stage))(place, *(tensors[name] for name in inputs))
    for value, result in zip(outputs, results, strict=True):
        assert tuple(result.shape) == value.shape
    return results


def check(use: Use, rtol: float = 1e-5, atol: float = 1e-6) -> int:
    """Assert that every split that the notation allows is true; returns the number of axes checked."""
    signature = signature_of(use.graph, use.node)
    space = use.space
    tensors = {name: to_tensor(array) for name, array in use.arrays.items()}
    whole = computed(signature, tensors)
    axes = list(divisible_axes(space))
    for axis in axes:
        found = _in_parts(signature, space, axis, tensors)
        for left, right in zip(found, whole, strict=True):
            where = f"split along {axis.name} of {space}"
            torch.testing.assert_close(left, right, rtol=rtol, atol=atol, equal_nan=True, msg=where)
    return len(axes)


def _in_parts(signature: Signature, space: Space, axis: Axis, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    degree = smallest_factor(axis.extent)

    def computed_part(member: Member) -> Tensors:
        local, shards = _Cut(space, axis, degree, member.position).signature(signature, tensors)
        return computed(local, shards, (Split(axis.name, degree),), member)

    parts = together([computed_part] * degree)
    words = [each for each, value in zip(space.results, signature.results, strict=True) if value is not None]
    return [_joined([part[index] for part in parts], word, space, axis) for index, word in enumerate(words)]


def _joined(parts: Sequence[torch.Tensor], words: Words, space: Space, axis: Axis) -> torch.Tensor:
    assert words is not None
    place = next((index for index, dimension in enumerate(words) if axis.name in dimension), None)
    if place is None:
        reduced = axis.kind in (AxisKind.SUM, AxisKind.MEAN, AxisKind.JOINT)
        assert reduced, f"{axis} indexes one result of {space} and not another"
        total = torch.stack(list(parts)).sum(0)
        return (total / len(parts) if axis.kind is AxisKind.MEAN else total).to(parts[0].dtype)
    dimension = words[place]
    outer, _ = _around(dimension, space, axis)
    opened = [part.unflatten(place, (outer, -1)) for part in parts]
    return torch.cat(opened, dim=place + 1).flatten(place, place + 1)


def _around(dimension: Dimension, space: Space, axis: Axis) -> tuple[int, int]:
    """Products of the extents outside and inside an axis of a merged dimension."""
    extents, at = space.extents(), dimension.index(axis.name)
    return math.prod(extents[name] for name in dimension[:at]), math.prod(extents[name] for name in dimension[at + 1 :])


@dataclass(frozen=True, slots=True)
class _Cut:
    """One of `degree` equal parts of an axis."""

    space: Space
    axis: Axis
    degree: int
    part: int

    def signature(
        self, signature: Signature, tensors: dict[str, torch.Tensor]
    ) -> tuple[Signature, dict[str, torch.Tensor]]:
        """Local types, and the operands' shards, named by position: one value may be cut in two ways."""
        shards = {}
        operands: list[Value | None] = []
        constants: list[np.ndarray | None] = []
        for index, (value, words) in enumerate(zip(signature.operands, self.space.operands, strict=True)):
            array = signature.constants[index]
            if value is None:
                operands.append(None)
                constants.append(None)
                continue
            shard = self.shard(to_tensor(array) if array is not None else tensors[value.name], words)
            operands.append(Value(f"operand {index}", value.dtype, tuple(shard.shape)))
            constants.append(None if array is None else shard.numpy())
            shards[f"operand {index}"] = shard
        results = tuple(
            None if value is None else replace(value, shape=self.shape(value.shape, words))
            for value, words in zip(signature.results, self.space.results, strict=True)
        )
        local = replace(signature, operands=tuple(operands), constants=tuple(constants), results=results)
        return local, shards

    def shard(self, tensor: torch.Tensor, words: Words) -> torch.Tensor:
        """This part of an operand."""
        assert words is not None
        for place, dimension in enumerate(words):
            if self.axis.name in dimension:
                outer, inner = _around(dimension, self.space, self.axis)
                size = self.axis.extent // self.degree
                opened = tensor.unflatten(place, (outer, self.axis.extent, inner))
                tensor = opened.narrow(place + 1, self.part * size, size).flatten(place, place + 2)
        return tensor.contiguous()

    def shape(self, shape: tuple[int, ...], words: Words) -> tuple[int, ...]:
        """The shape of this part of a result."""
        assert words is not None
        return tuple(
            extent // self.degree if self.axis.name in dimension else extent
            for extent, dimension in zip(shape, words, strict=True)
        )
