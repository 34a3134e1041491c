"""The bytes that the communication of a step moves, by kind of communication.

The kinds are the collectives of `ir/program.py`, `send` for messages between stages, `gradient` for
gradient all-reduces, and `parameter` for the all-gathers of parameters if the optimizer state is
sharded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from autopipe.ir.graph import Graph, Parameter
from autopipe.ir.layout import MeshAxes, missing_elements
from autopipe.ir.ops import OPERATORS, qualified_name, signature_of
from autopipe.ir.placement import Placement
from autopipe.ir.program import (
    BucketShard,
    Collective,
    Operation,
    ParameterShard,
    StageCode,
    backward_collective,
    make_buckets,
    order_by_kind,
)
from autopipe.passes.analysis.recompute import recomputed_segments, values_with_gradient
from autopipe.passes.lower.lower import program_parts


def shards_on_several_ranks(
    parameters: Sequence[Parameter], shards: Iterable[ParameterShard]
) -> Iterator[BucketShard]:
    """Yield the shards of trainable floating-point parameters that several ranks hold, and whose
    gradients they therefore reduce together.
    """
    for shard in shards:
        value = parameters[shard.parameter].value
        if (
            len(shard.gradient_ranks) > 1
            and parameters[shard.parameter].trainable
            and value.dtype.is_floating
        ):
            dtype = value.dtype
            ranks = shard.gradient_ranks
            yield BucketShard(
                shard.parameter, shard.box.elements, dtype.value, dtype.itemsize, ranks, shard.home
            )


def gradient_bytes_by_ranks(
    parameters: Sequence[Parameter], shards: Iterable[ParameterShard], shared: bool
) -> Mapping[tuple[int | None, tuple[int, ...]], int]:
    """Return the bytes of gradients by (home, ranks). The `ranks` reduce these gradients together.
    `home` is the only stage that uses the parameters, if it runs on exactly these ranks; its last
    backward then completes the gradients. Otherwise `home` is None.

    `shared` is True if the optimizer state is sharded over the ranks. The bytes then include the
    padding that makes the shards of a bucket equally long.
    """
    blocks = tuple(shards_on_several_ranks(parameters, shards))
    found: defaultdict[tuple[int | None, tuple[int, ...]], int] = defaultdict(int)
    if shared:
        for bucket in make_buckets(blocks):
            found[bucket.home, bucket.ranks] += bucket.bytes
    else:
        for block in blocks:
            found[block.home, block.ranks] += block.elements * block.itemsize
    return found


def communication_bytes(
    graph: Graph,
    placement: Placement,
    micro_batches: int,
    devices: int,
    loss: str | None,
    shard: bool = False,
    precision: str = "fp32",
) -> dict[str, int]:
    """Return the bytes that all devices together move in one step, by kind of communication.

    The step trains with the value `loss`, or is inference if `loss` is None. `shard` is True if the
    optimizer state is sharded (ZeRO stage 1). Raises CodegenError for splits that cannot be
    executed.
    """
    parts = program_parts(graph, placement, devices, loss, precision)
    total: Counter[str] = Counter()
    for own, stage in zip(parts.graphs, parts.stages, strict=True):
        times = len(
            range(stage.code.pipeline, micro_batches * stage.code.ratio, placement.pipelines)
        )
        again = recomputed_segments(stage.code)
        for each in stage_exchanges(own, stage.code, parts.differentiable):
            repeats = 1 + (not each.backward and each.segment in again)
            total[each.kind] += times * repeats * each.bytes
    total["send"] = 0
    for piece in parts.pieces:
        if piece.source_rank != piece.target_rank:
            code = parts.stages[piece.source_stage].code
            times = len(
                range(
                    code.pipeline,
                    micro_batches * code.ratio,
                    placement.pipelines * piece.source_slice.of,
                )
            )
            total["send"] += times * (1 + piece.needs_gradient) * piece.bytes
    for rank, own_shards in enumerate(parts.shards if loss is not None else ()):
        # The first rank of a group counts the group, so that no group counts twice.
        first = (each for each in own_shards if each.gradient_ranks[0] == rank)
        exchanged = gradient_bytes_by_ranks(graph.parameters, first, shard)
        size = sum(len(ranks) * count for (_, ranks), count in exchanged.items())
        # If the optimizer state is sharded, the all-gather of the parameters moves the same number
        # of bytes again.
        total += Counter(gradient=size, parameter=size * shard)
    return order_by_kind(total)


@dataclass(frozen=True, slots=True)
class StageExchange:
    """A collective among the devices of a stage, in the forward or backward of one micro-batch."""

    kind: str
    bytes: int
    """Sum of the bytes over all devices of the stage."""
    backward: bool
    value: str
    """Local name of the value whose layout changes, or of a result of the operator that runs the
    collective.
    """
    over: MeshAxes
    """Mesh axes of the stage's devices that the collective communicates over."""
    times: int = 1
    """Number of times that the collective runs per micro-batch; `bytes` is the sum over all of
    them.
    """
    segment: int = 0
    """Index of the segment in which the collective runs; 0 if the stage does not recompute
    activations. A segment is a range of nodes whose activations are recomputed together.
    """


