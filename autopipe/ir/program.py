"""Instructions of each rank, as data: the last value before Python text.

A program has two halves. The *what*: for each stage, the operations of its forward on local shards (`StageCode`). The
*when*: for each rank, a list of instructions, loops rolled up (`RankCode`). Backward is autograd's.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autopipe.ir.batch import Samples
from autopipe.ir.graph import Constant, Parameter, Value
from autopipe.ir.layout import Box, MeshAxes, merged
from autopipe.ir.ops.row import Signature
from autopipe.ir.placement import Split
from autopipe.ir.relayout import Relayout
from autopipe.ir.turn import EVERY, MicroBatchSlice


@dataclass(frozen=True, slots=True)
class Compute:
    """One operator on local shards: `signature` holds local shapes.

    `mesh` has the axis of the group's mesh that each split lies along; `joint` has the sets of split axes over
    which the operator itself asks for a group: see `Call.group`. `samples` says where samples are counted in what a
    random operator draws.
    """

    node: int
    signature: Signature
    splits: tuple[Split, ...] = ()
    mesh: MeshAxes = ()
    joint: tuple[tuple[str, ...], ...] = ()
    samples: Samples | None = None

    def mesh_of(self, axes: Iterable[str]) -> MeshAxes:
        """The axes of the mesh over which the node is split along `axes`."""
        wanted = frozenset(axes)
        return merged(place for split, place in zip(self.splits, self.mesh, strict=True) if split.axis in wanted)

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the values it reads."""
        return tuple(value.name for value in self.signature.operands if value is not None)

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of the values it writes."""
        return tuple(value.name for value in self.signature.results if value is not None)


@dataclass(frozen=True, slots=True)
class Collective:
    """A change of a value's layout inside a stage's group; its backward is the transpose.

    `source` and `result` are one device's blocks before and after.
    """

    source: Value
    result: Value
    relayout: Relayout

    @property
    def kind(self) -> str:
        """Kind of the change of layout: see `Relayout`."""
        return self.relayout.kind

    @property
    def reads(self) -> tuple[str, ...]:
        """Name of the value it reads."""
        return (self.source.name,)

    @property
    def writes(self) -> tuple[str, ...]:
        """Name of the value it writes."""
        return (self.result.name,)


Operation = Compute | Collective


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes of a stage that recomputes, which run again together."""

    nodes: tuple[int, ...]
    flowing: frozenset[str]
    """Local names of results that gradients come back to. A segment that gives none of them does not run again."""


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
    pipeline: int = 0
    """Of the placement's pipelines the one it belongs to."""
    turns: int = 1
    """Micro-batches that it makes of each of the program's, of samples in equal number."""
    deferred: tuple[int, ...] = ()
    """Nodes whose parameters' gradients are left to the second half of a split backward."""
    segments: tuple[Segment, ...] = ()
    """Where it recomputes and the program trains: its nodes in the order in which they run."""

    def by_segment(self) -> tuple[tuple[Operation, ...], ...]:
        """The operations of each segment, of all where there are none; an exchange goes with what is computed next."""
        segment_of = {node: number for number, segment in enumerate(self.segments) for node in segment.nodes}
        groups: list[list[Operation]] = [[] for _ in self.segments or (None,)]
        number = 0
        waiting: list[Operation] = []
        for operation in self.operations:
            waiting.append(operation)
            if isinstance(operation, Compute):
                number = max(number, segment_of.get(operation.node, 0))
                groups[number] += waiting
                waiting = []
        groups[-1] += waiting
        return tuple(map(tuple, groups))


@dataclass(frozen=True, slots=True)
class MessageBlock:
    """A block of a tensor that one rank sends to another when a task is done.

    `channel` numbers the pieces of a program: messages of one channel arrive in the order in which they are sent.
    `sent` is the block of `tensor` in coordinates of the sender's local one, `received` of the receiver's.
    `needs_gradient` says that its gradient travels the same way back. Where the stages' micro-batches are unequal, it
    is sent after those of `source_turn` and needed by those of `target_turn`.
    """

    channel: int
    tensor: str
    source_stage: int
    target_stage: int
    source_rank: int
    target_rank: int
    sent: Box
    received: Box
    needs_gradient: bool
    source_turn: MicroBatchSlice = EVERY
    target_turn: MicroBatchSlice = EVERY


@dataclass(frozen=True, slots=True)
class Channel:
    """Messages from one rank to another: one block of each micro-batch of its slice, and its gradient back.

    `buffers` and `gradient_buffers` are how many messages the target, and of gradients the source, holds at once.
    """

    number: int
    source_rank: int
    target_rank: int
    buffers: int
    gradient_buffers: int


