"""Messages between stages: the blocks that ranks exchange, when receives are posted, and how many
are held at once.

A rank posts its receives from another rank in the order in which that one sends to it, whatever its
own order (Lin et al., "Tessel", HPCA 2024, section V): NCCL matches what two ranks send each other
by order alone. A message is held from its receive's posting to the end of the last task that may
use it; that many buffers serve all of a step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from autopipe.ir.batch import BatchAxes, batch_axes_of
from autopipe.ir.errors import CodegenError
from autopipe.ir.graph import DType, Graph
from autopipe.ir.placement import Placement
from autopipe.ir.program import (
    Channel,
    Instruction,
    MessageBlock,
    Section,
    StageCode,
    StageOnRank,
    Verb,
)
from autopipe.ir.schedule import MicroBatchSlice, Phase, Schedule, Task
from autopipe.passes.analysis.micro_batches import Shared, block_transfers, shared_blocks
from autopipe.passes.lower.shard import ShardedStage


def transfer_pieces(
    graph: Graph,
    placement: Placement,
    stages: tuple[ShardedStage, ...],
    differentiable: frozenset[str],
    types: Mapping[str, DType],
) -> tuple[MessageBlock, ...]:
    """All pieces that cross between stages, by target stage, source stage, turns of both, value,
    and target rank: the order in which a task sends them. `types` are those of messages, by value.

    Raises InfeasibleError for values that cannot be shared out among micro-batches of different
    sizes.
    """
    producers = {
        (stage.code.pipeline, name): number
        for number, stage in enumerate(stages)
        for name in stage.outputs
    }
    sizes = [stage.micro_batch_size for stage in placement.stages]
    batch = batch_axes_of(graph) if len(set(sizes)) > 1 else BatchAxes(0, (), {})
    pieces: list[MessageBlock] = []
    for target, stage in enumerate(stages):
        found: list[tuple[int, Shared, str]] = []
        for name in (name for name in stage.inputs if graph.producer(name) is not None):
            source = producers[stage.code.pipeline, name]
            need = stage.inputs[name]
            hold = stages[source].outputs[name]
            if hold.is_partial:
                raise CodegenError(f"{name!r} leaves stage {source} as partial sums")
            ends = (sizes[source], hold.shape), (sizes[target], need.shape)
            found += ((source, shared, name) for shared in shared_blocks(graph, batch, name, *ends))
        found.sort(
            key=lambda each: (each[0], each[1].target_slice.index, each[1].source_slice.index)
        )
        for source, shared, name in found:
            hold = stages[source].outputs[name]
            senders = stages[source].code.devices
            for sender, receiver, sent, received in block_transfers(
                hold, stage.inputs[name], senders, stage.code.devices, shared
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
                        dtype=types[name],
                        source_slice=shared.source_slice,
                        target_slice=shared.target_slice,
                    )
                )
    return tuple(pieces)


_FIRST_USES = {
    Verb.RECEIVE: (Verb.FORWARD,),
    Verb.RECEIVE_GRADIENT: (Verb.BACKWARD, Verb.INPUT_GRADIENT),
}
_LAST_USES = (Verb.FORWARD, Verb.BACKWARD, Verb.WEIGHT_GRADIENT)


@dataclass(frozen=True, slots=True)
class Incoming:
    """All that a stage receives from another one for some of its micro-batches: values, or
    gradients of its own.
    """

    stage: int
    verb: Verb
    source: int
    own: MicroBatchSlice
    """The stage's micro-batches that take something of it."""
    sent: MicroBatchSlice
    """The source's micro-batches that give it."""

    @staticmethod
    def of(piece: MessageBlock, gradient: bool) -> Incoming:
        source = (piece.source_stage, piece.source_slice)
        target = (piece.target_stage, piece.target_slice)
        if gradient:
            return Incoming(source[0], Verb.RECEIVE_GRADIENT, target[0], source[1], target[1])
        return Incoming(target[0], Verb.RECEIVE, source[0], target[1], source[1])

    @property
    def part(self) -> int | None:
        return self.sent.index if self.sent.of > 1 else None

    def key(self) -> tuple[int, str, int, int, int]:
        return self.stage, self.verb.value, self.source, self.own.index, self.sent.index


_Receive = tuple[int, Verb, int | None, int | None]
"""Stage, verb, source and part of a receive."""


