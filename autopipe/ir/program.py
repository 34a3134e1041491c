"""The programs of all ranks as data, from which code is generated.

`StageCode` has the operations of a stage's forward on local shards; autograd computes the backward.
`RankCode` has the instructions of a rank, with loops. A `Bucket` contains gradients that the same
ranks reduce in one collective. `COMMUNICATION_KINDS` defines the kinds of communication in a step,
for predictions and for measurements.
"""

from __future__ import annotations

import enum
import math
import re
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
"""Value of the key `format` in the manifest of a program folder."""

REFERENCE_FOLDER = "reference"
"""Subfolder of a program folder with a program that computes the same step on one device."""
FORWARD_FOLDER = "forward"
"""Subfolder of a program folder with a program that computes the model's forward on one device."""

HARDWARE_QUEUES = 32
"""Value of the environment variable CUDA_DEVICE_MAX_CONNECTIONS for ranks, the maximum that CUDA
supports. The check for deadlocks assumes this value.
"""


@dataclass(frozen=True, slots=True)
class Compute:
    """One use of an operator on the local shards of a device."""

    node: int
    """Index of the node in the graph."""
    signature: Signature
    """Node, with the local shapes of its operands and results."""
    splits: tuple[Split, ...] = ()
    mesh: MeshAxes = ()
    """For each of `splits`, the axis of the stage's device mesh over which it is split."""
    joint: tuple[tuple[str, ...], ...] = ()
    """Sets of split axes. For each set, the operator itself communicates in the process group over
    these axes; see `Call.group`.
    """
    samples: BatchDimension | None = None
    """For an operator that generates random numbers, the dimension of its result that contains the
    batch; None if there is none.
    """

    def mesh_of(self, axes: Iterable[str]) -> MeshAxes:
        """Return the mesh axes over which the iteration axes `axes` of the node are split."""
        wanted = frozenset(axes)
        return merge_axes(
            place
            for split, place in zip(self.splits, self.mesh, strict=True)
            if split.axis in wanted
        )

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the values that the operation reads."""
        return tuple(value.name for value in self.signature.operands if value is not None)

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of the values that the operation writes."""
        return tuple(value.name for value in self.signature.results if value is not None)


@dataclass(frozen=True, slots=True)
class Collective:
    """A redistribution of a value over the devices of a stage: the local shard `source` becomes the
    local shard `result`. In backward, the gradient is redistributed in the opposite direction.
    """

    source: Value
    result: Value
    relayout: Redistribution
    itemsize: int
    """Bytes per element in the messages. Under autocast, they can be fewer than those of the type
    of `source`.
    """

    @property
    def largest_bytes(self) -> int:
        """Size in bytes of the larger shard, with `itemsize` bytes per element."""
        return max(self.source.elements, self.result.elements) * self.itemsize

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the values that the operation reads."""
        return (self.source.name,)

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of the values that the operation writes."""
        return (self.result.name,)


