"""ONNX Runtime's own operators (domain com.microsoft) that exporters and optimisers write."""

from __future__ import annotations

import math
from functools import partial

from autopipe.ir.ops.elementwise import broadcast
from autopipe.ir.ops.lines import marked, names, spell
from autopipe.ir.ops.normalization import layer_norm, moment_statistics, norm_statistics
from autopipe.ir.ops.products import batched
from autopipe.ir.ops.row import NotationLine, Operator, Signature, per_point, per_result


def _fused_matmul(signature: Signature) -> NotationLine:
    """MatMul of factors that may be transposed."""
    node = signature.node
    swapped = [bool(node.integer("transA")), bool(node.integer("transB"))]
    shapes = [signature.operand(index).shape for index in (0, 1)]
    plain = [
        (*shape[:-2], shape[-1], shape[-2]) if swap else shape for shape, swap in zip(shapes, swapped, strict=True)
    ]
    *factors, result = (word.split() for word in batched(plain[0], plain[1], signature.result().shape))
    operands = [[*word[:-2], word[-1], word[-2]] if swap else word for word, swap in zip(factors, swapped, strict=True)]
    return spell(operands, [result])


def _skip_layer_norm(signature: Signature) -> NotationLine:
    """`*b x, *b x, x … -> *b x, *b 1, *b 1, *b x` with x=."""
    words = marked(names(len(signature.operand(0).shape)), [len(signature.operand(0).shape) - 1], "=")
    skip = words[len(words) - len(signature.operand(1).shape) :]
    skip = [word if extent > 1 else "1" for word, extent in zip(skip, signature.operand(1).shape, strict=True)]
    vectors = [None if value is None else [words[-1]] for value in signature.operands[2:]]
    statistics = [*words[:-1], "1"]
    shown = [words, statistics, statistics, words]
    return spell(
        [words, skip, *vectors],
        [None if value is None else shown[index] for index, value in enumerate(signature.results)],
    )


def _rotary_embedding(signature: Signature) -> NotationLine:
    """`b h s d, b s, 1 1, 1 1 -> b h s d`, or `b s (h d)`; where one position starts all, devices count on from it."""
    shape = signature.operand(0).shape
    table = signature.operand(2).shape
    starts = math.prod(signature.operand(1).shape) == 1
    s = "s&" if starts else "s"
    first = ["b", "h", s, "d!"] if len(shape) == 4 else ["b", s, "(h d!)"]
    positions = ["1"] * len(signature.operand(1).shape) if starts else ["b", "s"]
    heads = shape[1] if len(shape) == 4 else signature.node.integer("num_heads") or shape[2] // (2 * table[1])
    line = spell([first, positions, ["1", "1"], ["1", "1"]], [first])
    return NotationLine(line.text, (("h", heads), ("d", shape[3] if len(shape) == 4 else shape[2] // heads)))


CONTRIB = (
    Operator("com.microsoft.Gelu", broadcast, "elementwise", per_result(8.0), 1.0, ("0",)),
    Operator("com.microsoft.QuickGelu", broadcast, "elementwise", per_result(6.0), 1.0, ("0",)),
    Operator("com.microsoft.FastGelu", broadcast, "elementwise", per_result(9.0), 1.0, ("0",)),
    Operator("com.microsoft.BiasGelu", broadcast, "elementwise", per_result(9.0), 1.0, ("0",)),
    Operator("com.microsoft.FusedMatMul", _fused_matmul, "matmul", per_point(2.0), 2.0, ("0", "1"), weights=(0, 1)),
    Operator(
        "com.microsoft.SkipLayerNormalization",
        _skip_layer_norm,
        "normalization",
        per_result(9.0),
        2.0,
        ("0",),
        statistics=partial(moment_statistics, through=(0, 1, 4)),
    ),
    Operator(
        "com.microsoft.SkipSimplifiedLayerNormalization",
        _skip_layer_norm,
        "normalization",
        per_result(6.0),
        2.0,
        ("0",),
        statistics=partial(norm_statistics, through=(0, 1, 3)),
    ),
    Operator("com.microsoft.RotaryEmbedding", _rotary_embedding, "elementwise", per_result(3.0), 1.0, ("1", "2", "3")),
    Operator(
        "SimplifiedLayerNormalization",
        layer_norm,
        "normalization",
        per_result(5.0),
        2.0,
        ("0",),
        statistics=norm_statistics,
    ),
)
