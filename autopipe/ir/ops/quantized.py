"""Weights of a few bits each, in blocks that share a scale, as ONNX Runtime packs them: several in
a byte, low bits first. A byte is never taken apart, nor is a block.
"""

from __future__ import annotations

from autopipe.ir.graph import DType
from autopipe.ir.ops.operator import Operator, Signature, Words, names, notate, per_result
from autopipe.ir.space import Space

DOMAIN = "com.microsoft."


def bits_of(signature: Signature, default: int = 4) -> int:
    """Bits of a weight. Raises ValueError where they do not fill bytes."""
    bits = signature.node.integer("bits", default)
    if bits not in (2, 4, 8):
        raise ValueError(f"{bits} bits")
    return bits


def _blocks(
    signature: Signature, points: int, blocks: int
) -> tuple[str, str, dict[str, int]] | None:
    """Words for the blocks of operand `points`, zero points, and for what holds them, with extents:
    bytes of several zero points stay whole. None where the last byte is not full.
    """
    per = 8 // bits_of(signature)
    if (
        not signature.present(points)
        or signature.operand(points).dtype is not DType.UINT8
        or per == 1
    ):
        return "q", "q", {}
    return None if blocks % per else ("z p!", "z", {"p": per})


def matmul_nbits(signature: Signature) -> Space:
    """`*m (q j), n q r, n q, n q -> *m n`: q blocks of j weights in r bytes; packed zero points
    make q of (z p).
    """
    node = signature.node
    blocks = signature.operand(1).shape[1]
    block = node.integer("block_size")
    inner = signature.operand(0).shape[-1]
    rows = " ".join(names(signature.rank - 1, "m"))
    packed = signature.operand(1).shape[2]
    if block * bits_of(signature) != 8 * packed or not 0 <= block * blocks - inner < block:
        raise ValueError("weights and block_size do not fit")
    words = _blocks(signature, 3, blocks)
    if words is None or block * blocks != inner or signature.present(4):
        return notate(signature, [f"{rows} k!", "n 1 1", "n 1", "n 1", "1"], [f"{rows} n"])
    own, held, extents = words
    q = own.replace("q", "q+").replace("z", "z+")
    operands: list[Words] = [f"{rows} ({q} j!)", f"n ({own}) r!", f"n ({own})", f"n {held}"]
    return notate(signature, operands, [f"{rows} n"], j=block, **extents)


def _product_flops(signature: Signature, space: Space) -> float:
    return 2.0 * signature.result().elements * signature.operand(0).shape[-1]


def gather_blocks(signature: Signature) -> Space:
    """`v (q r), *i, v q, v q -> *i (q j)`; a device with some rows of the table gives those, zeros
    for the others.
    """
    block = signature.node.integer("block_size", 128)
    blocks = signature.operand(2).shape[1]
    width = signature.result().shape[-1]
    words = _blocks(signature, 3, blocks)
    if words is None or block * blocks != width:
        return notate(signature, ["v& 1", "*i", "v 1", "v 1"], ["*i 1"])
    own, held, extents = words
    places = " ".join(names(len(signature.operand(1).shape), "i"))
    operands: list[Words] = [f"v& ({own} r!)", places, f"v ({own})", f"v {held}"]
    per_block = signature.operand(0).shape[1] // blocks
    return notate(signature, operands, [f"{places} ({own} j!)"], j=block, r=per_block, **extents)


ROWS = (
    Operator(f"{DOMAIN}MatMulNBits", matmul_nbits, "matmul", _product_flops),
    Operator(
        f"{DOMAIN}GatherBlockQuantized",
        gather_blocks,
        "memory",
        per_result(2.0),
        differentiable=False,
    ),
)
