"""Messages between stages: boxes from the devices that hold them to the devices that need them."""

from __future__ import annotations

from dataclasses import replace

from autopipe.ir.batch import BatchAxes, batch_axes_of
from autopipe.ir.errors import CodegenError
from autopipe.ir.graph import Graph
from autopipe.ir.layout import Box, holders_by_box
from autopipe.ir.placement import Placement
from autopipe.ir.program import MessageBlock
from autopipe.passes.lower.shard import ShardedStage
from autopipe.passes.lower.shared_samples import Shared, shared_blocks


def transfer_pieces(
    graph: Graph, placement: Placement, stages: tuple[ShardedStage, ...], differentiable: frozenset[str]
) -> tuple[MessageBlock, ...]:
    """All pieces that cross between stages, by target stage, then value, then turn, then target rank.

    Raises InfeasibleError for values that cannot be shared out among micro-batches of different sizes.
    """
    producers = {(stage.code.pipeline, name): number for number, stage in enumerate(stages) for name in stage.outputs}
    sizes = [stage.micro_batch_size for stage in placement.stages]
    batch = batch_axes_of(graph) if len(set(sizes)) > 1 else BatchAxes(0, (), {})
    pieces: list[MessageBlock] = []
    for target, stage in enumerate(stages):
        for name, need in stage.inputs.items():
            if graph.producer(name) is not None:
                source = producers[stage.code.pipeline, name]
                hold = stages[source].outputs[name]
                sent, received = (sizes[source], hold.shape), (sizes[target], need.shape)
                for shared in shared_blocks(graph, batch, name, sent, received):
                    pieces.extend(_value_pieces(name, source, target, stages, shared, name in differentiable))
    return tuple(replace(piece, channel=channel) for channel, piece in enumerate(pieces))


def _value_pieces(
    name: str, source: int, target: int, stages: tuple[ShardedStage, ...], shared: Shared, needs_gradient: bool
) -> list[MessageBlock]:
    senders, receivers = stages[source].code.devices, stages[target].code.devices
    hold, need = stages[source].outputs[name], stages[target].inputs[name]
    if hold.is_partial:
        raise CodegenError(f"{name!r} leaves stage {source} as partial sums")
    held = [(box, [senders[place] for place in places]) for box, places in holders_by_box(hold, len(senders))]
    found: dict[Box, list[tuple[Box, list[int], Box]]] = {}
    for own, _ in holders_by_box(need, len(receivers)):
        wanted = own.intersect(shared.received)
        if wanted is not None:
            wanted = wanted.beside(shared.received, shared.sent)
            meeting = ((box, holders, box.intersect(wanted)) for box, holders in held)
            found[own] = [(box, holders, common) for box, holders, common in meeting if common is not None]
    pieces = []
    for position, receiver in enumerate(receivers):
        own = need.box(position)
        # Copies are asked of the holders in turn, so that no one sender serves all receivers.
        for box, holders, common in found.get(own, ()):
            sender = receiver if receiver in holders else holders[position % len(holders)]
            pieces.append(
                MessageBlock(
                    channel=0,
                    tensor=name,
                    source_stage=source,
                    target_stage=target,
                    source_rank=sender,
                    target_rank=receiver,
                    sent=common.within(box),
                    received=common.beside(shared.sent, shared.received).within(own),
                    needs_gradient=needs_gradient,
                    source_turn=shared.source_turn,
                    target_turn=shared.target_turn,
                )
            )
    return pieces