class HeldMessages:
    """How long a rank holds messages, from the place of their receive among its instructions to
    that of their last use: the first task that uses them where they are put together into a tensor,
    the last where they are used as they came.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self._spans: dict[tuple[_Receive, bool], list[tuple[int, int, int]]] = defaultdict(list)
        self._overlapping = cache(self._counted)
        places = {
            (each.verb, each.stage, each.micro_batch): place
            for place, each in enumerate(instructions)
        }
        for place, each in enumerate(instructions):
            if each.verb in _FIRST_USES:
                for whole, uses in ((False, _FIRST_USES[each.verb]), (True, _LAST_USES)):
                    end = max(
                        places.get((use, each.stage, each.micro_batch), place) for use in uses
                    )
                    receive = each.stage, each.verb, each.source, each.part
                    self._spans[receive, whole].append((each.micro_batch, place, end))

    def most(self, incoming: Incoming, whole: bool) -> int:
        """The most held at once of what a stage receives, in whole tensors or blocks."""
        stage = incoming.stage
        verb = incoming.verb
        return max(
            self._overlapping((stage, verb, source, incoming.part), whole, incoming.own)
            for source in (incoming.source, None)
        )

    def _counted(self, receive: _Receive, whole: bool, turn: MicroBatchSlice) -> int:
        spans = [each[1:] for each in self._spans.get((receive, whole), ()) if turn.has(each[0])]
        # One that begins where another ends does not overlap it.
        changes = sorted(change for start, end in spans for change in ((start, 1), (end, -1)))
        return max(accumulate(change for _, change in changes), default=0)


@dataclass(frozen=True, slots=True)
class RankStep:
    """A rank's step, and how long it holds messages in it."""

    instructions: tuple[Instruction, ...]
    sections: tuple[Section, Section, Section]
    held: HeldMessages


def channels_of(
    wired: Sequence[Sequence[StageOnRank]], stages: Sequence[StageCode], steps: Sequence[RankStep]
) -> tuple[Channel, ...]:
    """The channels between different ranks, from what is sent and received by each and what each
    does in a step.
    """
    found = []
    pieces = {each.channel: each for own in wired for stage in own for each in stage.sends}
    for _, piece in sorted(pieces.items()):
        source = piece.source_rank
        target = piece.target_rank
        if source == target:
            continue
        buffers = steps[target].held.most(
            Incoming.of(piece, False), is_whole(stages, piece, gradient=False)
        )
        gradients = 0
        if piece.needs_gradient:
            gradients = steps[source].held.most(
                Incoming.of(piece, True), is_whole(stages, piece, gradient=True)
            )
        found.append(Channel(piece.channel, source, target, buffers, gradients))
    return tuple(found)


def is_whole(stages: Sequence[StageCode], piece: MessageBlock, gradient: bool) -> bool:
    """True if a message is used as it came, neither put together with others into a tensor of their
    own nor widened.
    """
    values = stages[piece.source_stage].outputs if gradient else stages[piece.target_stage].inputs
    value = next(each for each in values if each.name == piece.tensor)
    box = piece.sent if gradient else piece.received
    return box.shape == value.shape and piece.dtype is value.dtype


RECEIVED_BY = {
    Phase.FORWARD: Verb.RECEIVE,
    Phase.BACKWARD: Verb.RECEIVE_GRADIENT,
    Phase.INPUT_GRADIENT: Verb.RECEIVE_GRADIENT,
}
"""How a task's input is received; a task of the same kind on another stage sends it."""


