"""Regions of images, pooled."""

from __future__ import annotations

from autopipe.ir.ops.row import Operator, notated, per_result

REGIONS = (
    Operator(
        "RoiAlign",
        notated("n! c i0! i1!, r 1, r -> r c o0! o1!"),
        "memory",
        per_result(16.0),
        2.0,
        keeps=("0", "1", "2"),
    ),
)
"""Regions are independent of one another; the images they lie in are looked up."""