@dataclass(frozen=True, slots=True)
class DataInput:
    """A block of a graph input that a rank reads for one micro-batch of one stage."""

    tensor: str
    box: Box


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's block of a parameter, and the ranks whose gradients for the same block add up to its gradient.

    `home` is the one stage that uses the block, where there is one and all of those ranks run it: its last backward
    completes the gradient on all of them.
    """

    parameter: int
    box: Box
    gradient_ranks: tuple[int, ...]
    home: int | None


class Verb(enum.Enum):
    """Action of one line of a rank's program, for one stage and one micro-batch.

    `input_gradient` and `weight_gradient` are the two halves of a backward that is split.
    """

    RECEIVE = "receive"
    FORWARD = "forward"
    SEND = "send"
    RECEIVE_GRADIENT = "receive_gradient"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input_gradient"
    WEIGHT_GRADIENT = "weight_gradient"
    SEND_GRADIENT = "send_gradient"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One verb on one stage and micro-batch. `receive` posts, `forward` and `backward` wait, `send` returns at once.

    A receive is of what one stage, `source`, sends; of what all stages send where it is None.
    """

    verb: Verb
    stage: int
    micro_batch: int
    source: int | None = None

    def shifted(self, distance: int) -> Instruction:
        """The same on a micro-batch `distance` further."""
        return replace(self, micro_batch=self.micro_batch + distance)


@dataclass(frozen=True, slots=True)
class Loop:
    """`body`, `count` times, each time on micro-batches `stride` further.

    Where stages with micro-batches of different sizes take part, `strides` says it for each instruction of the body.
    """

    body: tuple[Instruction, ...]
    count: int
    stride: int = 1
    strides: tuple[int, ...] = ()


Section = tuple["Instruction | Loop", ...]


@dataclass(frozen=True, slots=True)
class StageOnRank:
    """How one stage is wired on one rank: what it reads of the batch, receives and sends."""

    stage: int
    data: tuple[DataInput, ...]
    receives: tuple[MessageBlock, ...]
    sends: tuple[MessageBlock, ...]


@dataclass(frozen=True, slots=True)
class RankCode:
    """One rank's program: its stages, its parameter shards, and its step in three sections."""

    rank: int
    stages: tuple[StageOnRank, ...]
    shards: tuple[Shard, ...]
    warm_up: Section
    repetend: Section
    cool_down: Section


@dataclass(frozen=True, slots=True)
class OutputShard:
    """Where a block of a graph's output lies when a stage's forward is done."""

    rank: int
    box: Box


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """The stage that gives an output, the blocks that make it up, and how they combine.

    `combine` is `concat` where the blocks are parts (or copies) of the value, and `sum` where the value is the sum of
    all ranks' blocks, divided by `copies`. `copies` ranks have each part.
    """

    stage: int
    shards: tuple[OutputShard, ...]
    combine: str
    copies: int


@dataclass(frozen=True, slots=True)
class Output:
    """A value of a micro-batch of the stage that gives it, and where each pipeline has it."""

    value: Value
    places: tuple[OutputPlace, ...]
    """One a pipeline."""
    batch_axis: int | None
    """The axis that counts samples, along which micro-batches are concatenated; None where they are averaged."""


@dataclass(frozen=True, slots=True)
class InputBounds:
    """Whole numbers in [`least`, `below`) for a block of an input of one micro-batch, of all samples."""

    least: int
    below: int
    starts: tuple[int, ...]
    stops: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InputRange:
    """What the numbers of a graph input must keep to: rows of tables and classes, by where they are used."""

    value: Value
    batch_axis: int | None
    below: int | None
    """Random data: whole numbers in [0, `below`), or any real number."""
    drawn: tuple[InputBounds, ...] = ()
    """Blocks of random data that have bounds of their own."""
    allowed: tuple[InputBounds, ...] = ()
    """Blocks for which other numbers are refused."""
    ignored: int | None = None
    """The label that is allowed besides: its position counts for nothing."""


@dataclass(frozen=True, slots=True)
class Program:
    """Everything that code is generated from, for steps of `micro_batches` times `micro_batch_size` samples."""

    world_size: int
    train: bool
    micro_batches: int
    micro_batch_size: int
    loss: str | None
    parameters: tuple[Parameter, ...]
    inputs: tuple[InputRange, ...]
    outputs: tuple[Output, ...]
    stages: tuple[StageCode, ...]
    ranks: tuple[RankCode, ...]
    channels: tuple[Channel, ...]
    """Channels between different ranks, by number."""
    shard: bool = False
    """True if ranks that hold the same block of a parameter update a share of it each, and gather it again: see
    `Optimizer.shard`.
    """

    def micro_batches_of(self, stage: int) -> range:
        """The micro-batches that a stage runs in a step: m runs on pipeline m mod their number."""
        code = self.stages[stage]
        pipelines = 1 + max(each.pipeline for each in self.stages)
        return range(code.pipeline, self.micro_batches * code.turns, pipelines)
