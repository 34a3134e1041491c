"""Decompositions of ONNX Runtime's operators whose weights have 4 or 8 bits and a scale per block
(domain com.microsoft): MatMulNBits, MatMulBnb4, GatherBlockQuantized.

MatMulNBits, and GatherBlockQuantized on weights of type uint8, have operator definitions in
`ir.ops` and stay in the graph. MatMulNBits is only changed to fit its definition: scales and zero
points that are vectors are reshaped to matrices, and the bias becomes an Add.
"""

from __future__ import annotations

import numpy as np

from autopipe.ir.graph import DType
from autopipe.passes.frontend.rewriter import FileRewriter

DOMAIN = "com.microsoft"

_FP4 = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 0.5, 2 / 12, 0.25)
"""Magnitudes of bitsandbytes' type FP4, indexed by the lower three bits of a code. The fourth bit
is the sign.
"""
_NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
"""Values of bitsandbytes' type NF4 (Dettmers et al., "QLoRA", 2023), indexed by the 4-bit code."""


def decompose_matmul_nbits(rewriter: FileRewriter) -> None:
    """Decompose a MatMulNBits with a bias, or with scales or zero points that are vectors: write
    the bias as an Add, and reshape these vectors to matrices [rows of the weight, blocks per row].
    A MatMulNBits without any of these is kept.
    """
    rows = rewriter.shape(rewriter.required(1))[0]
    operands = [rewriter.operand(index) for index in range(5)]
    bias = rewriter.operand(5)
    is_vector = [bool(name) and len(rewriter.shape(name)) == 1 for name in operands[2:4]]
    if not bias and not any(is_vector):
        return
    for index, reshaped in enumerate(is_vector, 2):
        if reshaped:
            blocks = rewriter.shape(operands[index])[0] // max(rows, 1)
            operands[index] = rewriter.reshape(operands[index], rows, blocks)
    while not operands[-1]:
        operands.pop()
    output = rewriter.node.outputs[0]
    product = f"{output}/product" if bias else output
    rewriter.repeat(operands, [product])
    if bias:
        rewriter.add("Add", [product, bias], result=0)


def decompose_matmul_bnb4(rewriter: FileRewriter) -> None:
    """Decompose MatMulBnb4 into a dequantisation of the weight and a MatMul.

    Each byte of the weight holds two 4-bit codes. A Gather from a table [256, 2] replaces a byte by
    the values of its codes; that of the upper four bits comes first. The weight is flat and
    consists of blocks; each block is multiplied by its scale, the largest magnitude in the block.
    """
    node = rewriter.node
    rewriter.require(bool(node.integer("transB", 1)), "only a transposed weight is supported")
    codes = _NF4 if node.integer("quant_type", 1) else (*_FP4, *(-each for each in _FP4))
    values = np.array(codes, np.float32)
    table = rewriter.constant(np.stack([np.repeat(values, 16), np.tile(values, 16)], axis=1))
    scales = rewriter.required(2)
    indices = rewriter.cast(rewriter.required(1), DType.INT32)
    weight = rewriter.add("Gather", [table, indices])
    weight = rewriter.cast(weight, rewriter.type_of(scales).dtype)
    blocks = rewriter.shape(scales)[0]
    weight = rewriter.reshape(weight, blocks, node.integer("block_size"))
    weight = rewriter.add("Mul", [weight, rewriter.reshape(scales, blocks, 1)])
    weight = rewriter.reshape(weight, node.integer("N"), node.integer("K"))
    weight = rewriter.transpose(weight, 1, 0)
    rewriter.add("MatMul", [rewriter.required(0), weight], result=0)


def decompose_gather_block_quantized(rewriter: FileRewriter) -> None:
    """Decompose GatherBlockQuantized on 4-bit types: gather slices of the data, the scales and the
    zero points, then dequantise.

    A node that gathers rows of a uint8 matrix is kept, since autopipe computes it itself. Raises
    ValueError for other uint8 data.
    """
    node = rewriter.node
    data = rewriter.type_of(rewriter.required(0))
    indices = rewriter.required(1)
    rank = len(data.shape)
    gather_axis = node.integer("gather_axis", 0) % max(rank, 1)
    block_axis = node.integer("quantize_axis", 1) % max(rank, 1)
    if data.dtype is DType.UINT8:
        if (gather_axis, block_axis, rank) != (0, 1, 2):
            raise ValueError(
                f"uint8 data of rank {rank} with gather_axis {gather_axis} and quantize_axis "
                f"{block_axis} is not supported: expected rank 2, gather_axis 0 and "
                "quantize_axis 1"
            )
        return
    parts = []
    for index in (0, 2, 3):
        if name := rewriter.operand(index):
            if index != 2:
                name = rewriter.cast(name, DType(data.dtype.torch_name))
            parts.append(rewriter.add("Gather", [name, indices], axis=gather_axis))
    if block_axis > gather_axis:
        block_axis += len(rewriter.shape(indices)) - 1
    block_size = node.integer("block_size", 128)
    rewriter.add("DequantizeLinear", parts, result=0, axis=block_axis, block_size=block_size)
