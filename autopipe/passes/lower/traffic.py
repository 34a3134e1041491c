"""The bytes that a step's exchanges move, by kind (`ir/program.py`), from the parts its program is
made of.
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
    Block,
    Collective,
    Operation,
    Shard,
    StageCode,
    buckets_of,
    by_kind,
    transposed,
)
from autopipe.passes.analysis.recompute import flowing_values, running_again
from autopipe.passes.lower.lower import parts_of


def held_together(parameters: Sequence[Parameter], shards: Iterable[Shard]) -> Iterator[Block]:
    """The trained blocks among `shards` that several ranks hold."""
    for shard in shards:
        value = parameters[shard.parameter].value
        if (
            len(shard.gradient_ranks) > 1
            and parameters[shard.parameter].trainable
            and value.dtype.is_floating
        ):
            dtype = value.dtype
            ranks = shard.gradient_ranks
            yield Block(
                shard.parameter, shard.box.elements, dtype.value, dtype.itemsize, ranks, shard.home
            )


def exchanged_gradients(
    parameters: Sequence[Parameter], shards: Iterable[Shard], shared: bool
) -> Mapping[tuple[int | None, tuple[int, ...]], int]:
    """Bytes of gradients by the stage whose last backward completes them, if one does, and the
    ranks that add them up.

    What is `shared` out is filled up to equal shares.
    """
    blocks = tuple(held_together(parameters, shards))
    found: defaultdict[tuple[int | None, tuple[int, ...]], int] = defaultdict(int)
    if shared:
        for bucket in buckets_of(blocks):
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
    """Bytes by kind of one step of training with `loss`, or of inference, over all of `devices`.

    With `shard` the optimizer's state is shared out. Raises CodegenError for splits that cannot be
    executed.
    """
    parts = parts_of(graph, placement, devices, loss, precision)
    total: Counter[str] = Counter()
    for own, stage in zip(parts.graphs, parts.stages, strict=True):
        times = len(
            range(stage.code.pipeline, micro_batches * stage.code.ratio, placement.pipelines)
        )
        again = running_again(stage.code)
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
        first = (each for each in own_shards if each.gradient_ranks[0] == rank)  # Each group once.
        exchanged = exchanged_gradients(graph.parameters, first, shard)
        size = sum(len(ranks) * count for (_, ranks), count in exchanged.items())
        # As much is scattered of gradients as is gathered of parameters.
        total += Counter(gradient=size, parameter=size * shard)
    return by_kind(total)


@dataclass(frozen=True, slots=True)
class StageExchange:
    """Exchanges of a stage's group in one micro-batch's forward, or backward."""

    kind: str
    bytes: int
    """Of all its devices."""
    backward: bool
    value: str
    """The value whose layout changes, or that an operator which tells the group something gives."""
    over: MeshAxes
    """The axes of the group's mesh that it goes over."""
    times: int = 1
    segment: int = 0
    """Of a stage that recomputes the one that it belongs to."""


def stage_exchanges(
    graph: Graph, code: StageCode, differentiable: frozenset[str]
) -> Iterator[StageExchange]:
    """Yield the collectives inside a stage's group, in the order of its operations. Slicing a
    replicated value is not one: no byte is sent.
    """
    if len(code.devices) == 1:
        return
    flowing = flowing_values(code, differentiable)
    for segment, operations in enumerate(code.by_segment()):
        for exchange in _exchanges(graph, code, operations, flowing):
            yield replace(exchange, segment=segment)


def _exchanges(
    graph: Graph, code: StageCode, operations: Iterable[Operation], flowing: Set[str]
) -> Iterator[StageExchange]:
    group = len(code.devices)
    for operation in operations:
        if isinstance(operation, Collective) and operation.relayout.kind != "slice":
            source = operation.source
            step = operation.relayout
            if step.kind == "redistribute":
                size = (
                    int(missing_elements(step.source, step.result, group).sum())
                    * operation.itemsize
                )
            else:  # The shard that each device has before the collective; of an all-gather, the one after it.
                counted = operation.result if step.kind == "all_gather" else source
                size = group * counted.elements * operation.itemsize
            exchange = StageExchange(step.kind, size, False, source.name, step.over)
            yield exchange
            if operation.result.name in flowing:
                yield replace(exchange, kind=transposed(step.kind), backward=True)
        elif not isinstance(operation, Collective) and operation.joint:
            signature = signature_of(graph, graph.nodes[operation.node])
            row = OPERATORS[qualified_name(signature.node)]
            degrees = {split.axis: split.degree for split in operation.splits}
            operands = operation.signature.operands
            for told in row.statistics(signature, row.space(signature), degrees):
                # In backward where a gradient that comes back goes to an operand through which the
                # exchange is made.
                through = (operands[index] for index in told.through if index < len(operands))
                returns = any(value is not None and value.name in flowing for value in through)
                if not told.backward or (returns and not flowing.isdisjoint(operation.writes)):
                    size = group * told.times * told.bytes
                    over = operation.mesh_of(told.axes)
                    yield StageExchange(
                        told.kind, size, told.backward, operation.writes[0], over, told.times
                    )
