"""Bytes of a step's exchanges by kind: one definition, for predictions and for counts.

Each device counts every exchange that it takes part in, forwards and backwards; a total is over all devices.

* `all_reduce`: the tensor that is added up, or of which the largest is taken;
* `reduce_scatter`: the tensor that is put in;
* `all_gather`: the tensor that comes out;
* `all_to_all`: the block of which each device sends a part to every other;
* `redistribute`: what arrives from other devices;
* `gradient`: gradients of parameters that are added up over devices, once a step, whole or in shards;
* `parameter`: parameters that are gathered once a step, where each device has updated a shard;
* `send`: what goes to another device's stage, activations and their gradients.

The transpose of an all-gather is a reduce-scatter of as many bytes, and the reverse; all other kinds are their own.
What an operator that is split along a joint axis tells the group counts as what it is. Cutting a copy moves nothing.
Reports, outputs of inference and checkpoints are no part of a step.
"""

from __future__ import annotations

from collections.abc import Mapping

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "redistribute", "gradient", "parameter", "send")
"""In the order in which they are listed."""

_TRANSPOSED = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


def transposed(kind: str) -> str:
    """The kind of the exchange that an exchange's backward is."""
    return _TRANSPOSED.get(kind, kind)


def by_kind(counted: Mapping[str, int]) -> dict[str, int]:
    """All kinds in the order of `KINDS`, 0 where nothing was counted."""
    return {kind: counted.get(kind, 0) for kind in KINDS}