def stage_exchanges(
    graph: Graph, code: StageCode, differentiable: frozenset[str]
) -> Iterator[StageExchange]:
    """Yield the collectives among the devices of a stage, in the order of its operations. The
    backward of a collective follows its forward.

    Slicing a replicated value sends no bytes, so it is omitted. `differentiable` are the values
    with a gradient.
    """
    if len(code.devices) == 1:
        return
    flowing = values_with_gradient(code, differentiable)
    for segment, operations in enumerate(code.by_segment()):
        for exchange in _exchanges_of_operations(graph, code, operations, flowing):
            yield replace(exchange, segment=segment)


def _exchanges_of_operations(
    graph: Graph, code: StageCode, operations: Iterable[Operation], flowing: Set[str]
) -> Iterator[StageExchange]:
    """Yield the collectives of the given operations of a stage. `flowing` are the local names of
    the values that receive a gradient.
    """
    group = len(code.devices)
    for operation in operations:
        if isinstance(operation, Collective) and operation.relayout.kind != "slice":
            source = operation.source
            step = operation.relayout
            if step.kind == "redistribute":
                missing = missing_elements(step.source, step.result, group)
                size = int(missing.sum()) * operation.itemsize
            else:
                # An all-gather counts the bytes of its result. Other collectives count the bytes of
                # their operand.
                counted = operation.result if step.kind == "all_gather" else source
                size = group * counted.elements * operation.itemsize
            exchange = StageExchange(step.kind, size, False, source.name, step.over)
            yield exchange
            if operation.result.name in flowing:
                yield replace(exchange, kind=backward_collective(step.kind), backward=True)
        elif not isinstance(operation, Collective) and operation.joint:
            signature = signature_of(graph, graph.nodes[operation.node])
            row = OPERATORS[qualified_name(signature.node)]
            degrees = {split.axis: split.degree for split in operation.splits}
            operands = operation.signature.operands
            for statistic in row.statistics(signature, row.space(signature), degrees):
                # The backward collective of a statistic runs only if a gradient reaches a result of
                # the operator, and if an operand that determines the statistic needs a gradient.
                # Otherwise it sends no bytes.
                through = (operands[index] for index in statistic.through if index < len(operands))
                returns = any(value is not None and value.name in flowing for value in through)
                if not statistic.backward or (returns and not flowing.isdisjoint(operation.writes)):
                    size = group * statistic.times * statistic.bytes
                    over = operation.mesh_of(statistic.axes)
                    yield StageExchange(
                        statistic.kind,
                        size,
                        statistic.backward,
                        operation.writes[0],
                        over,
                        statistic.times,
                    )