class SendingOrders:
    """The order in which stages send; the devices of a stage run its tasks together, so it has
    one.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._places: dict[tuple[int, Verb], dict[int, int]] = defaultdict(dict)
        """By micro-batch, where the task that sends stands in one order of the tasks of all ranks.
        """
        for place, task in enumerate(_joint_order(dict.fromkeys(schedule.tasks))):
            if task.phase in RECEIVED_BY:
                self._places[task.stage, RECEIVED_BY[task.phase]][task.micro_batch] = place

    def reaching(self, incoming: Incoming) -> Iterator[tuple[int, int]]:
        """(place of the task that sends, micro-batch of the stage that receives) of all that comes.

        A stage whose pipeline gets no micro-batch, since the step has too few, sends nothing.
        """
        for micro_batch, place in self._places.get((incoming.source, incoming.verb), {}).items():
            if incoming.sent.has(micro_batch):
                yield place, incoming.own.micro_batch(incoming.sent.message(micro_batch))


def _joint_order(lists: Collection[tuple[Task, ...]]) -> Iterator[Task]:
    """All ranks' tasks in an order that keeps to each rank's own. It ends early where there is
    none.
    """
    left = Counter(task for tasks in lists for task in tasks)
    rests = defaultdict[Task, list[Iterator[Task]]](list)
    """By task, the ranks that come to it next."""
    awake = [iter(tasks) for tasks in lists]
    while awake:
        for rest in awake:
            if (task := next(rest, None)) is not None:
                rests[task].append(rest)
        done = [task for task, waiting in rests.items() if len(waiting) == left[task]]
        yield from done
        awake = [rest for task in done for rest in rests.pop(task)]


@dataclass(frozen=True, slots=True)
class RankPeers:
    """Messages that a rank exchanges with others; values between its own stages are handed over,
    not sent.
    """

    sends: frozenset[tuple[int, Verb]]
    """(stage, verb) that send anything."""
    receives: tuple[tuple[Incoming, frozenset[int]], ...]
    """All that comes from other ranks, in order, and from which. Those ranks are numbered as they
    appear, so that ranks which do the same are equal.
    """

    @staticmethod
    def of(wired: Iterable[StageOnRank]) -> RankPeers:
        sends: set[tuple[int, Verb]] = set()
        receives: dict[Incoming, set[int]] = defaultdict(set)
        for stage in wired:
            for piece in (*stage.receives, *stage.sends):
                if piece.source_rank == piece.target_rank:
                    continue
                if piece.target_stage == stage.stage:
                    receives[Incoming.of(piece, False)].add(piece.source_rank)
                    if piece.needs_gradient:
                        sends.add((stage.stage, Verb.SEND_GRADIENT))
                else:
                    sends.add((stage.stage, Verb.SEND))
                    if piece.needs_gradient:
                        receives[Incoming.of(piece, True)].add(piece.target_rank)
        numbers: dict[int, int] = {}
        found = []
        for incoming in sorted(receives, key=Incoming.key):
            places = frozenset(
                numbers.setdefault(rank, len(numbers)) for rank in sorted(receives[incoming])
            )
            found.append((incoming, places))
        return RankPeers(frozenset(sends), tuple(found))


def postings(
    tasks: Sequence[Task], peers: RankPeers, orders: SendingOrders
) -> list[list[Instruction]]:
    """For each task the receives that the rank posts before the task computes.

    What a task needs is received one task ahead, so that it travels while the previous task
    computes; earlier where the same rank sends something before it that is received earlier. A
    stage receives from all its sources at once where they send in one order and nothing else comes
    from their ranks.
    """
    used = {
        (task.stage, RECEIVED_BY[task.phase], task.micro_batch): position
        for position, task in enumerate(tasks)
        if task.phase in RECEIVED_BY
    }
    due = []
    for incoming, source, ranks in _together(peers, orders):
        for sent, micro_batch in orders.reaching(incoming):
            each = Instruction(incoming.verb, incoming.stage, micro_batch, source, incoming.part)
            due.append((sent, each, ranks))
    # A task sends to the stages of a rank in the order of their numbers, to each in that of its
    # micro-batches.
    due.sort(key=lambda each: (each[0], each[1].stage, each[1].micro_batch))
    found: list[list[Instruction]] = [[] for _ in tasks]
    latest: dict[int, int] = {}
    for _, each, ranks in reversed(due):
        last = used[each.stage, each.verb, each.micro_batch]
        position = min(last, *(latest.get(rank, last) for rank in ranks))
        latest.update(dict.fromkeys(ranks, position))
        found[max(position - 1, 0)].append(each)
    return [received[::-1] for received in found]


def _together(
    peers: RankPeers, orders: SendingOrders
) -> Iterator[tuple[Incoming, int | None, frozenset[int]]]:
    """By receive, all that it takes, the stage that it is from and the ranks. It is from all
    sources of a stage, None, where there is one, or they send in one order and their ranks send
    nothing else.
    """
    senders = Counter(
        rank
        for rank, *_ in {
            (rank, *each.key()[:3]) for each, ranks in peers.receives for rank in ranks
        }
    )
    sources: dict[tuple[int, Verb], dict[int, list[tuple[Incoming, frozenset[int]]]]] = defaultdict(
        dict
    )
    for incoming, ranks in peers.receives:
        sources[incoming.stage, incoming.verb].setdefault(incoming.source, []).append(
            (incoming, ranks)
        )
    for several in sources.values():
        first = next(iter(several.values()))
        ranks = frozenset[int]().union(*(own for entries in several.values() for _, own in entries))
        orderly = len({_sequence(entries, orders) for entries in several.values()}) == 1
        if len(several) == 1:
            yield from ((incoming, None, own) for incoming, own in first)
        elif orderly and all(senders[rank] == 1 for rank in ranks):
            yield from ((incoming, None, ranks) for incoming, _ in first)
        else:
            yield from (
                (incoming, source, own)
                for source, each in several.items()
                for incoming, own in each
            )


def _sequence(
    entries: Iterable[tuple[Incoming, frozenset[int]]], orders: SendingOrders
) -> tuple[tuple[int, int | None], ...]:
    """Micro-batch and part of all that comes, in the order in which it is sent."""
    every = (
        (place, each, incoming.part)
        for incoming, _ in entries
        for place, each in orders.reaching(incoming)
    )
    return tuple((each, part) for _, each, part in sorted(every, key=lambda found: found[:2]))
