"""The program of each rank as data, from which code is generated.

`StageCode` has the operations of a stage's forward on local shards; autograd computes the backward.
`RankCode` has the instructions of a rank, with loops. A `Bucket` holds gradients that the same
ranks reduce in one collective. `COMMUNICATION_KINDS` defines the kinds of communication of a step,
for predictions and for measurements.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated

from autopipe.ir.batch import BatchDimension
from autopipe.ir.codec import Count, Index, Inline, KeyPath, OmitDefault
from autopipe.ir.graph import Constant, DType, Parameter, Value
from autopipe.ir.layout import MeshAxes, MeshAxis, Redistribution, TensorSlice, merge_axes
from autopipe.ir.ops.operator import Signature
from autopipe.ir.placement import Split
from autopipe.ir.problem import AVERAGED_LOSS, LossDivision
from autopipe.ir.schedule import EVERY_MICRO_BATCH, MicroBatchSlice

FORMAT = "autopipe.program/1"
"""Format of the manifest of a program folder."""

REFERENCE_FOLDER = "reference"
"""Subfolder of a program folder for the same step on one device."""
FORWARD_FOLDER = "forward"
"""Subfolder of a program folder for the model's forward on one device."""

HARDWARE_QUEUES = 32
"""Value of CUDA_DEVICE_MAX_CONNECTIONS for ranks, the maximum that CUDA supports. The check for
deadlocks assumes this value.
"""


@dataclass(frozen=True, slots=True)
class Compute:
    """One operator on local shards."""

    node: int
    """Index of the node in the graph."""
    signature: Signature
    """Operands and results with local shapes."""
    splits: tuple[Split, ...] = ()
    mesh: MeshAxes = ()
    """Axis of the stage's device mesh for each split."""
    joint: tuple[tuple[str, ...], ...] = ()
    """Sets of split axes for which the operator itself communicates in a process group; see
    `Call.group`.
    """
    samples: BatchDimension | None = None
    """Batch dimension of the random numbers of a random operator."""

    def mesh_of(self, axes: Iterable[str]) -> MeshAxes:
        """Return the mesh axes over which the node is split along the iteration axes `axes`."""
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
    """A redistribution of a value over the devices of a stage. `source` and `result` are the local
    shards before and after it. Its backward is the transposed redistribution of the gradient.
    """

    source: Value
    result: Value
    relayout: Redistribution
    itemsize: int
    """Bytes per element that are sent. Under autocast they can be fewer than those of the type of
    `source`.
    """

    @property
    def largest_bytes(self) -> int:
        """Bytes of the larger of the two shards, with `itemsize` bytes per element."""
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
    """Nodes of a recomputing stage that are recomputed together in backward. They are recomputed if
    one of the results named in `flowing` gets a gradient.
    """

    nodes: tuple[int, ...]
    flowing: frozenset[str]


@dataclass(frozen=True, slots=True)
class StageCode:
    """The forward of one stage, which is equal on all of its devices."""

    stage: int
    devices: tuple[int, ...]
    inputs: tuple[Value, ...]
    """Local values in the order of the function's arguments."""
    outputs: tuple[Value, ...]
    """Local values in the order of the function's results."""
    parameters: tuple[tuple[int, Value], ...]
    """Pairs (index in the graph's parameters, local value)."""
    constants: tuple[tuple[int, Constant], ...]
    """Pairs (index in the graph's constants, local constant)."""
    operations: tuple[Operation, ...]
    recompute: bool = False
    pipeline: int = 0
    ratio: int = 1
    """Number of equal micro-batches that the stage runs per micro-batch of the program."""
    deferred: tuple[int, ...] = ()
    """Nodes whose parameter gradients are computed in the second half of a split backward."""
    segments: tuple[Segment, ...] = ()
    """Segments in the order in which they run, if the stage recomputes and trains."""

    def meshes(self) -> tuple[MeshAxes, ...]:
        """Return the distinct mesh axes over which ranks of the stage communicate, sorted. One axis
        of the size of the stage stands for all ranks.
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
        """Return the operations of each segment, or all operations as one group if there are no
        segments. A redistribution belongs to the segment of the next computation.
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
class MessageSlice:
    """A slice of a tensor that one rank sends to another after a task."""

    channel: int
    """Number of the channel. Messages of a channel arrive in the order in which they are sent."""
    tensor: str
    source_stage: int
    target_stage: int
    source_rank: int
    target_rank: int
    sent: TensorSlice
    """The slice in the sender's local tensor."""
    received: TensorSlice
    """The slice in the receiver's local tensor."""
    needs_gradient: bool
    """True if the gradient of the slice is sent back."""
    dtype: DType
    """Element type of the message; it can be narrower than the type of the tensor."""
    source_slice: MicroBatchSlice = EVERY_MICRO_BATCH
    """Micro-batches of the source stage after which the message is sent."""
    target_slice: MicroBatchSlice = EVERY_MICRO_BATCH
    """Micro-batches of the target stage that read the message."""

    @property
    def bytes(self) -> int:
        return self.sent.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Channel:
    """Messages from one rank to another: one slice per micro-batch, and its gradient back.

    All messages from one rank to another use one NCCL communicator, so the target posts receives in
    the order of the sends.
    """

    number: Index
    source_rank: Annotated[Index, KeyPath("source")]
    target_rank: Annotated[Index, KeyPath("target")]
    buffers: Index
    """Maximum number of messages that the target holds at a time."""
    gradient_buffers: Index
    """Maximum number of gradient messages that the source holds at a time."""


