"""Messages between stages: the blocks that ranks exchange, when receives are posted, and how many are held at once.

Messages of one channel arrive in the order in which they are sent, so a rank asks for them in the order in which the
sending stage runs, whatever its own order (Lin et al., "Tessel", HPCA 2024, section V). A message is held from its
receive's posting to the end of the last task that may use it; that many buffers serve all of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from autopipe.ir.batch import BatchAxes, batch_axes_of
from autopipe.ir.errors import CodegenError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement
from autopipe.ir.program import Channel, Instruction, MessageBlock, StageCode, StageOnRank, Verb
from autopipe.ir.schedule import MicroBatchSlice, Phase, Schedule, Task, sharing
from autopipe.passes.analysis.micro_batches import block_transfers, shared_blocks
from autopipe.passes.lower.shard import ShardedStage


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
            if graph.producer(name) is None:
                continue
            source = producers[stage.code.pipeline, name]
            hold, senders = stages[source].outputs[name], stages[source].code.devices
            blocks = shared_blocks(graph, batch, name, (sizes[source], hold.shape), (sizes[target], need.shape))
            if hold.is_partial:
                raise CodegenError(f"{name!r} leaves stage {source} as partial sums")
            for shared in blocks:
                for sender, receiver, sent, received in block_transfers(
                    hold, need, senders, stage.code.devices, shared
                ):
                    pieces.append(
                        MessageBlock(
                            channel=len(pieces),
                            tensor=name,
                            source_stage=source,
                            target_stage=target,
                            source_rank=sender,
                            target_rank=receiver,
                            sent=sent,
                            received=received,
                            needs_gradient=name in differentiable,
                            source_slice=shared.source_slice,
                            target_slice=shared.target_slice,
                        )
                    )
    return tuple(pieces)


_FIRST_USES = {Verb.RECEIVE: (Verb.FORWARD,), Verb.RECEIVE_GRADIENT: (Verb.BACKWARD, Verb.INPUT_GRADIENT)}
_LAST_USES = (Verb.FORWARD, Verb.BACKWARD, Verb.WEIGHT_GRADIENT)
_Receive = tuple[int, Verb, int | None]
"""Stage, verb and source of a receive."""


class HeldMessages:
    """How long a rank holds messages, from the place of their receive among its instructions to that of their last use:
    the first task that uses them where they are put together into a tensor, the last where they are used as they came.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self._spans: dict[tuple[_Receive, bool], list[tuple[int, int, int]]] = defaultdict(list)
        self._overlapping = cache(self._counted)
        places = {(each.verb, each.stage, each.micro_batch): place for place, each in enumerate(instructions)}
        for place, each in enumerate(instructions):
            if each.verb in _FIRST_USES:
                for whole, uses in ((False, _FIRST_USES[each.verb]), (True, _LAST_USES)):
                    end = max(places.get((use, each.stage, each.micro_batch), place) for use in uses)
                    self._spans[(each.stage, each.verb, each.source), whole].append((each.micro_batch, place, end))

    def most(self, stage: int, verb: Verb, source: int, whole: bool, turn: MicroBatchSlice) -> int:
        """The most held at once of what `stage` receives in `turn` from stage `source`, in whole tensors or blocks."""
        return max(self._overlapping((stage, verb, each), whole, turn) for each in (source, None))

    def _counted(self, receive: _Receive, whole: bool, turn: MicroBatchSlice) -> int:
        spans = [each[1:] for each in self._spans.get((receive, whole), ()) if turn.has(each[0])]
        # One that begins where another ends does not overlap it.
        changes = sorted(change for start, end in spans for change in ((start, 1), (end, -1)))
        return max(accumulate(change for _, change in changes), default=0)


def channels_of(
    pieces: Iterable[MessageBlock], stages: Sequence[StageCode], held: Sequence[HeldMessages]
) -> tuple[Channel, ...]:
    """The channels between different ranks; `held` is by rank."""
    found = []
    for piece in pieces:
        source, target = piece.source_rank, piece.target_rank
        if source == target:
            continue
        whole = is_whole(stages, piece, gradient=False)
        buffers = held[target].most(piece.target_stage, Verb.RECEIVE, piece.source_stage, whole, piece.target_slice)
        gradients = 0
        if piece.needs_gradient:
            verb, turn = Verb.RECEIVE_GRADIENT, piece.source_slice
            whole = is_whole(stages, piece, gradient=True)
            gradients = held[source].most(piece.source_stage, verb, piece.target_stage, whole, turn)
        found.append(Channel(piece.channel, source, target, buffers, gradients))
    return tuple(found)


