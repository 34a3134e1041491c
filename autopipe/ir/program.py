"""What each rank does, as data: the last value before Python text.

A program has two halves. The *what*: for each stage, the operations of its forward on local shards (`StageCode`).
The *when*: for each rank, a list of instructions, loops rolled up (`RankCode`). Backward is autograd's.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.ir.graph import Constant, Parameter, Value
from autopipe.ir.layout import Box
from autopipe.ir.ops.row import Signature
from autopipe.ir.placement import Split


@dataclass(frozen=True, slots=True)
class Compute:
    """One operator on local shards: `signature` holds local shapes."""

    node: int
    signature: Signature
    splits: tuple[Split, ...] = ()


@dataclass(frozen=True, slots=True)
class Collective:
    """An exchange inside a stage's group that turns one layout of a value into another.

    `kind` is `all_reduce` (partial sums → whole), `all_gather` (shards along `dimension` → whole) or `slice` (whole →
    this device's shard; no communication). Each one's backward is its transpose.
    """

    kind: str
    source: Value
    result: Value
    ranks: tuple[int, ...]
    dimension: int = 0
    average: bool = False
    """For `all_reduce`: the parts are means of equal shares."""


Operation = Compute | Collective


@dataclass(frozen=True, slots=True)
class StageCode:
    """The forward of one stage, the same for all devices of its group.

    `inputs` and `outputs` are local values in the order of the function's arguments and results. `parameters` pairs
    the index in the graph's parameters with the local value. `constants` are local too.
    """

    stage: int
    devices: tuple[int, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    parameters: tuple[tuple[int, Value], ...]
    constants: tuple[tuple[int, Constant], ...]
    operations: tuple[Operation, ...]
    recompute: bool = False
