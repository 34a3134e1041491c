"""Decompositions of operators of ONNX Runtime's domain com.microsoft.nchwc into standard ONNX
operators.

Images of this domain store channels in blocks: [batch, blocks, …, channels of a block]. The
decomposed nodes compute on plain images [batch, channels, …], whose channels are padded to a
multiple of the block size, and on weights in the plain order.

The file does not contain the block size: ONNX Runtime uses the block size of the machine that it
runs on, and so does `block_size`.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path

from autopipe.ir.graph import DType
from autopipe.passes.frontend.decompositions.quantized import (
    move_channels_first,
    move_channels_last,
)
from autopipe.passes.frontend.rewriter import FileRewriter

DOMAIN = "com.microsoft.nchwc"


@cache
def block_size() -> int:
    """Return the number of channels per block that ONNX Runtime uses on this machine: 8 on x86
    processors for which Linux reports no AVX-512, 16 on all others.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return 16
    cpu_info = Path("/proc/cpuinfo")
    lacks_avx512 = cpu_info.exists() and "avx512f" not in cpu_info.read_text(encoding="utf-8")
    return 8 if lacks_avx512 else 16


def restore_weight_layout(rewriter: FileRewriter) -> str:
    """Return the name of the weight of a convolution (operand 1) in the layout [output channels,
    input channels, …].

    The file declares that shape, but stores blocks: [output blocks, input channels, …, output
    channels of a block]. If the number of input channels is a multiple of the block size, the file
    stores [output blocks, input blocks, …, input channels of a block, output channels of a block]
    instead. Raises ModelError if the number of output channels is not a multiple of the block size.
    """
    size = block_size()
    (outputs, inputs, *window) = rewriter.shape(rewriter.required(1))
    rewriter.require(
        outputs % size == 0,
        f"the number of output channels, {outputs}, is not a multiple of this machine's block "
        f"size, {size}",
    )
    if inputs % size == 0:
        blocks = [outputs // size, inputs // size, *window, size, size]
        order = [0, len(blocks) - 1, 1, len(blocks) - 2]
    else:
        blocks = [outputs // size, inputs, *window, size]
        order = [0, len(blocks) - 1, 1]
    split = rewriter.reshape(rewriter.required(1), *blocks)
    ordered = rewriter.transpose(split, *order, *range(2, 2 + len(window)))
    return rewriter.reshape(ordered, outputs, inputs, *window)


def _decompose_reorder_input(rewriter: FileRewriter) -> None:
    """Decompose ReorderInput: pad the channels with zeros to a multiple of the block size. The
    result is [batch, channels, …], also if the operand has its channels last.
    """
    x = rewriter.required(0)
    if rewriter.node.integer("channels_last"):
        x = move_channels_first(rewriter, x)
    batch, channels, *window = rewriter.shape(x)
    missing = -channels % block_size()
    if not missing:
        rewriter.add("Identity", [x], result=0)
        return
    zeros = rewriter.expand(rewriter.number(0.0, DType.FLOAT32), batch, missing, *window)
    rewriter.add("Concat", [x, zeros], axis=1, result=0)


def _decompose_reorder_output(rewriter: FileRewriter) -> None:
    """Decompose ReorderOutput: remove the padded channels, and move the channels last if the node
    has channels_last=1.
    """
    bounds = {1: (0, rewriter.node.integer("channels"))}
    if not rewriter.node.integer("channels_last"):
        rewriter.slice(rewriter.required(0), bounds, result=0)
        return
    plain = rewriter.slice(rewriter.required(0), bounds)
    move_channels_last(rewriter, plain, result=0)


def _decompose_upsample(rewriter: FileRewriter) -> None:
    """Decompose Upsample into Resize with the node's scales, by default nearest-neighbour."""
    node = rewriter.node
    scales = [float(each) for each in node.integers("scales")]
    rewriter.add(
        "Resize",
        [rewriter.required(0), "", rewriter.floats(*scales)],
        result=0,
        mode=node.text("mode", "nearest"),
        coordinate_transformation_mode=node.text("coordinate_transformation_mode", "asymmetric"),
        nearest_mode="floor",
    )


def _write_same_operator(rewriter: FileRewriter) -> None:
    """Write the standard ONNX operator that has the name of the replaced node's operator, with
    equal attributes. It reads plain images, for which it computes equal numbers.
    """
    rewriter.add(rewriter.node.op, [rewriter.required(0)], result=0, **rewriter.attributes())


NCHWC: dict[str, Callable[[FileRewriter], None]] = {
    "ReorderInput": _decompose_reorder_input,
    "ReorderOutput": _decompose_reorder_output,
    "Upsample": _decompose_upsample,
    **dict.fromkeys(
        ("AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool"), _write_same_operator
    ),
}
"""Decompositions of domain com.microsoft.nchwc, by operator, without Conv, which `fused_operators`
decomposes.
"""