Operation = Compute | Collective


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes of a recomputing stage that backward recomputes together. Their forward runs again only
    if one of the results named in `flowing` gets a gradient.
    """

    nodes: tuple[int, ...]
    flowing: frozenset[str]


@dataclass(frozen=True, slots=True)
class StageCode:
    """The forward of one stage. It is equal on all devices of the stage."""

    stage: int
    devices: tuple[int, ...]
    inputs: tuple[Value, ...]
    """Inputs with local shapes, in the order of the arguments of the generated function."""
    outputs: tuple[Value, ...]
    """Outputs with local shapes, in the order of the results of the generated function."""
    parameters: tuple[tuple[int, Value], ...]
    """Pairs (index of the parameter in the graph, parameter with its local shape)."""
    constants: tuple[tuple[int, Constant], ...]
    """Pairs (index of the constant in the graph, constant with its local data)."""
    operations: tuple[Operation, ...]
    recompute: bool = False
    pipeline: int = 0
    ratio: int = 1
    """Number of micro-batches of the stage per micro-batch of the program. Above 1 if the stage has
    smaller micro-batches.
    """
    deferred: tuple[int, ...] = ()
    """Indices of the nodes whose parameter gradients are computed in the second half of a split
    backward.
    """
    segments: tuple[Segment, ...] = ()
    """Sets of nodes that backward recomputes together, in the order in which the forward runs them;
    () unless the stage recomputes in a training program.
    """

    def meshes(self) -> tuple[MeshAxes, ...]:
        """Return the distinct mesh axes over which ranks of the stage communicate, sorted. A single
        axis with the size of the stage stands for all of its ranks.
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
        """Return the operations of each segment, in order. A segment is a set of nodes that
        backward recomputes together. Without segments, return one group with all operations. A
        redistribution belongs to the segment of the next operator.
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


def assignment_name(function: str, call: int, variable: str, count: int) -> str:
    """Return the name under which a launch records an assignment in generated code: the assignment
    number `count` to a variable in call number `call` of a function. Numbers start at 1.

    The variables of the flat form, such as `x3`, have different names in all functions, so their
    names suffice.
    """
    if re.fullmatch(r"x\d+", variable):
        return variable
    return f"{function}#{call}.{variable}#{count}"


@dataclass(frozen=True, slots=True)
class StageAttributes:
    """The attributes of `p`, the first argument of the `forward` of a stage: the content of the
    file `stage_NN.json` in a program folder.
    """

    attributes: tuple[tuple[str, str | int], ...]
    """(path, content) of each attribute. A path such as `layers.3.attention.query.weight` consists
    of identifiers, and of numbers that are indices in a list of layers. The content is `w3` for
    parameter 3, `c3` for constant 3, or the key of a random operator.
    """
    segments: tuple[tuple[str, ...], ...] = ()
    """For each segment that backward recomputes, the parameters that it reads, such as `w3`."""


@dataclass(frozen=True, slots=True)
class MessageSlice:
    """A slice of a tensor that one rank sends to another rank after a task."""

    channel: int
    """Number of the channel. The messages of a channel arrive in the order in which they are sent.
    """
    tensor: str
    source_stage: int
    target_stage: int
    source_rank: int
    target_rank: int
    sent: TensorSlice
    """Position of the slice in the sender's local tensor."""
    received: TensorSlice
    """Position of the slice in the receiver's local tensor."""
    needs_gradient: bool
    """True if the receiver sends the gradient of the slice back."""
    dtype: DType
    """Element type of the message, which can be narrower than that of the tensor."""
    source_slice: MicroBatchSlice = EVERY_MICRO_BATCH
    """Micro-batches of the source stage for which the message is sent."""
    target_slice: MicroBatchSlice = EVERY_MICRO_BATCH
    """Micro-batches of the target stage that use the message."""

    @property
    def bytes(self) -> int:
        """Size of the message in bytes."""
        return self.sent.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Channel:
    """The messages from one rank to another for one slice of a tensor: one per micro-batch, and the
    gradient of each in the opposite direction.

    All channels from one rank to another share one NCCL communicator, so the target must post
    receives in the order of the sends.
    """

    number: Index
    source_rank: Annotated[Index, KeyPath("source")]
    target_rank: Annotated[Index, KeyPath("target")]
    buffers: Index
    """Maximum number of messages of the channel that the target holds at a time."""
    gradient_buffers: Index
    """Maximum number of gradient messages of the channel that the source holds at a time."""


@dataclass(frozen=True, slots=True)
class DataInput:
    """A slice of a graph input that a stage on a rank reads."""

    tensor: str
    box: TensorSlice


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """A shard of a parameter on a rank."""

    parameter: Index
    """Index of the parameter in the graph."""
    box: Annotated[TensorSlice, Inline()]
    """The slice of the full parameter."""
    gradient_ranks: Annotated[tuple[Index, ...], KeyPath("ranks")]
    """Ranks that hold this shard. Their gradients are added up."""
    home: Index | None
    """The stage that uses the shard, if it is the only one and all of these ranks run it: then its
    last backward completes the gradient. Otherwise None.
    """


