"""Pooling. Spatial axes stay whole: splitting them needs the neighbours' edges."""

from __future__ import annotations

import math

from autopipe.ir.ops.convolution import spatial
from autopipe.ir.ops.lines import spell
from autopipe.ir.ops.row import Line, Operator, Signature
from autopipe.ir.space import Space


def pool(signature: Signature) -> Line:
    """`n c *i -> n c *o`; where indices into the whole tensor are asked for, it stays whole."""
    rank = len(signature.operand(0).shape) - 2
    lead = "n! c!" if any(value is not None for value in signature.results[1:]) else "n c"
    result = f"{lead} {spatial('o', rank)}"
    results = [result if value is not None else "?" for value in signature.results]
    return Line(f"{lead} {spatial('i', rank)} -> {', '.join(results)}")


def _global_mean(signature: Signature) -> Line:
    return _global(signature, "~")


def _global_whole(signature: Signature) -> Line:
    return _global(signature, "!")


def _global(signature: Signature, mark: str) -> Line:
    rank = len(signature.operand(0).shape) - 2
    return spell([["n", "c", *(f"i{axis}{mark}" for axis in range(rank))]], [["n", "c", *["1"] * rank]])


def _unpool(signature: Signature) -> Line:
    """Indices count in the whole tensor, so nothing is split."""
    rank = len(signature.operand(0).shape) - 2
    source = f"n! c! {spatial('i', rank)}"
    shape = ", 1" if signature.present(2) else ""
    return Line(f"{source}, {source}{shape} -> n c {spatial('o', rank)}")


def _window_flops(signature: Signature, space: Space) -> float:
    return float(signature.result().elements * math.prod(signature.node.integers("kernel_shape")))


def _source_flops(signature: Signature, space: Space) -> float:
    return float(signature.operand(0).elements)


POOLING = (
    Operator("MaxPool", pool, "reduction", _window_flops, 1.0, keeps=("0", ">0")),
    Operator("AveragePool", pool, "reduction", _window_flops, 1.0),
    Operator("LpPool", pool, "reduction", _window_flops, 2.0, keeps=("0", ">0")),
    Operator("GlobalAveragePool", _global_mean, "reduction", _source_flops, 1.0),
    Operator("GlobalMaxPool", _global_whole, "reduction", _source_flops, 1.0, keeps=("0", ">0")),
    Operator("GlobalLpPool", _global_whole, "reduction", _source_flops, 2.0, keeps=("0", ">0")),
    Operator("MaxUnpool", _unpool, "memory", keeps=("1",), static=(2,)),
)
