"""Sliding windows of convolution and pooling: how far they reach, how they step, what is padded.

An axis of windows can be split: each device then reads what its windows do, its neighbours' edges and pads included,
and computes without pads of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autopipe.ir.graph import Node


@dataclass(frozen=True, slots=True)
class SpatialWindow:
    """One number for each spatial axis; `begin` and `end` are the pads that the node states or that follow from
    `auto_pad`."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def reach(self) -> tuple[int, ...]:
        """Extent that a window covers, holes counted."""
        return tuple(dilation * (size - 1) + 1 for size, dilation in zip(self.kernel, self.dilations, strict=True))

    @property
    def is_padded(self) -> bool:
        """True if there are pads."""
        return any(self.begin) or any(self.end)

    def inside(self, is_split: Callable[[str], bool]) -> SpatialWindow:
        """Without pads along the axes of windows that are split."""
        pads = [
            tuple(0 if is_split(f"o{axis}") else pad for axis, pad in enumerate(side))
            for side in (self.begin, self.end)
        ]
        return replace(self, begin=pads[0], end=pads[1])

    def words(self, axis: int, source: int, result: int, splits: bool = True) -> tuple[str, str]:
        """How notation spells a spatial axis from extent `source` to `result`, of the operand and of the result."""
        if not splits:
            return f"i{axis}!", f"o{axis}!"
        stride, begin, reach = self.strides[axis], self.begin[axis], self.reach[axis]
        word = f"o{axis}"
        if (stride, begin, reach) == (1, 0, 1) and source == result:
            return word, word
        return f"[{word} {stride} {-begin} {reach}]", word

    def spread(self, source: tuple[int, ...]) -> tuple[int, ...]:
        """Extents of a transposed convolution's whole result, before it is cropped."""
        return tuple(
            (count - 1) * stride + reach for count, stride, reach in zip(source, self.strides, self.reach, strict=True)
        )

    def needed(self, source: tuple[int, ...], result: tuple[int, ...]) -> tuple[int, ...]:
        """Pads at the end with which `result` windows fit exactly (negative where the last elements are not read)."""
        return tuple(
            (count - 1) * stride + reach - extent - begin
            for count, stride, reach, extent, begin in zip(
                result, self.strides, self.reach, source, self.begin, strict=True
            )
        )


def window_of(node: Node, kernel: tuple[int, ...], source: tuple[int, ...], result: tuple[int, ...]) -> SpatialWindow:
    """The window of a convolution or pooling from spatial extents `source` to `result`."""
    rank = len(kernel)
    ones = (1,) * rank
    strides = node.integers("strides") or ones
    dilations = node.integers("dilations") or ones
    policy = node.text("auto_pad", "NOTSET")
    if policy in ("SAME_UPPER", "SAME_LOWER"):
        bare = SpatialWindow(kernel, strides, dilations, (0,) * rank, (0,) * rank)
        totals = [max(total, 0) for total in bare.needed(source, result)]
        small, large = tuple(total // 2 for total in totals), tuple(total - total // 2 for total in totals)
        begin, end = (small, large) if policy == "SAME_UPPER" else (large, small)
        return SpatialWindow(kernel, strides, dilations, begin, end)
    pads = (node.integers("pads") if policy == "NOTSET" else ()) or (0,) * (2 * rank)
    return SpatialWindow(kernel, strides, dilations, pads[:rank], pads[rank:])
