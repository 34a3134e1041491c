"""One rank's part of a node under some splits of its iteration space."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from autopipe.ir.graph import Value
from autopipe.ir.ops.operator import Signature
from autopipe.ir.placement import Split
from autopipe.ir.space import AxisKind, Dimension, Space, Windowed
from tests.conformance.adapter import to_tensor

Words = tuple[Dimension, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of the rank at `position`; splits are outer to inner over the ranks."""

    space: Space
    splits: tuple[Split, ...]
    position: int

    @property
    def places(self) -> dict[str, int]:
        """Which part of each split axis the rank has."""
        rest = self.position
        found = {}
        for split in reversed(self.splits):
            found[split.axis] = rest % split.degree
            rest //= split.degree
        return found

    def signature(
        self, signature: Signature, tensors: dict[str, torch.Tensor]
    ) -> tuple[Signature, dict[str, torch.Tensor]]:
        """Local types, and the operands' shards, named by position: one value may be cut in two
        ways.
        """
        shards = {}
        operands: list[Value | None] = []
        constants: list[np.ndarray | None] = []
        for index, (value, words) in enumerate(
            zip(signature.operands, self.space.operands, strict=True)
        ):
            array = signature.constants[index]
            if value is None or words is None:
                operands.append(None)
                constants.append(None)
                continue
            tensor = to_tensor(array) if array is not None else tensors[value.name]
            for window in self.space.windows_of(index):
                tensor = self._seen(tensor, window)
            shard = self.shard(tensor, words)
            operands.append(Value(f"operand {index}", value.dtype, tuple(shard.shape)))
            constants.append(None if array is None else shard.numpy())
            shards[f"operand {index}"] = shard
        results = tuple(
            None
            if value is None or words is None
            else replace(value, shape=self._local(value.shape, words))
            for value, words in zip(signature.results, self.space.results, strict=True)
        )
        local = replace(
            signature, operands=tuple(operands), constants=tuple(constants), results=results
        )
        return local, shards

    def _seen(self, tensor: torch.Tensor, window: Windowed) -> torch.Tensor:
        """The part of a tensor that this rank's windows see; what they see outside of it is the
        fill.
        """
        if window.axis not in self.places:
            return tensor
        count = window.count // self._degree([window.axis])
        first = self.places[window.axis] * count * window.stride + window.offset
        last = first + (count - 1) * window.stride + window.reach
        extent = tensor.shape[window.dimension]
        shape = list(tensor.shape)
        shape[window.dimension] = 1
        lowest = torch.finfo if tensor.is_floating_point() else torch.iinfo
        border = tensor.new_full(
            shape, window.fill if window.fill == 0 else lowest(tensor.dtype).min
        )
        rows = [
            tensor.narrow(window.dimension, row, 1) if 0 <= row < extent else border
            for row in range(first, last)
        ]
        return torch.cat(rows, window.dimension)

    def shard(self, tensor: torch.Tensor, words: Words) -> torch.Tensor:
        """This rank's part of a tensor."""
        opened = tensor.reshape(self._axes(tensor.shape, words))
        return (
            opened[self._slices(words)]
            .reshape(self._local(tuple(tensor.shape), words))
            .contiguous()
        )

    def put(self, part: torch.Tensor, words: Words, whole: torch.Tensor) -> None:
        """Add what this rank's part of a result is to the whole."""
        place = whole.view(self._axes(whole.shape, words))[self._slices(words)]
        summed = self._summed(words)
        averaged = math.prod(split.degree for split in summed if self._kind(split) is AxisKind.MEAN)
        part = part.reshape(place.shape)
        if summed:
            place += part / averaged if averaged > 1 else part
        else:
            place.copy_(part)

    def shown(self, whole: torch.Tensor, words: Words) -> torch.Tensor | None:
        """What this rank's part of a result must be; None where it is a share that others have
        their own idea of.
        """
        return None if self._summed(words) else self.shard(whole, words)

    def weight(self, words: Words) -> float:
        """What this rank's gradient of a result counts, if the whole's is one: copies have shares
        that differ.
        """
        found = 1.0
        for split in self._absent(words):
            kind = self._kind(split)
            place = self.places[split.axis]
            assert kind.is_joint or kind in (AxisKind.SUM, AxisKind.MEAN), (
                f"{split} indexes but some results"
            )
            if kind is AxisKind.MEAN:
                found /= split.degree
            elif kind is AxisKind.AGREED:
                found *= 2 * (place + 1) / split.degree / (split.degree + 1)
        return found

    def _kind(self, split: Split) -> AxisKind:
        return self.space.axis(split.axis).kind

    def _absent(self, words: Words) -> list[Split]:
        return [
            split
            for split in self.splits
            if not any(split.axis in dimension for dimension in words)
        ]

    def _summed(self, words: Words) -> list[Split]:
        return [split for split in self._absent(words) if self._kind(split) is not AxisKind.AGREED]

    def _degree(self, names: Iterable[str]) -> int:
        return math.prod(split.degree for split in self.splits if split.axis in names)

    def _local(self, shape: tuple[int, ...], words: Words) -> tuple[int, ...]:
        return tuple(
            extent // self._degree(names) for extent, names in zip(shape, words, strict=True)
        )

    def _axes(self, shape: Iterable[int], words: Words) -> tuple[int, ...]:
        """The shape with a dimension for each axis."""
        extents = self.space.axis_sizes()
        found: list[int] = []
        for extent, names in zip(shape, words, strict=True):
            found += [extents[name] for name in names] if names else [extent]
        return tuple(found)

    def _slices(self, words: Words) -> tuple[slice, ...]:
        extents = self.space.axis_sizes()
        found = []
        for names in words:
            for name in names or ("",):
                degree = self._degree([name])
                size = extents.get(name, 0) // degree
                place = self.places.get(name, 0)
                found.append(slice(place * size, (place + 1) * size) if degree > 1 else slice(None))
        return tuple(found)
