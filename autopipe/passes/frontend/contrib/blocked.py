"""Operators of ONNX Runtime's domain com.microsoft.nchwc, on images whose channels stand in blocks,
spelled with ONNX's on images whose channels stand in a row: filled up to whole blocks, the weights
put back in order.

A file does not say how large blocks are. ONNX Runtime reads it with those of the machine that it
runs on, and so do we: 16 channels, or 8 where an x86 processor lacks AVX-512.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path

from autopipe.ir.errors import ModelError
from autopipe.ir.words import plural
from autopipe.passes.frontend.contrib.spelling import Spelling

DOMAIN = "com.microsoft.nchwc"


@cache
def block() -> int:
    """Channels of a block on this machine."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return 16
    told = Path("/proc/cpuinfo")
    return 8 if told.exists() and "avx512f" not in told.read_text(encoding="utf-8") else 16


def weight_by_channel(spelling: Spelling) -> str:
    """A convolution's weight, by output channel. It stands in blocks of those, behind the others
    within a block; where the input's channels stand in blocks, too, these come before.
    """
    size = block()
    (out, within, *window) = spelling.shape(1)
    if out % size:
        where = f"{spelling.node.op_type} {spelling.node.name!r}"
        raise ModelError(
            f"its blocks are not of {size} {plural(size, 'channel')}, as this machine's are",
            where=where,
        )
    many = within % size == 0
    parts = (
        [out // size, within // size, *window, size, size]
        if many
        else [out // size, within, *window, size]
    )
    last = len(parts) - 1
    order = [0, last, 1, last - 1] if many else [0, last, 1]
    found = spelling.add(
        "Transpose",
        spelling.shaped(spelling.operand(1), *parts),
        perm=[*order, *range(2, 2 + len(window))],
    )
    return spelling.shaped(found, out, within, *window)


def _reorder_input(spelling: Spelling) -> None:
    shape = spelling.shape(0)
    x = spelling.operand(0)
    if spelling.integer("channels_last"):
        shape, x = (shape[0], shape[-1], *shape[1:-1]), spelling.moved(x, len(shape), last=False)
    if not (more := -shape[1] % block()):
        spelling.add("Identity", x, result=0)
        return
    zeros = spelling.add(
        "Expand",
        spelling.add("Constant", value_float=0.0),
        spelling.integers(shape[0], more, *shape[2:]),
    )
    spelling.add("Concat", x, zeros, axis=1, result=0)


def _reorder_output(spelling: Spelling) -> None:
    last = spelling.integer("channels_last")
    found = spelling.sliced(
        spelling.operand(0), 0, spelling.integer("channels"), 1, result=None if last else 0
    )
    if last:
        spelling.moved(found, len(spelling.shape(0)), last=True, result=0)


def _upsample(spelling: Spelling) -> None:
    attributes = spelling.attributes()
    scales = spelling.add("Constant", value_floats=[float(each) for each in attributes["scales"]])
    mode = spelling.text("mode", "nearest")
    transformed = spelling.text("coordinate_transformation_mode", "asymmetric")
    settings = {
        "mode": mode,
        "coordinate_transformation_mode": transformed,
        "nearest_mode": "floor",
    }
    spelling.add("Resize", spelling.operand(0), "", scales, result=0, **settings)


def _same(spelling: Spelling) -> None:
    spelling.add(spelling.node.op_type, spelling.operand(0), result=0, **spelling.attributes())


BLOCKED: dict[str, Callable[[Spelling], None]] = {
    "ReorderInput": _reorder_input,
    "ReorderOutput": _reorder_output,
    "Upsample": _upsample,
    **dict.fromkeys(("AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool"), _same),
}
"""By operator of the domain, but for its convolution."""
