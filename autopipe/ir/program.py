"""Instructions of each rank, as data: the last value before Python text.

For each stage the operations of its forward on local shards (`StageCode`); for each rank a list of
instructions, loops rolled up (`RankCode`). Backward is autograd's. Gradients of parameters that the
same ranks add up travel together (`Bucket`), and the exchanges of a step have `KINDS`, one
definition for predictions and for counts.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated

from autopipe.ir.batch import Samples
from autopipe.ir.codec import Count, Index, Inline, KeyPath, OmitDefault
from autopipe.ir.graph import Constant, DType, Parameter, Value
from autopipe.ir.layout import MeshAxes, MeshAxis, Redistribution, TensorSlice, merge_axes
from autopipe.ir.ops.operator import Signature
from autopipe.ir.placement import Split
from autopipe.ir.problem import AVERAGED, LossDivision
from autopipe.ir.schedule import EVERY, MicroBatchSlice

FORMAT = "autopipe.program/1"
"""Of a program folder's manifest."""

REFERENCE = "reference"
"""Folder, inside a program's, of the same step on one device."""
FORWARD = "forward"
"""Folder, inside a program's, of the model's forward on one device."""

HARDWARE_QUEUES = 32
"""CUDA_DEVICE_MAX_CONNECTIONS of ranks, for which programs are proven to end: as many as there may
be.
"""


@dataclass(frozen=True, slots=True)
class Compute:
    """One operator on local shards: `signature` holds local shapes. `mesh` has the axis of the
    group's mesh that each split lies along; `joint` has the sets of split axes over which the
    operator itself asks for a group: see `Call.group`. `samples` says where samples are counted in
    what a random operator draws.
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
        return merge_axes(
            place
            for split, place in zip(self.splits, self.mesh, strict=True)
            if split.axis in wanted
        )

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(value.name for value in self.signature.operands if value is not None)

    @property
    def writes(self) -> tuple[str, ...]:
        return tuple(value.name for value in self.signature.results if value is not None)


@dataclass(frozen=True, slots=True)
class Collective:
    """A redistribution of a value inside a stage's group; its backward is the transpose. `source`
    and `result` are the shards of one device before and after it.
    """

    source: Value
    result: Value
    relayout: Redistribution
    itemsize: int
    """Bytes per element while the value is sent: under autocast less than the declared type of
    `source` may need.
    """

    @property
    def largest_bytes(self) -> int:
        """Bytes of the larger of the two shards, as they are sent."""
        return max(self.source.elements, self.result.elements) * self.itemsize

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.source.name,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.result.name,)


Operation = Compute | Collective


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes of a stage that recomputes, which run again together if gradients come back to any of
    their results: those of the local names `flowing`.
    """

    nodes: tuple[int, ...]
    flowing: frozenset[str]


