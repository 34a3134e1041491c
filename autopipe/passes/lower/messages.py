"""Messages between stages: the blocks that ranks exchange, when receives are posted, and how many are held at once.

Messages of one channel arrive in the order in which they are sent, so a rank asks for them in the order in which the
sending stage runs, whatever its own order (Lin et al., "Tessel", HPCA 2024, section V). A message is held from its
receive's posting to the end of the last task that may use it; that many buffers serve all of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopipe.ir.batch import BatchAxes, batch_axes_of
from autopipe.ir.errors import CodegenError
from autopipe.ir.graph import Graph, Value
from autopipe.ir.layout import Box, holders_by_box
from autopipe.ir.placement import Placement
from autopipe.ir.program import (
    Channel,
    Instruction,
    Loop,
    MessageBlock,
    Program,
    RankCode,
    StageCode,
    StageOnRank,
    Verb,
)
from autopipe.ir.schedule import MicroBatchSlice, Phase, Schedule, Task, sharing
from autopipe.ir.task_graph import MessageEnd
from autopipe.passes.analysis.micro_batches import Shared, shared_blocks
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


_FIRST_USES = {Verb.RECEIVE: (Verb.FORWARD,), Verb.RECEIVE_GRADIENT: (Verb.BACKWARD, Verb.INPUT_GRADIENT)}
_LAST_USES = (Verb.FORWARD, Verb.BACKWARD, Verb.WEIGHT_GRADIENT)

_Asked = tuple[int, Verb, int | None]
"""Stage, verb and source of a receive."""


@dataclass(frozen=True, slots=True)
class HeldMessages:
    """How long a rank holds messages, by the receive that asks for them: each micro-batch's, from and to which place
    among the rank's instructions.
    """

    in_blocks: dict[_Asked, list[tuple[int, int, int]]]
    whole: dict[_Asked, list[tuple[int, int, int]]]
    _known: dict[tuple[_Asked, bool, MicroBatchSlice], int] = field(default_factory=dict, repr=False)

    def of(self, stage: int, verb: Verb, source: int, whole: bool, turn: MicroBatchSlice) -> int:
        """The most messages held at once of those that `stage` receives in `turn` from stage `source`, in whole tensors
        or in blocks.
        """
        return max(self._most((stage, verb, each), whole, turn) for each in (source, None))

    def _most(self, asked: _Asked, whole: bool, turn: MicroBatchSlice) -> int:
        key = asked, whole, turn
        if key not in self._known:
            spans = (self.whole if whole else self.in_blocks).get(asked, [])
            self._known[key] = _most_at_once((start, end) for each, start, end in spans if turn.has(each))
        return self._known[key]


def held_messages(instructions: Sequence[Instruction]) -> HeldMessages:
    """Messages that one rank's instructions make it hold."""
    places = {(each.verb, each.stage, each.micro_batch): place for place, each in enumerate(instructions)}
    held = HeldMessages({}, {})
    for place, each in enumerate(instructions):
        if each.verb in _FIRST_USES:
            asked = each.stage, each.verb, each.source
            for spans, uses in ((held.in_blocks, _FIRST_USES[each.verb]), (held.whole, _LAST_USES)):
                end = max(places.get((use, each.stage, each.micro_batch), place) for use in uses)
                spans.setdefault(asked, []).append((each.micro_batch, place, end))
    return held


def _most_at_once(spans: Iterable[tuple[int, int]]) -> int:
    """How many spans overlap at most; one that begins where another ends does not overlap it."""
    changes = sorted(change for start, end in spans for change in ((start, 1), (end, -1)))
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def channels_of(
    pieces: Iterable[MessageBlock], stages: Sequence[StageCode], held: Sequence[HeldMessages]
) -> tuple[Channel, ...]:
    """The channels between different ranks; `held` is by rank."""
    found = []
    for piece in pieces:
        source, target = piece.source_rank, piece.target_rank
        if source == target:
            continue
        whole = piece.received.shape == _shape(stages[piece.target_stage].inputs, piece.tensor)
        buffers = held[target].of(piece.target_stage, Verb.RECEIVE, piece.source_stage, whole, piece.target_turn)
        gradients = 0
        if piece.needs_gradient:
            whole = piece.sent.shape == _shape(stages[piece.source_stage].outputs, piece.tensor)
            verb, turn = Verb.RECEIVE_GRADIENT, piece.source_turn
            gradients = held[source].of(piece.source_stage, verb, piece.target_stage, whole, turn)
        found.append(Channel(piece.channel, source, target, buffers, gradients))
    return tuple(found)


def _shape(values: Iterable[Value], name: str) -> tuple[int, ...]:
    return next(value.shape for value in values if value.name == name)


