"""Definitions of operators of ONNX Runtime with quantized weights of 2, 4 or 8 bits. With 2 or 4
bits, a byte contains several weights, the first in its lowest bits. Blocks of weights share a
scale. A split never divides a byte or a block.
"""

from __future__ import annotations

from autopipe.ir.graph import DType
from autopipe.ir.ops.operator import (
    DimensionWords,
    Operator,
    Signature,
    axis_names,
    flops_per_result_element,
    space_from_words,
)
from autopipe.ir.space import Space

MICROSOFT_DOMAIN = "com.microsoft."


def bits_per_weight(signature: Signature, default: int = 4) -> int:
    """Return the attribute `bits`, the number of bits per weight (`default` if it is absent). Raise
    ValueError if it is not 2, 4 or 8.
    """
    bits = signature.node.integer("bits", default)
    if bits not in (2, 4, 8):
        raise ValueError(f"a weight consists of {bits} bits, expected 2, 4 or 8")
    return bits


def _words_of_blocks(
    signature: Signature, points: int, blocks: int
) -> tuple[str, str, dict[str, int]] | None:
    """Return (axes of the blocks, axes of the zero points, axis sizes) in the notation of
    `autopipe.ir.space`. `points` is the operand index of the zero points, and `blocks` the number
    of blocks per row.

    If several zero points share a byte, z is the axis of the bytes and p the axis in a byte, which
    is not split. Return None if the last byte of a row is not full; its blocks then cannot be
    split.
    """
    per = 8 // bits_per_weight(signature)
    if (
        not signature.present(points)
        or signature.operand(points).dtype is not DType.UINT8
        or per == 1
    ):
        return "q", "q", {}
    return None if blocks % per else ("z p!", "z", {"p": per})


def matmul_nbits_space(signature: Signature) -> Space:
    """Return the iteration space `*m (q j), n q r, n q, n q -> *m n` (notation:
    `autopipe.ir.space`) of MatMulNBits: q blocks of j weights, stored in r bytes each. With packed
    zero points, q is (z p), with p zero points per byte. The inner dimension cannot be split if it
    is not a multiple of the block size, if its zero points do not fill all bytes, or if the node
    has operand 4 (`g_idx`).
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
    """Return the FLOPs of a MatMulNBits."""
    return 2.0 * signature.result().elements * signature.operand(0).shape[-1]


def gather_blocks_space(signature: Signature) -> Space:
    """Return the iteration space `v (q r), *i, v q, v q -> *i (q j)` (notation:
    `autopipe.ir.space`) of GatherBlockQuantized: a table of v rows with q blocks of j elements,
    stored in r bytes each. If v is split, a device returns the rows of its own shard of the table,
    and zeros for all others; the results are added.
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
    Operator(f"{MICROSOFT_DOMAIN}MatMulNBits", matmul_nbits_space, "matmul", _matmul_flops),
    Operator(
        f"{MICROSOFT_DOMAIN}GatherBlockQuantized",
        gather_blocks_space,
        "memory",
        flops_per_result_element(2.0),
        differentiable=False,
        lookup=True,
    ),
)
