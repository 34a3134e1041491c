"""Operators of ONNX Runtime with quantized weights of 2, 4 or 8 bits, in blocks that share a scale.
A byte contains several weights, lowest bits first. A split never divides a byte or a block.
"""

from __future__ import annotations

from autopipe.ir.graph import DType
from autopipe.ir.ops.operator import (
    DimensionWords,
    Operator,
    Signature,
    axis_names,
    per_result,
    space_from_words,
)
from autopipe.ir.space import Space

MICROSOFT_DOMAIN = "com.microsoft."


def bits_per_weight(signature: Signature, default: int = 4) -> int:
    """Return the number of bits per weight. Raise ValueError if it is not 2, 4 or 8."""
    bits = signature.node.integer("bits", default)
    if bits not in (2, 4, 8):
        raise ValueError(f"a weight consists of {bits} bits, expected 2, 4 or 8")
    return bits


def _words_of_blocks(
    signature: Signature, points: int, blocks: int
) -> tuple[str, str, dict[str, int]] | None:
    """Return (words of the blocks, words of the zero points, axis sizes). `points` is the index of
    the zero-point operand.

    Zero points that share a byte are in one axis z and are not split. Return None if the last byte
    of zero points is not full.
    """
    per = 8 // bits_per_weight(signature)
    if (
        not signature.present(points)
        or signature.operand(points).dtype is not DType.UINT8
        or per == 1
    ):
        return "q", "q", {}
    return None if blocks % per else ("z p!", "z", {"p": per})


def matmul_nbits(signature: Signature) -> Space:
    """Return the iteration space `*m (q j), n q r, n q, n q -> *m n`: q blocks of j weights in r
    bytes. With packed zero points, q is (z p): p zero points per byte.
    """
    node = signature.node
    blocks = signature.operand(1).shape[1]
    block = node.integer("block_size")
    inner = signature.operand(0).shape[-1]
    rows = " ".join(axis_names(signature.rank - 1, "m"))
    packed = signature.operand(1).shape[2]
    if block * bits_per_weight(signature) != 8 * packed or not 0 <= block * blocks - inner < block:
        raise ValueError(f"the shape of the weights does not match the block_size {block}")
    words = _words_of_blocks(signature, 3, blocks)
    if words is None or block * blocks != inner or signature.present(4):
        return space_from_words(
            signature, [f"{rows} k!", "n 1 1", "n 1", "n 1", "1"], [f"{rows} n"]
        )
    own, held, extents = words
    q = own.replace("q", "q+").replace("z", "z+")
    operands: list[DimensionWords] = [
        f"{rows} ({q} j!)",
        f"n ({own}) r!",
        f"n ({own})",
        f"n {held}",
    ]
    return space_from_words(signature, operands, [f"{rows} n"], j=block, **extents)


def _matmul_flops(signature: Signature, space: Space) -> float:
    return 2.0 * signature.result().elements * signature.operand(0).shape[-1]


def gather_blocks(signature: Signature) -> Space:
    """Return the iteration space `v (q r), *i, v q, v q -> *i (q j)`. If v is split, a device
    contributes the rows of its shard of the table, and zeros for the others.
    """
    block = signature.node.integer("block_size", 128)
    blocks = signature.operand(2).shape[1]
    width = signature.result().shape[-1]
    words = _words_of_blocks(signature, 3, blocks)
    if words is None or block * blocks != width:
        return space_from_words(signature, ["v& 1", "*i", "v 1", "v 1"], ["*i 1"])
    own, held, extents = words
    places = " ".join(axis_names(len(signature.operand(1).shape), "i"))
    operands: list[DimensionWords] = [f"v& ({own} r!)", places, f"v ({own})", f"v {held}"]
    per_block = signature.operand(0).shape[1] // blocks
    return space_from_words(
        signature, operands, [f"{places} ({own} j!)"], j=block, r=per_block, **extents
    )


OPERATOR_DEFINITIONS = (
    Operator(f"{MICROSOFT_DOMAIN}MatMulNBits", matmul_nbits, "matmul", _matmul_flops),
    Operator(
        f"{MICROSOFT_DOMAIN}GatherBlockQuantized",
        gather_blocks,
        "memory",
        per_result(2.0),
        differentiable=False,
        lookup=True,
    ),
)