ASKED_FOR = {
    Phase.FORWARD: Verb.RECEIVE,
    Phase.BACKWARD: Verb.RECEIVE_GRADIENT,
    Phase.INPUT_GRADIENT: Verb.RECEIVE_GRADIENT,
}
"""How a task asks for what it needs; a task of the same kind on another stage sends it."""


@dataclass(frozen=True, slots=True)
class SendingOrders:
    """The order in which each stage sends; the devices of a stage run its tasks together, so it has but one."""

    sent: Mapping[tuple[int, Verb], tuple[int, ...]]
    """By stage and verb of the receivers, the micro-batches in that order."""
    turns: tuple[int, ...]
    """Micro-batches that each stage makes of one of the program's."""

    def reaching(self, stage: int, verb: Verb, source: int) -> tuple[int, ...]:
        """The micro-batches of `stage` in the order in which all is there that they need of `source`."""
        sent = self.sent.get((source, verb), ())
        own, other = self.turns[stage], self.turns[source]
        if own == other:
            return sent
        latest: dict[int, int] = {}
        for place, micro_batch in enumerate(sent):
            for reached in sharing(micro_batch, other, own):
                latest[reached] = place
        return tuple(sorted(latest, key=lambda each: (latest[each], each)))


@dataclass(frozen=True, slots=True)
class RankPeers:
    """Ranks that a rank exchanges messages with; values between its own stages are handed over, not sent."""

    sends: frozenset[tuple[int, Verb]]
    """(stage, verb) that send anything."""
    receives: frozenset[tuple[int, Verb, int]]
    """(stage, verb, stage that sends) of all that comes from other ranks."""


def sending_orders(schedule: Schedule, turns: tuple[int, ...]) -> SendingOrders:
    """The order in which each stage of a schedule sends."""
    found: dict[tuple[int, Verb], dict[int, None]] = {}
    for order in schedule.tasks:
        for task in order:
            verb = ASKED_FOR.get(task.phase)
            if verb is not None:
                found.setdefault((task.stage, verb), {})[task.micro_batch] = None
    return SendingOrders({key: tuple(order) for key, order in found.items()}, turns)


def postings(tasks: Sequence[Task], talking: RankPeers, orders: SendingOrders) -> list[list[Instruction]]:
    """For each task what the rank asks for before the task computes.

    What a task needs is asked for one task ahead, so that it travels while the previous task computes; earlier where
    the sender sends something before it that is asked for earlier.
    """
    used = {
        (task.stage, verb, task.micro_batch): position
        for position, task in enumerate(tasks)
        if (verb := ASKED_FOR.get(task.phase)) is not None
    }
    due: list[tuple[int, Instruction]] = []
    for stage, verb, source, order in _sources(talking, orders):
        latest = len(tasks)
        asked = []
        for micro_batch in reversed(order):
            latest = min(latest, used[stage, verb, micro_batch])
            asked.append((latest, Instruction(verb, stage, micro_batch, source)))
        due += reversed(asked)
    found: list[list[Instruction]] = [[] for _ in tasks]
    for position, instruction in sorted(due, key=lambda each: each[0]):
        found[max(position - 1, 0)].append(instruction)
    return found


def _sources(talking: RankPeers, orders: SendingOrders) -> Iterator[tuple[int, Verb, int | None, tuple[int, ...]]]:
    """(stage, verb, source, order) of what is asked for at once: all sources together where they send in one order."""
    sources: dict[tuple[int, Verb], list[int]] = {}
    for stage, verb, source in sorted(talking.receives, key=lambda each: (each[0], each[1].value, each[2])):
        sources.setdefault((stage, verb), []).append(source)
    for (stage, verb), several in sources.items():
        # A stage whose pipeline gets no micro-batch, since the step has too few, sends nothing.
        sent = {source: orders.reaching(stage, verb, source) for source in several}
        if len(set(sent.values())) == 1:
            yield stage, verb, None, sent[several[0]]
        else:
            yield from ((stage, verb, source, order) for source, order in sent.items())