def is_whole(stages: Sequence[StageCode], piece: MessageBlock, gradient: bool) -> bool:
    """True if a message is used as it came, not put together with others into a tensor of their own."""
    values = stages[piece.source_stage].outputs if gradient else stages[piece.target_stage].inputs
    box = piece.sent if gradient else piece.received
    return box.shape == next(value.shape for value in values if value.name == piece.tensor)


RECEIVED_BY = {
    Phase.FORWARD: Verb.RECEIVE,
    Phase.BACKWARD: Verb.RECEIVE_GRADIENT,
    Phase.INPUT_GRADIENT: Verb.RECEIVE_GRADIENT,
}
"""How a task's input is received; a task of the same kind on another stage sends it."""


class SendingOrders:
    """The order in which each stage of a schedule sends; the devices of a stage run its tasks together, so it has one.

    `ratios` are the micro-batches that each stage makes of one of the program's.
    """

    def __init__(self, schedule: Schedule, ratios: tuple[int, ...]) -> None:
        self._ratios = ratios
        self._sent: dict[tuple[int, Verb], dict[int, None]] = defaultdict(dict)
        for order in schedule.tasks:
            for task in order:
                if task.phase in RECEIVED_BY:
                    self._sent[task.stage, RECEIVED_BY[task.phase]][task.micro_batch] = None

    def reaching(self, stage: int, verb: Verb, source: int) -> tuple[int, ...]:
        """The micro-batches of `stage` in the order in which all is there that they need of `source`.

        A stage whose pipeline gets no micro-batch, since the step has too few, sends nothing.
        """
        sent = tuple(self._sent.get((source, verb), ()))
        own, other = self._ratios[stage], self._ratios[source]
        if own == other:
            return sent
        last = {reached: place for place, each in enumerate(sent) for reached in sharing(each, other, own)}
        return tuple(sorted(last, key=lambda each: (last[each], each)))


@dataclass(frozen=True, slots=True)
class RankPeers:
    """Messages that a rank exchanges with others; values between its own stages are handed over, not sent."""

    sends: frozenset[tuple[int, Verb]]
    """(stage, verb) that send anything."""
    receives: frozenset[tuple[int, Verb, int]]
    """(stage, verb, stage that sends) of all that comes from other ranks."""

    @staticmethod
    def of(wired: Iterable[StageOnRank]) -> RankPeers:
        sends: set[tuple[int, Verb]] = set()
        receives: set[tuple[int, Verb, int]] = set()
        for stage in wired:
            for piece in (*stage.receives, *stage.sends):
                if piece.source_rank == piece.target_rank:
                    continue
                if piece.target_stage == stage.stage:
                    receives.add((stage.stage, Verb.RECEIVE, piece.source_stage))
                    if piece.needs_gradient:
                        sends.add((stage.stage, Verb.SEND_GRADIENT))
                else:
                    sends.add((stage.stage, Verb.SEND))
                    if piece.needs_gradient:
                        receives.add((stage.stage, Verb.RECEIVE_GRADIENT, piece.target_stage))
        return RankPeers(frozenset(sends), frozenset(receives))


def postings(tasks: Sequence[Task], peers: RankPeers, orders: SendingOrders) -> list[list[Instruction]]:
    """For each task the receives that the rank posts before the task computes.

    What a task needs is received one task ahead, so that it travels while the previous task computes; earlier where
    the sender sends something before it that is received earlier. All sources of a stage are received from at once
    where they send in one order.
    """
    used = {
        (task.stage, RECEIVED_BY[task.phase], task.micro_batch): position
        for position, task in enumerate(tasks)
        if task.phase in RECEIVED_BY
    }
    sources: dict[tuple[int, Verb], list[int]] = {}
    for stage, verb, source in sorted(peers.receives, key=lambda each: (each[0], each[1].value, each[2])):
        sources.setdefault((stage, verb), []).append(source)
    due: list[tuple[int, Instruction]] = []
    for (stage, verb), several in sources.items():
        sent: dict[int | None, tuple[int, ...]] = {each: orders.reaching(stage, verb, each) for each in several}
        if len(set(sent.values())) == 1:
            sent = {None: sent[several[0]]}
        for one, order in sent.items():
            places = [used[stage, verb, micro_batch] for micro_batch in order]
            latest = list(accumulate(reversed(places), min))[::-1]
            due += [(place, Instruction(verb, stage, each, one)) for place, each in zip(latest, order, strict=True)]
    found: list[list[Instruction]] = [[] for _ in tasks]
    for position, instruction in sorted(due, key=lambda each: each[0]):
        found[max(position - 1, 0)].append(instruction)
    return found
