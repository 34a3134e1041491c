"""Pooling. Spatial axes can be split: devices read their neighbours' edges."""

from __future__ import annotations

import math

from autopipe.ir.ops.convolution import spatial
from autopipe.ir.ops.lines import spell
from autopipe.ir.ops.reduction import extreme_statistics
from autopipe.ir.ops.row import NotationLine, Operator, Signature
from autopipe.ir.ops.windows import SpatialWindow, window_of
from autopipe.ir.space import Space


def pool(signature: Signature) -> NotationLine:
    """`n c *[o] -> n c *o`, windows of the operand for each o.

    Where indices into the whole tensor are asked for, it stays whole; so does a mean along axes with pads that do not
    count, as its divisor changes towards the edges.
    """
    indexed = any(value is not None for value in signature.results[1:])
    extents = signature.operand(0).shape[2:], signature.result().shape[2:]
    window = window_of(signature.node, signature.node.integers("kernel_shape"), *extents)
    even = _even_divisors(signature, window.needed(*extents), window)
    read, written = zip(
        *(
            window.words(axis, *each, splits=even[axis] and not indexed)
            for axis, each in enumerate(zip(*extents, strict=True))
        ),
        strict=True,
    )
    lead = "n! c!" if indexed else "n c"
    result = f"{lead} {' '.join(written)}"
    results = [result if value is not None else "?" for value in signature.results]
    fill = -math.inf if signature.node.op == "MaxPool" else 0.0
    return NotationLine(f"{lead} {' '.join(read)} -> {', '.join(results)}", fill=fill)


def _even_divisors(signature: Signature, needed: tuple[int, ...], window: SpatialWindow) -> tuple[bool, ...]:
    """For each spatial axis whether all windows count as many elements; `needed` are the pads at the end they reach."""
    if signature.node.op != "AveragePool":
        return (True,) * len(needed)
    counted = bool(signature.node.integer("count_include_pad"))
    return tuple(
        reached <= end if counted else begin == 0 and reached <= 0
        for begin, end, reached in zip(window.begin, window.end, needed, strict=True)
    )


def _global_mean(signature: Signature) -> NotationLine:
    return _global(signature, "~")


def _global_largest(signature: Signature) -> NotationLine:
    return _global(signature, "=" if signature.operand(0).dtype.is_floating else "!")


def _global_whole(signature: Signature) -> NotationLine:
    return _global(signature, "!")


def _global(signature: Signature, mark: str) -> NotationLine:
    rank = len(signature.operand(0).shape) - 2
    return spell([["n", "c", *(f"i{axis}{mark}" for axis in range(rank))]], [["n", "c", *["1"] * rank]])


def _unpool(signature: Signature) -> NotationLine:
    """Indices count in the whole tensor, so nothing is split."""
    rank = len(signature.operand(0).shape) - 2
    source = f"n! c! {spatial('i', rank)}"
    shape = ", 1" if signature.present(2) else ""
    return NotationLine(f"{source}, {source}{shape} -> n c {spatial('o', rank)}")


def _window_flops(signature: Signature, space: Space) -> float:
    return float(signature.result().elements * math.prod(signature.node.integers("kernel_shape")))


def _source_flops(signature: Signature, space: Space) -> float:
    return float(signature.operand(0).elements)


POOLING = (
    Operator("MaxPool", pool, "reduction", _window_flops, 1.0, keeps=("0", "places")),
    Operator("AveragePool", pool, "reduction", _window_flops, 1.0),
    Operator("LpPool", pool, "reduction", _window_flops, 2.0, keeps=("0", ">0")),
    Operator("GlobalAveragePool", _global_mean, "reduction", _source_flops, 1.0),
    Operator(
        "GlobalMaxPool",
        _global_largest,
        "reduction",
        _source_flops,
        1.0,
        keeps=("0", ">0"),
        statistics=extreme_statistics,
    ),
    Operator("GlobalLpPool", _global_whole, "reduction", _source_flops, 2.0, keeps=("0", ">0")),
    Operator("MaxUnpool", _unpool, "memory", keeps=("1",), static=(2,)),
)