@dataclass(frozen=True, slots=True)
class StageCode:
    """The forward of one stage, the same for all devices of its group.

    `inputs` and `outputs` are local values in the order of the function's arguments and results.
    `parameters` pairs the index in the graph's parameters with the local value. `constants` are
    local too. `deferred` are nodes whose parameters' gradients are left to the second half of a
    split backward. Where the stage recomputes and trains, `segments` have its nodes in the order in
    which they run.
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
    ratio: int = 1
    """Micro-batches that it makes of each of the program's, of samples in equal number."""
    deferred: tuple[int, ...] = ()
    segments: tuple[Segment, ...] = ()

    def meshes(self) -> tuple[MeshAxes, ...]:
        """The axes along which ranks of the group exchange anything, each once, sorted; one axis
        where all ranks do.
        """
        whole = (MeshAxis(len(self.devices), 1),)
        found = set[MeshAxes]()
        for operation in self.operations:
            if isinstance(operation, Compute):
                found.update(map(operation.mesh_of, operation.joint))
            elif operation.relayout.kind != "slice":
                found.add(operation.relayout.over or whole)
        return tuple(sorted(found - {()}))

    def by_segment(self) -> tuple[tuple[Operation, ...], ...]:
        """The operations of each segment, of all where there are none; an exchange goes with what
        is computed next.
        """
        segment_of = {
            node: number for number, segment in enumerate(self.segments) for node in segment.nodes
        }
        groups: list[list[Operation]] = [[] for _ in self.segments or (None,)]
        waiting: list[Operation] = []
        number = 0
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

    `channel` numbers the pieces of a program: messages of one channel arrive in the order in which
    they are sent. `sent` is the block of `tensor` in coordinates of the sender's local one,
    `received` of the receiver's. `needs_gradient` says that its gradient travels the same way back.
    Both travel as `dtype`, which may be narrower than the value's own. Where the stages'
    micro-batches are unequal, it is sent after those of `source_slice` and needed by those of
    `target_slice`.
    """

    channel: int
    tensor: str
    source_stage: int
    target_stage: int
    source_rank: int
    target_rank: int
    sent: TensorSlice
    received: TensorSlice
    needs_gradient: bool
    dtype: DType
    source_slice: MicroBatchSlice = EVERY
    target_slice: MicroBatchSlice = EVERY

    @property
    def bytes(self) -> int:
        return self.sent.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Channel:
    """Messages from one rank to another: one block of each micro-batch of its slice, and its
    gradient back. `buffers` and `gradient_buffers` are how many messages the target, and of
    gradients the source, holds at once.

    A rank asks for all that another one sends in the order in which it does, over one NCCL
    communicator.
    """

    number: Index
    source_rank: Annotated[Index, KeyPath("source")]
    target_rank: Annotated[Index, KeyPath("target")]
    buffers: Index
    gradient_buffers: Index


@dataclass(frozen=True, slots=True)
class DataInput:
    tensor: str
    box: TensorSlice


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's block of a parameter, and the ranks whose gradients for the same block add up to its
    gradient. `home` is the one stage that uses the block, where there is one and all of those ranks
    run it: its last backward completes the gradient on all of them.
    """

    parameter: Index
    box: Annotated[TensorSlice, Inline()]
    gradient_ranks: Annotated[tuple[Index, ...], KeyPath("ranks")]
    home: Index | None