@dataclass(frozen=True, slots=True)
class DataInput:
    tensor: str
    box: TensorSlice


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """A rank's shard of a parameter."""

    parameter: Index
    """Index of the parameter in the graph."""
    box: Annotated[TensorSlice, Inline()]
    """Slice of the full parameter."""
    gradient_ranks: Annotated[tuple[Index, ...], KeyPath("ranks")]
    """Ranks with this shard; their gradients are summed."""
    home: Index | None
    """The only stage that uses the shard, if all of these ranks run it: its last backward completes
    the gradient. Otherwise None.
    """


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
    """One operation of a rank on one stage and micro-batch.

    `recv` posts a receive and `send` returns at once; `forward` and `backward` wait for their
    messages.
    """

    opcode: Opcode
    stage: int
    micro_batch: int
    source: int | None = None
    """Stage from which a receive receives; None for all source stages."""
    part: int | None = None
    """Index of the slice of source micro-batches whose messages a receive receives; None for
    all.
    """

    def shifted(self, distance: int) -> Instruction:
        return replace(self, micro_batch=self.micro_batch + distance)


@dataclass(frozen=True, slots=True)
class Loop:
    """Repeats `body` `count` times. Each repetition adds `stride` to the micro-batch indices, or
    the entry of `strides` for each instruction if stages have different micro-batch sizes.
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
    receives: tuple[MessageSlice, ...]
    sends: tuple[MessageSlice, ...]


@dataclass(frozen=True, slots=True)
class RankCode:
    """The program of one rank: its stages, its parameter shards and the three parts of its step."""

    rank: int
    stages: tuple[StageOnRank, ...]
    shards: tuple[ParameterShard, ...]
    warm_up: Section
    repetend: Section
    cool_down: Section


@dataclass(frozen=True, slots=True)
class OutputShard:
    """The rank and the slice of one shard of a graph output after the forward of a stage."""

    rank: Index
    box: Annotated[TensorSlice, Inline()]


@dataclass(frozen=True, slots=True)
class OutputStage:
    """The stage that computes an output, and the shards of the output."""

    stage: Index
    position: Index
    """Index of the output among the stage's results."""
    combine: str
    """`concat` if the shards are slices of the value; `sum` if the value is the sum of the shards
    of all ranks, divided by `copies`.
    """
    copies: Count
    """Number of ranks with each shard."""
    shards: tuple[OutputShard, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """A graph output for one micro-batch of the stage that computes it."""

    value: Annotated[Value, Inline()]
    batch_axis: Index | None
    """Axis along which micro-batches are concatenated; None if they are averaged."""
    places: tuple[OutputStage, ...]
    """Stage and shards in each pipeline."""


@dataclass(frozen=True, slots=True)
class InputBounds:
    """Integer range [`least`, `below`) of a slice of an input, for all samples of a micro-batch."""

    least: int
    below: int
    starts: tuple[Index, ...]
    stops: tuple[Index, ...]


@dataclass(frozen=True, slots=True)
class InputRange:
    """Valid values of a graph input, derived from its uses as indices and classes."""

    value: Annotated[Value, Inline()]
    batch_axis: Index | None
    below: int | None
    """Random data are integers in [0, `below`), or real numbers if it is None."""
    drawn: Annotated[tuple[InputBounds, ...], OmitDefault()] = ()
    """Slices for which random data have other bounds."""
    allowed: Annotated[tuple[InputBounds, ...], OmitDefault()] = ()
    """Bounds of slices. Data outside of them are rejected, except the label `ignored`."""
    ignored: Annotated[int | None, OmitDefault()] = None
    """Ignored label of a loss; None if there is none."""


@dataclass(frozen=True, slots=True)
class RunningStatisticCalls:
    """The calls of BatchNormalization, in graph order, that update a running statistic that several
    stages of a pipeline hold.
    """

    parameter: Index
    """Index of the statistic."""
    stages: tuple[Index, ...]
    """Stage of each call."""
    momenta: tuple[float, ...]
    """Factor of the old value in each call."""

    def made_by(self, stage: int) -> tuple[int, ...]:
        """Return the indices of the calls of a stage."""
        return tuple(number for number, each in enumerate(self.stages) if each == stage)


@dataclass(frozen=True, slots=True)
class Program:
    """All input of code generation, for steps of `micro_batches` · `micro_batch_size` samples."""

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
    """`Optimizer.shard`: True if the optimizer state is sharded (ZeRO-1)."""
    loss_division: LossDivision = AVERAGED_LOSS
    labels: int | None = None
    """Number of labels of a micro-batch if the loss is a sum over labels that are not ignored; None
    if the loss is a mean.
    """
    low_precision: tuple[int, ...] = ()
    """Indices of parameters of which stages read a 16-bit copy."""
    running_calls: tuple[RunningStatisticCalls, ...] = ()
    """Entries for each running statistic and pipeline in which several stages hold the
    statistic.
    """

    @property
    def roundings(self) -> int:
        """Maximum number of stage boundaries, on a path through the model, at which messages have a
        narrower type than the value.
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
        for _ in self.stages:  # One iteration suffices if edges lead to larger stage indices.
            before = list(found)
            for source, target, rounds in sorted(edges):
                found[target] = max(found[target], found[source] + rounds)
            if found == before:
                break
        return max(found, default=0)

    def micro_batches_of(self, stage: int) -> range:
        """Return the micro-batches of a stage in a step. Micro-batch m runs on pipeline m mod p,
        with p pipelines.
        """
        code = self.stages[stage]
        pipelines = 1 + max(each.pipeline for each in self.stages)
        return range(code.pipeline, self.micro_batches * code.ratio, pipelines)


BUCKET_BYTES = 25 * 2**20
"""Minimum bytes of a bucket after which it takes no further shard. The value is that of torch's
DistributedDataParallel.
"""
_ALIGNMENT_BYTES = 16
"""Alignment, in bytes, of shards in a bucket, for vector loads on a GPU."""


@dataclass(frozen=True, slots=True)
class BucketShard:
    """A shard of a trained parameter that several ranks have. `home` is as in `ParameterShard`."""

    parameter: int
    elements: int
    dtype: str
    itemsize: int
    ranks: tuple[int, ...]
    home: int | None


@dataclass(frozen=True, slots=True)
class ElementRange:
    """Elements `start` … `stop` - 1, in row-major order, of a parameter's shard. They begin at
    element `at` of the rank's part of a bucket.
    """

    parameter: int
    start: int
    stop: int
    at: int

    def boxes(self, shape: tuple[int, ...]) -> Iterator[TensorSlice]:
        """Yield the slices of a shard of `shape` that hold these elements, in order: at most two
        per dimension.
        """
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
    """Shards of one element type whose gradients the same ranks reduce in one collective.

    With ZeRO-1 a bucket is one contiguous vector. Each shard begins at a multiple of 16 bytes. The
    vector is padded so that all ranks have equal parts, whose boundaries can be inside parameters.
    """

    blocks: tuple[BucketShard, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.blocks[0].ranks

    @property
    def home(self) -> int | None:
        return self.blocks[0].home

    @property
    def starts(self) -> tuple[int, ...]:
        """Offset of each shard in the bucket, in elements."""
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
        return max(1, _ALIGNMENT_BYTES // self.blocks[0].itemsize)

    def runs(self, rank: int) -> Iterator[ElementRange]:
        """Yield the ranges of elements of each shard that are in a rank's part, in order."""
        first = self.ranks.index(rank) * self.share
        last = first + self.share
        for block, begin in zip(self.blocks, self.starts, strict=True):
            start = max(first, begin)
            stop = min(last, begin + block.elements)
            if start < stop:
                yield ElementRange(block.parameter, start - begin, stop - begin, start - first)


def make_buckets(blocks: Iterable[BucketShard]) -> tuple[Bucket, ...]:
    """Return the buckets of a rank's shards in the order of their collectives, which is equal on
    all ranks. Shards without a home come first. Parameters are in descending order, because
    backward computes the gradients of the first parameters last.
    """
    groups: dict[tuple[int, tuple[int, ...]], list[BucketShard]] = {}
    for block in sorted(blocks, key=lambda block: block.parameter, reverse=True):
        groups.setdefault((-1 if block.home is None else block.home, block.ranks), []).append(block)
    packed: list[list[BucketShard]] = []
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


COMMUNICATION_KINDS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "redistribute",
    "gradient",
    "parameter",
    "send",
)
"""Kinds of communication of a step, in the order of reports, and the bytes that each counts.

Each device counts each collective in which it takes part, forward and backward. A total is the sum
over all devices.

* `all_reduce`: the reduced tensor;
* `reduce_scatter`: the input tensor;
* `all_gather`: the output tensor;
* `all_to_all`: the shard from which a device sends a part to each other device;
* `redistribute`: the elements received from other devices;
* `gradient`: parameter gradients that are reduced once per step, fully or into shards;
* `parameter`: parameters that are gathered once per step after a sharded update;
* `send`: activations and their gradients that are sent to other stages' devices.

Collectives inside an operator count under their own kind. Slicing a local copy communicates
nothing. Reports, inference outputs and checkpoints are not counted.
"""


def backward_collective(kind: str) -> str:
    """Return the kind of the backward of a collective; it has the same number of bytes."""
    return {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}.get(kind, kind)


def in_kind_order(counted: Mapping[str, int]) -> dict[str, int]:
    return {kind: counted.get(kind, 0) for kind in COMMUNICATION_KINDS}