class MessageEnds:
    """The messages of a program's sends and receives."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._apart = {rank.rank: _requested_separately(rank) for rank in program.ranks}
        """By rank, the receives that ask for what one stage sends."""

    def received(self, wired: StageOnRank, asked: Instruction) -> tuple[MessageEnd, ...]:
        """Messages of a receive."""
        if asked.verb is Verb.RECEIVE:
            return tuple(
                MessageEnd(
                    piece.source_rank, piece.channel, piece.tensor, self._bytes(piece),
                    f"{piece.source_stage}SEND_F{self._source(piece, asked.micro_batch)}",
                )
                for piece in _between_ranks(wired.receives)
                if asked.source in (None, piece.source_stage) and piece.target_turn.has(asked.micro_batch)
            )  # fmt: skip
        return tuple(
            MessageEnd(
                piece.target_rank, piece.channel, piece.tensor, self._bytes(piece),
                f"{piece.target_stage}SEND_B{self._target(piece, asked.micro_batch)}",
            )
            for piece in _between_ranks(wired.sends)
            if piece.needs_gradient
            and asked.source in (None, piece.target_stage)
            and piece.source_turn.has(asked.micro_batch)
        )  # fmt: skip

    def sent(self, wired: StageOnRank, sent: Instruction) -> tuple[MessageEnd, ...]:
        """Messages of a send."""
        if sent.verb is Verb.SEND:
            return tuple(
                MessageEnd(
                    piece.target_rank, piece.channel, piece.tensor, self._bytes(piece),
                    self._receive(piece, False, self._target(piece, sent.micro_batch)),
                )
                for piece in _between_ranks(wired.sends)
                if piece.source_turn.has(sent.micro_batch)
            )  # fmt: skip
        return tuple(
            MessageEnd(
                piece.source_rank, piece.channel, piece.tensor, self._bytes(piece),
                self._receive(piece, True, self._source(piece, sent.micro_batch)),
            )
            for piece in _between_ranks(wired.receives)
            if piece.needs_gradient and piece.target_turn.has(sent.micro_batch)
        )  # fmt: skip

    def handed(self, wired: StageOnRank, backward: bool, micro_batch: int) -> Iterator[tuple[int, int]]:
        """The stages of this same rank that give a task something, each with its micro-batch."""
        for piece in wired.sends if backward else wired.receives:
            if piece.source_rank == piece.target_rank and (piece.needs_gradient or not backward):
                if backward and piece.source_turn.has(micro_batch):
                    yield piece.target_stage, self._target(piece, micro_batch)
                elif not backward and piece.target_turn.has(micro_batch):
                    yield piece.source_stage, self._source(piece, micro_batch)

    def receive_name(self, stage: int, gradient: bool, micro_batch: int, source: int | None) -> str:
        """A receive's name: `2RECV_F0`, with `@1` behind it where it asks for what stage 1 alone sends."""
        apart = "" if source is None else f"@{source}"
        return f"{stage}RECV_{'B' if gradient else 'F'}{micro_batch}{apart}"

    def _receive(self, piece: MessageBlock, gradient: bool, micro_batch: int) -> str:
        """The receive, on the other rank, of a message."""
        rank, stage, source = piece.target_rank, piece.target_stage, piece.source_stage
        verb = Verb.RECEIVE
        if gradient:
            rank, stage, source, verb = piece.source_rank, source, stage, Verb.RECEIVE_GRADIENT
        apart = (verb, stage, source) in self._apart[rank]
        return self.receive_name(stage, gradient, micro_batch, source if apart else None)

    @staticmethod
    def _source(piece: MessageBlock, micro_batch: int) -> int:
        """The sender's micro-batch of the message for one of the receiver's."""
        return piece.source_turn.micro_batch(piece.target_turn.message(micro_batch))

    @staticmethod
    def _target(piece: MessageBlock, micro_batch: int) -> int:
        """The receiver's micro-batch of the message of one of the sender's."""
        return piece.target_turn.micro_batch(piece.source_turn.message(micro_batch))

    def _bytes(self, piece: MessageBlock) -> int:
        value = _value(self._program.stages[piece.source_stage].outputs, piece.tensor)
        return piece.sent.elements * value.dtype.itemsize


def is_whole(program: Program, wired: StageOnRank, message: MessageEnd, gradient: bool) -> bool:
    """True if a message is used as it came, not put together with others into a tensor of their own."""
    code = program.stages[wired.stage]
    pieces = wired.sends if gradient else wired.receives
    piece = next(each for each in pieces if each.channel == message.channel)
    if gradient:
        return piece.sent.shape == _value(code.outputs, piece.tensor).shape
    return piece.received.shape == _value(code.inputs, piece.tensor).shape


def _between_ranks(pieces: Iterable[MessageBlock]) -> Iterator[MessageBlock]:
    return (piece for piece in pieces if piece.source_rank != piece.target_rank)


def _value(values: Iterable[Value], name: str) -> Value:
    return next(value for value in values if value.name == name)


def _requested_separately(rank: RankCode) -> frozenset[tuple[Verb, int, int]]:
    found = set()
    for item in (*rank.warm_up, *rank.repetend, *rank.cool_down):
        for each in item.body if isinstance(item, Loop) else (item,):
            if each.source is not None:
                found.add((each.verb, each.stage, each.source))
    return frozenset(found)