class Opcode(enum.Enum):
    """Method of a stage that an instruction calls. `backward_input` and `backward_weight`, the
    halves of a split backward, have the names of `torch.distributed.pipelining`.
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
    """One call of a rank's program, for one stage and one micro-batch.

    `recv` posts a receive, and `send` starts a send; both return at once. `forward` and `backward`
    wait for the messages that they need.
    """

    opcode: Opcode
    stage: int
    micro_batch: int
    source: int | None = None
    """For a receive: the source stage whose messages it receives; None for all source stages."""
    part: int | None = None
    """For a receive: the value `index` of the `MicroBatchSlice` of source micro-batches whose
    messages it receives; None for all micro-batches.
    """

    def shifted(self, distance: int) -> Instruction:
        """Return this instruction for the micro-batch that is `distance` larger."""
        return replace(self, micro_batch=self.micro_batch + distance)


@dataclass(frozen=True, slots=True)
class Loop:
    """`count` repetitions of the instructions `body`. The micro-batches of each repetition are
    `stride` larger than those of the repetition before. If stages have different micro-batch sizes,
    `strides` has one stride per instruction instead.
    """

    body: tuple[Instruction, ...]
    count: int
    stride: int = 1
    strides: tuple[int, ...] = ()


Section = tuple["Instruction | Loop", ...]


@dataclass(frozen=True, slots=True)
class StageOnRank:
    """A stage on one rank: the inputs that it reads as data, and the slices that it receives and
    sends.
    """

    stage: int
    data: tuple[DataInput, ...]
    receives: tuple[MessageSlice, ...]
    sends: tuple[MessageSlice, ...]


@dataclass(frozen=True, slots=True)
class RankCode:
    """The program of one rank: its stages, its shards of parameters, and the three sections of its
    step (warm-up, steady state, cool-down).
    """

    rank: int
    stages: tuple[StageOnRank, ...]
    shards: tuple[ParameterShard, ...]
    warm_up: Section
    repetend: Section
    cool_down: Section


@dataclass(frozen=True, slots=True)
class OutputShard:
    """A shard of a graph output on a rank after the forward of a stage: the rank, and the slice of
    the full output.
    """

    rank: Index
    box: Annotated[TensorSlice, Inline()]


@dataclass(frozen=True, slots=True)
class OutputStage:
    """The stage that computes a graph output, and the shards of the output on its ranks."""

    stage: Index
    position: Index
    """Index of the output among the results of the stage."""
    combine: str
    """How the shards give the output: `concat` if they are slices of it; `sum` if the sum over all
    ranks, divided by `copies`, is the output.
    """
    copies: Count
    """Number of ranks that hold each shard."""
    shards: tuple[OutputShard, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """A graph output, with the shape for one micro-batch of the stage that computes it."""

    value: Annotated[Value, Inline()]
    batch_axis: Index | None
    """Axis along which the outputs of micro-batches are concatenated; None if they are averaged."""
    places: tuple[OutputStage, ...]
    """For each pipeline, the stage that computes the output."""


@dataclass(frozen=True, slots=True)
class InputBounds:
    """Valid range of the integers in a slice of an input, from `least` to below `below`, for all
    samples of a micro-batch.
    """

    least: int
    below: int
    starts: tuple[Index, ...]
    stops: tuple[Index, ...]


@dataclass(frozen=True, slots=True)
class InputRange:
    """Valid values of a graph input, which follow from its uses as indices and class labels."""

    value: Annotated[Value, Inline()]
    batch_axis: Index | None
    below: int | None
    """Random input data are integers from 0 to below this number, or real numbers if it is None."""
    drawn: Annotated[tuple[InputBounds, ...], OmitDefault()] = ()
    """Bounds of random input data for slices with other bounds than `below`."""
    allowed: Annotated[tuple[InputBounds, ...], OmitDefault()] = ()
    """Bounds of slices. Input data outside of them are rejected, except the label `ignored`."""
    ignored: Annotated[int | None, OmitDefault()] = None
    """Label that a loss ignores; None if there is none."""


@dataclass(frozen=True, slots=True)
class RunningStatisticCalls:
    """The calls of BatchNormalization that update one running statistic, in graph order, if several
    stages of a pipeline update it.
    """

    parameter: Index
    """Index of the statistic among the parameters."""
    stages: tuple[Index, ...]
    """Index of the stage of each call."""
    momenta: tuple[float, ...]
    """For each call, the factor of the old value in the new value."""

    def made_by(self, stage: int) -> tuple[int, ...]:
        """Return the indices of the calls that the stage `stage` makes."""
        return tuple(number for number, each in enumerate(self.stages) if each == stage)


@dataclass(frozen=True, slots=True)
class Program:
    """The complete input of code generation. A step has `micro_batches` · `micro_batch_size`
    samples.
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
    """Channels between different ranks, in the order of their numbers."""
    shard: bool = False
    """True if the optimizer state is sharded over replicas (ZeRO-1); see `Optimizer.shard`."""
    loss_division: LossDivision = AVERAGED_LOSS
    labels: int | None = None
    """Number of labels of a micro-batch if its loss is a sum over the labels that are not ignored;
    None if the loss is a mean.
    """
    low_precision: tuple[int, ...] = ()
    """Indices of the parameters of which stages read a 16-bit copy."""
    running_calls: tuple[RunningStatisticCalls, ...] = ()
    """One entry per running statistic and pipeline in which several stages update the statistic."""

    @property
    def roundings(self) -> int:
        """Maximum number of messages between stages, on a path through the model, whose element
        type is narrower than that of the value.
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
        # If each edge leads to a larger stage index, one iteration suffices. Other edges may
        # require one iteration per stage.
        for _ in self.stages:
            before = list(found)
            for source, target, rounds in sorted(edges):
                found[target] = max(found[target], found[source] + rounds)
            if found == before:
                break
        return max(found, default=0)

    def micro_batches_of(self, stage: int) -> range:
        """Return the micro-batches of a stage in a step. With p pipelines, micro-batch m runs on
        pipeline m mod p.
        """
        code = self.stages[stage]
        pipelines = 1 + max(each.pipeline for each in self.stages)
        return range(code.pipeline, self.micro_batches * code.ratio, pipelines)


BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients after which a bucket takes no further shard. The value is that of torch's
DistributedDataParallel.
"""
_ALIGNMENT_BYTES = 16
"""Alignment of shards in a bucket, in bytes, for vector loads on a GPU."""