class Opcode(enum.Enum):
    """Method of a stage that a rank's program calls. `backward_input` and `backward_weight` are the
    halves of a split backward (the names of `torch.distributed.pipelining`).
    """

    RECV = "recv"
    FORWARD = "forward"
    SEND = "send"
    RECV_GRADIENT = "recv_gradient"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    SEND_GRADIENT = "send_gradient"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation on one stage and micro-batch. `recv` posts, `forward` and `backward` wait, `send`
    returns at once. A receive is of what one stage, `source`, sends; of what all stages send where
    it is None. Where a micro-batch takes parts of several of the source's, it is of the `part` from
    those of the slice with this index.
    """

    opcode: Opcode
    stage: int
    micro_batch: int
    source: int | None = None
    part: int | None = None

    def shifted(self, distance: int) -> Instruction:
        return replace(self, micro_batch=self.micro_batch + distance)


@dataclass(frozen=True, slots=True)
class Loop:
    """`body`, `count` times, each time on micro-batches `stride` further. Where stages with
    micro-batches of different sizes take part, `strides` says it for each instruction of the body.
    """

    body: tuple[Instruction, ...]
    count: int
    stride: int = 1
    strides: tuple[int, ...] = ()


Section = tuple["Instruction | Loop", ...]


@dataclass(frozen=True, slots=True)
class StageOnRank:
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

    rank: Index
    box: Annotated[TensorSlice, Inline()]


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """The stage that gives an output, as which of its results, the blocks that make it up, and how
    they combine. `combine` is `concat` where the blocks are parts (or copies) of the value, and
    `sum` where the value is the sum of all ranks' blocks, divided by `copies`. `copies` ranks have
    each part.
    """

    stage: Index
    position: Index
    combine: str
    copies: Count
    shards: tuple[OutputShard, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """A value of a micro-batch of the stage that gives it, and where each pipeline has it.
    Micro-batches are concatenated along `batch_axis`, averaged where it is None.
    """

    value: Annotated[Value, Inline()]
    batch_axis: Index | None
    places: tuple[OutputPlace, ...]


@dataclass(frozen=True, slots=True)
class InputBounds:
    """Whole numbers in [`least`, `below`) for a block of an input of one micro-batch, of all
    samples.
    """

    least: int
    below: int
    starts: tuple[Index, ...]
    stops: tuple[Index, ...]


@dataclass(frozen=True, slots=True)
class InputRange:
    """Range of a graph input's numbers: rows of tables and classes, by where they are used. Random
    data are whole numbers in [0, `below`) (any real number where it is None), in `drawn` blocks
    within bounds of their own. In `allowed` blocks other numbers are refused, but for the label
    `ignored`, which counts for nothing.
    """

    value: Annotated[Value, Inline()]
    batch_axis: Index | None
    below: int | None
    drawn: Annotated[tuple[InputBounds, ...], OmitDefault()] = ()
    allowed: Annotated[tuple[InputBounds, ...], OmitDefault()] = ()
    ignored: Annotated[int | None, OmitDefault()] = None


@dataclass(frozen=True, slots=True)
class RunningCalls:
    """The calls of BatchNormalization that move a running statistic which several stages of a
    pipeline hold, in the order of the graph.
    """

    parameter: Index
    """Index of the statistic."""
    stages: tuple[Index, ...]
    """The stage that makes each call."""
    momenta: tuple[float, ...]
    """Factor of the old value that each call leaves."""

    def made_by(self, stage: int) -> tuple[int, ...]:
        """Return which calls, by their number, a stage makes."""
        return tuple(number for number, each in enumerate(self.stages) if each == stage)


@dataclass(frozen=True, slots=True)
class Program:
    """Everything that code is generated from, for steps of `micro_batches` times `micro_batch_size`
    samples. `channels` are those between different ranks, by number; `shard` is `Optimizer.shard`.
    """

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
    shard: bool = False
    loss_division: LossDivision = AVERAGED
    labels: int | None = None
    """Labels of a micro-batch, where the loss is a sum over those that count; None where it is a
    mean.
    """
    low_precision: tuple[int, ...] = ()
    """Parameters, by index, that stages read as a copy in 16 bits."""
    running_calls: tuple[RunningCalls, ...] = ()
    """For each running statistic and pipeline of which several stages hold the statistic."""

    @property
    def roundings(self) -> int:
        """The most boundaries between stages, on a way through the model, at which values are
        rounded for their messages; their gradients are rounded on the way back.
        """
        types = {
            (code.stage, value.name): value.dtype for code in self.stages for value in code.outputs
        }
        edges = {
            (
                each.source_stage,
                each.target_stage,
                each.dtype is not types[each.source_stage, each.tensor],
            )
            for rank in self.ranks
            for stage in rank.stages
            for each in stage.sends
        }
        found = [0] * len(self.stages)
        for _ in self.stages:  # One round suffices where stages are numbered along the way.
            before = list(found)
            for source, target, rounds in sorted(edges):
                found[target] = max(found[target], found[source] + rounds)
            if found == before:
                break
        return max(found, default=0)

    def micro_batches_of(self, stage: int) -> range:
        """The micro-batches that a stage runs in a step: m runs on pipeline m mod their number."""
        code = self.stages[stage]
        pipelines = 1 + max(each.pipeline for each in self.stages)
        return range(code.pipeline, self.micro_batches * code.ratio, pipelines)


BUCKET_BYTES = 25 * 2**20
"""A bucket takes no further block once it has as many; 25 MiB is what torch's
DistributedDataParallel found good.
"""
_ALIGNMENT = 16
"""Bytes at whose multiples blocks and shares begin, as vector loads of a GPU want them."""


@dataclass(frozen=True, slots=True)
class Block:
    """A trained block of a parameter that several ranks hold. `home` is the stage whose last
    backward completes its gradient on all of them, None where there is none.
    """

    parameter: int
    elements: int
    dtype: str
    itemsize: int
    ranks: tuple[int, ...]
    home: int | None


@dataclass(frozen=True, slots=True)
class ElementRange:
    """Neighbouring elements, row by row, of a parameter's block: from `start` up to `stop`, at `at`
    of the share.
    """

    parameter: int
    start: int
    stop: int
    at: int

    def boxes(self, shape: tuple[int, ...]) -> Iterator[TensorSlice]:
        """The same as boxes of a block of `shape`, in order: two for each dimension at most."""
        if not shape:
            yield TensorSlice((), ())
            return
        inner = math.prod(shape[1:])
        stop = self.stop
        row, offset = divmod(self.start, inner)
        if offset or row == (stop - 1) // inner:  # Part of a row comes first.
            end = min(inner, stop - row * inner)
            for box in replace(self, start=offset, stop=end).boxes(shape[1:]):
                yield TensorSlice((row, *box.starts), (row + 1, *box.stops))
            row += 1
        last = stop // inner
        if row < last:
            yield TensorSlice((row, *(0 for _ in shape[1:])), (last, *shape[1:]))
        if row <= last and last * inner < stop:
            yield from replace(self, start=last * inner).boxes(shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Blocks of one element type whose gradients the same ranks add up in one exchange. One that is
    shared out (ZeRO-1) is one row of elements: its blocks one behind the other, each at a multiple
    of 16 bytes, filled up so that all ranks have equal shares, which begin and end wherever that is
    in the parameters.
    """

    blocks: tuple[Block, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.blocks[0].ranks

    @property
    def home(self) -> int | None:
        return self.blocks[0].home

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each block begins in the row, in elements."""
        ends = accumulate(-(-block.elements // self._step) * self._step for block in self.blocks)
        return (0, *ends)[: len(self.blocks)]

    @property
    def share(self) -> int:
        used = self.starts[-1] + self.blocks[-1].elements
        return -(-used // (len(self.ranks) * self._step)) * self._step

    @property
    def elements(self) -> int:
        return self.share * len(self.ranks)

    @property
    def bytes(self) -> int:
        return self.elements * self.blocks[0].itemsize

    @property
    def _step(self) -> int:
        return max(1, _ALIGNMENT // self.blocks[0].itemsize)

    def runs(self, rank: int) -> Iterator[ElementRange]:
        """Ranges of a rank's shard in each block, in order."""
        first = self.ranks.index(rank) * self.share
        last = first + self.share
        for block, begin in zip(self.blocks, self.starts, strict=True):
            start = max(first, begin)
            stop = min(last, begin + block.elements)
            if start < stop:
                yield ElementRange(block.parameter, start - begin, stop - begin, start - first)


def buckets_of(blocks: Iterable[Block]) -> tuple[Bucket, ...]:
    """The buckets of a rank's blocks, in the order in which all of their ranks exchange them. Those
    without a home come first, and parameters are taken last first, since backward finishes with the
    first.
    """
    groups: dict[tuple[int, tuple[int, ...]], list[Block]] = {}
    for block in sorted(blocks, key=lambda block: block.parameter, reverse=True):
        groups.setdefault((-1 if block.home is None else block.home, block.ranks), []).append(block)
    packed: list[list[Block]] = []
    for key in sorted(groups):
        size = BUCKET_BYTES
        dtype = ""
        for block in groups[key]:
            if size >= BUCKET_BYTES or dtype != block.dtype:
                packed.append([])
                size = 0
                dtype = block.dtype
            packed[-1].append(block)
            size += block.elements * block.itemsize
    return tuple(Bucket(tuple(each)) for each in packed)


KINDS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "redistribute",
    "gradient",
    "parameter",
    "send",
)
"""Kinds of a step's exchanges, in the order in which they are listed, and what their bytes are.

Each device counts every exchange that it takes part in, forwards and backwards; a total is over all
devices.

* `all_reduce`: the tensor that is added up, or of which the largest is taken;
* `reduce_scatter`: the tensor that is put in;
* `all_gather`: the tensor that comes out;
* `all_to_all`: the block of which each device sends a part to every other;
* `redistribute`: what arrives from other devices;
* `gradient`: gradients of parameters that are added up over devices, once a step, whole or in
  shards;
* `parameter`: parameters that are gathered once a step, where each device has updated a shard;
* `send`: what goes to another device's stage, activations and their gradients.

What an operator that is split along a joint axis tells the group counts as what it is. Cutting a
copy moves nothing. Reports, outputs of inference and checkpoints are no part of a step.
"""


def transposed(kind: str) -> str:
    """The kind of the exchange that an exchange's backward is, of as many bytes."""
    return {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}.get(kind, kind)


def by_kind(counted: Mapping[str, int]) -> dict[str, int]:
    return {kind: counted.get(kind, 0) for kind in KINDS}
