"""What stages send one another: boxes from the devices that hold them to the devices that need them."""

from __future__ import annotations

from dataclasses import replace

from autopipe.ir.errors import CodegenError
from autopipe.ir.graph import Graph
from autopipe.ir.layout import Layout
from autopipe.ir.program import Piece
from autopipe.passes.lower.shard import ShardedStage


def transfer_pieces(
    graph: Graph, stages: tuple[ShardedStage, ...], differentiable: frozenset[str]
) -> tuple[Piece, ...]:
    """All pieces that cross between stages in one micro-batch, by target stage, then value, then target rank."""
    producers = {(stage.code.pipeline, name): number for number, stage in enumerate(stages) for name in stage.outputs}
    pieces: list[Piece] = []
    for target, stage in enumerate(stages):
        for name, need in stage.inputs.items():
            if graph.producer(name) is not None:
                source = producers[stage.code.pipeline, name]
                pieces.extend(_value_pieces(name, source, target, stages, need, name in differentiable))
    return tuple(replace(piece, channel=channel) for channel, piece in enumerate(pieces))


def _value_pieces(
    name: str, source: int, target: int, stages: tuple[ShardedStage, ...], need: Layout, needs_gradient: bool
) -> list[Piece]:
    senders, receivers = stages[source].code.devices, stages[target].code.devices
    hold = stages[source].outputs[name]
    if hold.is_partial:
        raise CodegenError(f"{name!r} leaves stage {source} as partial sums")
    held = [hold.box(position) for position in range(len(senders))]
    pieces = []
    for position, receiver in enumerate(receivers):
        wanted = need.box(position)
        # Copies are asked of the holders in turn, so that no one sender serves all receivers.
        for box in dict.fromkeys(held):
            common = box.intersect(wanted)
            if common is None:
                continue
            holders = [rank for rank, own in zip(senders, held, strict=True) if own == box]
            sender = receiver if receiver in holders else holders[position % len(holders)]
            pieces.append(
                Piece(
                    channel=0,
                    tensor=name,
                    source_stage=source,
                    target_stage=target,
                    source_rank=sender,
                    target_rank=receiver,
                    sent=common.within(box),
                    received=common.within(wanted),
                    needs_gradient=needs_gradient,
                )
            )
    return pieces