@dataclass(frozen=True, slots=True)
class BucketShard:
    """A shard of a trained parameter whose gradient several ranks reduce. `home` is the only stage
    that uses the shard, if all of these ranks run this stage, otherwise None.
    """

    parameter: int
    elements: int
    dtype: str
    itemsize: int
    ranks: tuple[int, ...]
    home: int | None


@dataclass(frozen=True, slots=True)
class ElementRange:
    """Elements `start` to `stop` - 1, in row-major order, of a shard of a parameter. The first of
    them is element `at` of the rank's part of a bucket.
    """

    parameter: int
    start: int
    stop: int
    at: int

    def boxes(self, shape: tuple[int, ...]) -> Iterator[TensorSlice]:
        """Yield rectangular slices of the shard, which has shape `shape`, that consist of these
        elements, in order. There are at most two slices per dimension.
        """
        if not shape:
            yield TensorSlice((), ())
            return
        inner = math.prod(shape[1:])
        stop = self.stop
        row, offset = divmod(self.start, inner)
        if offset or row == (stop - 1) // inner:
            # The first row is incomplete, or it is the only row. Its part of the range is split
            # recursively.
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

    With ZeRO-1, a bucket is one contiguous vector, in which each shard begins at a multiple of 16
    bytes. The vector is padded so that it can be divided into parts of equal size, one per rank.
    The boundaries of the parts can be inside shards.
    """

    blocks: tuple[BucketShard, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that reduce the gradients of the bucket."""
        return self.blocks[0].ranks

    @property
    def home(self) -> int | None:
        """The only stage that uses the shards, if all ranks of the bucket run this stage, otherwise
        None.
        """
        return self.blocks[0].home

    @property
    def starts(self) -> tuple[int, ...]:
        """For each shard, its offset in the bucket, in elements."""
        ends = accumulate(-(-block.elements // self._step) * self._step for block in self.blocks)
        return (0, *ends)[: len(self.blocks)]

    @property
    def part_elements(self) -> int:
        """Number of elements of each rank's part of the bucket."""
        used = self.starts[-1] + self.blocks[-1].elements
        return -(-used // (len(self.ranks) * self._step)) * self._step

    @property
    def elements(self) -> int:
        """Number of elements, with padding."""
        return self.part_elements * len(self.ranks)

    @property
    def bytes(self) -> int:
        """Size in bytes, with padding."""
        return self.elements * self.blocks[0].itemsize

    @property
    def _step(self) -> int:
        """Alignment in elements: each shard begins at a multiple of this number, and the size of
        each rank's part is a multiple of it.
        """
        return max(1, _ALIGNMENT_BYTES // self.blocks[0].itemsize)

    def element_ranges(self, rank: int) -> Iterator[ElementRange]:
        """Yield, for each shard with elements in the part of the rank `rank`, the range of these
        elements, in order.
        """
        first = self.ranks.index(rank) * self.part_elements
        last = first + self.part_elements
        for block, begin in zip(self.blocks, self.starts, strict=True):
            start = max(first, begin)
            stop = min(last, begin + block.elements)
            if start < stop:
                yield ElementRange(block.parameter, start - begin, stop - begin, start - first)


def make_buckets(blocks: Iterable[BucketShard]) -> tuple[Bucket, ...]:
    """Return the buckets of a rank's shards in the order of their collectives, which is equal on
    all ranks. Buckets of shards whose `home` is None come first, for example shards that several
    stages use. Parameters with larger indices come first, because backward computes their gradients
    first.
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
"""Kinds of communication in a step, in the order of reports, and the bytes that count for each
kind.

Each device counts each collective in which it takes part, in forward and in backward. A total is
the sum over all devices.

* `all_reduce`: the reduced tensor;
* `reduce_scatter`: the input tensor;
* `all_gather`: the output tensor;
* `all_to_all`: the shard from which a device sends a part to each other device;
* `redistribute`: the elements received from other devices;
* `gradient`: parameter gradients that are reduced once per step, fully or into shards;
* `parameter`: parameters that are gathered once per step after a sharded update;
* `send`: activations and their gradients that are sent to devices of other stages.

Collectives inside an operator count under their own kind. Taking a slice of a local copy needs no
communication. Communication for reports, for inference outputs and for checkpoints does not count.
"""


def backward_collective(kind: str) -> str:
    """Return the kind of the collective that backward runs for a collective of the kind `kind` in
    forward. Both move equally many bytes.
    """
    return {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}.get(kind, kind)


def order_by_kind(counted: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes per kind in the order of `COMMUNICATION_KINDS`, with 0 for missing kinds."""
    return {kind: counted.get(kind, 0) for kind in COMMUNICATION_KINDS}
