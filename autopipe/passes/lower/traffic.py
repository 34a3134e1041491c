"""The bytes that a step's exchanges will move, by kind (`ir/traffic.py`), from the parts its program is made of."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace

from autopipe.ir.graph import Graph
from autopipe.ir.layout import MeshAxes
from autopipe.ir.ops import OPERATORS, operator_of, qualified_name, signature_of
from autopipe.ir.ops.statistics import Statistic
from autopipe.ir.placement import Placement
from autopipe.ir.program import Collective, Compute, StageCode
from autopipe.ir.traffic import by_kind, transposed
from autopipe.ir.volume import lacking
from autopipe.passes.lower.buckets import end_bytes
from autopipe.passes.lower.parts import Parts, parts_of


def communication_bytes(
    graph: Graph,
    placement: Placement,
    micro_batches: int,
    devices: int,
    loss: str | None,
    widths: Mapping[str, int] | None = None,
    shard: bool = False,
) -> dict[str, int]:
    """Bytes by kind of one step of training with `loss`, or of inference, over all of `devices`.

    `widths` are bytes an element by value, where a program's precision makes them other than the values' types; with
    `shard` the optimizer's state is shared out. Raises CodegenError for splits that cannot be executed.
    """
    parts = parts_of(graph, placement, devices, loss)
    total: Counter[str] = Counter()
    for own, stage in zip(parts.graphs, parts.stages, strict=True):
        forward, backward = _stage_bytes(own, stage.code, parts.differentiable, widths or {})
        times = len(range(stage.code.pipeline, micro_batches * stage.code.turns, placement.pipelines))
        again = stage.code.recompute and loss is not None
        for kind in forward | backward:
            total[kind] += times * ((1 + again) * forward[kind] + backward[kind])
    total["send"] = _sent_bytes(graph, parts, placement, micro_batches)
    if loss is not None:
        total += end_bytes(graph.parameters, parts.shards, shard)
    return by_kind(total)


@dataclass(frozen=True, slots=True)
class StageExchange:
    """What a stage's group exchanges in one micro-batch's forward, or backward."""

    kind: str
    bytes: int
    """Of all its devices."""
    backward: bool
    value: str
    """The value whose layout changes, or that an operator which tells the group something gives."""
    over: MeshAxes
    """The axes of the group's mesh that it goes over."""
    times: int = 1


def stage_exchanges(
    graph: Graph, code: StageCode, differentiable: frozenset[str], widths: Mapping[str, int]
) -> Iterator[StageExchange]:
    """The exchanges inside a stage's group, in the order of its operations; cutting a copy is none."""
    group = len(code.devices)
    if group == 1:
        return
    flowing = _flowing(code, differentiable)
    for operation in code.operations:
        if isinstance(operation, Collective):
            size = _elements(operation, group) * _width(operation, widths)
            exchange = StageExchange(operation.kind, size, False, operation.source.name, operation.relayout.over)
            if operation.kind != "slice":
                yield exchange
            if operation.result.name in flowing and operation.kind != "slice":
                yield replace(exchange, kind=transposed(operation.kind), backward=True)
        elif operation.joint:
            signature = signature_of(graph, graph.nodes[operation.node])
            row = OPERATORS[qualified_name(signature.node)]
            degrees = {split.axis: split.degree for split in operation.splits}
            for told in row.statistics(signature, row.space(signature), degrees):
                if not told.backward or _is_asked(operation, told, flowing):
                    size, over = group * told.times * told.bytes, operation.mesh_of(told.axes)
                    yield StageExchange(told.kind, size, told.backward, operation.writes[0], over, told.times)


def _stage_bytes(
    graph: Graph, code: StageCode, differentiable: frozenset[str], widths: Mapping[str, int]
) -> tuple[Counter[str], Counter[str]]:
    """One micro-batch's forward and backward inside a stage's group."""
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    for each in stage_exchanges(graph, code, differentiable, widths):
        (backward if each.backward else forward)[each.kind] += each.bytes
    return forward, backward


def _is_asked(operation: Compute, told: Statistic, flowing: Set[str]) -> bool:
    """Whether a gradient that comes back to an operator goes where it makes the exchange."""
    operands = operation.signature.operands
    through = (operands[index] for index in told.through if index < len(operands))
    return not flowing.isdisjoint(operation.writes) and any(
        value is not None and value.name in flowing for value in through
    )


def _width(operation: Collective, widths: Mapping[str, int]) -> int:
    """Bytes of an element of the value that is exchanged, whichever form of it."""
    return widths.get(operation.source.name.partition("\0")[0], operation.source.dtype.itemsize)


def _elements(operation: Collective, group: int) -> int:
    """Elements that all devices of the group count for a collective."""
    step = operation.relayout
    if step.kind == "slice":
        return 0
    if step.kind == "redistribute":
        return int(lacking(step.source, step.result, group).sum())
    counted = operation.result if step.kind == "all_gather" else operation.source
    return group * math.prod(counted.shape)


def _flowing(code: StageCode, differentiable: frozenset[str]) -> set[str]:
    """The stage's values, by their local names, that a gradient comes back to: autograd runs no other backward.

    They depend on something that wants a gradient, and something that the stage gives depends on them.
    """
    read = (*code.inputs, *(value for _, value in code.parameters))
    wanting = {value.name for value in read if value.name in differentiable}
    for operation in code.operations:
        if _passes_gradients(operation) and not wanting.isdisjoint(operation.reads):
            wanting.update(_floating(operation))
    flowing = wanting & {value.name for value in code.outputs}
    for operation in reversed(code.operations):
        if _passes_gradients(operation) and not flowing.isdisjoint(operation.writes):
            flowing.update(wanting.intersection(operation.reads))
    return flowing


def _passes_gradients(operation: Compute | Collective) -> bool:
    if isinstance(operation, Collective):
        return True
    row = operator_of(operation.signature.node)
    return row is not None and row.differentiable


def _floating(operation: Compute | Collective) -> Iterable[str]:
    """The results that can have a gradient."""
    results = (operation.result,) if isinstance(operation, Collective) else operation.signature.results
    return (value.name for value in results if value is not None and value.dtype.is_floating)


def _sent_bytes(graph: Graph, parts: Parts, placement: Placement, micro_batches: int) -> int:
    """Messages of a step between the devices of different stages, and their gradients."""
    total = 0
    for piece in parts.pieces:
        if piece.source_rank != piece.target_rank:
            code = parts.stages[piece.source_stage].code
            sent = range(code.pipeline, micro_batches * code.turns, placement.pipelines * piece.source_turn.of)
            times = len(sent)
            size = piece.sent.elements * graph.type_of(piece.tensor).dtype.itemsize
            total += times * (1 + piece.needs_gradient) * size
    return total
