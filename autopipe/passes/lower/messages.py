"""Messages between stages: the slices of tensors that ranks exchange, the position of each receive
among the tasks of a rank, and the number of buffers that a channel needs.

NCCL matches the messages of a pair of ranks by their order alone. A rank therefore posts its
receives from another rank in the order in which that rank sends (Lin et al., "Tessel", HPCA 2024,
section IV-D), even if its own tasks use the messages in another order.

A message occupies a buffer from the post of its receive to the end of the last task that may use
it. A channel has one buffer for each of the messages that occupy buffers at the same time.
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
    MessageSlice,
    Opcode,
    Section,
    StageCode,
    StageOnRank,
)
from autopipe.ir.schedule import MicroBatchSlice, Phase, Schedule, Task
from autopipe.passes.analysis.micro_batches import SharedPart, part_transfers, shared_parts
from autopipe.passes.lower.shard import ShardedStage


def make_message_slices(
    graph: Graph,
    placement: Placement,
    stages: tuple[ShardedStage, ...],
    differentiable: frozenset[str],
    types: Mapping[str, DType],
) -> tuple[MessageSlice, ...]:
    """Return the messages between stages. Messages that one task sends are in the order in which it
    sends them.

    The order is by target stage, source stage, slice of micro-batches of the target, slice of
    micro-batches of the source, value, and target rank. `stages` are the stages on local shards,
    `differentiable` are the values with a gradient, and `types` contains the element type of each
    value in a message.

    Raises CodegenError if a value leaves its stage as partial sums. Raises InfeasibleError if
    stages have different micro-batch sizes and a value cannot be divided by samples.
    """
    producers = {
        (stage.code.pipeline, name): number
        for number, stage in enumerate(stages)
        for name in stage.outputs
    }
    sizes = [stage.micro_batch_size for stage in placement.stages]
    batch = batch_axes_of(graph) if len(set(sizes)) > 1 else BatchAxes(0, (), {})
    pieces: list[MessageSlice] = []
    for target, stage in enumerate(stages):
        found: list[tuple[int, SharedPart, str]] = []
        for name in (name for name in stage.inputs if graph.producer(name) is not None):
            source = producers[stage.code.pipeline, name]
            need = stage.inputs[name]
            hold = stages[source].outputs[name]
            if hold.is_partial:
                raise CodegenError(
                    f"stage {source} sends {name!r} as unreduced partial sums, which is not "
                    "supported"
                )
            ends = (sizes[source], hold.shape), (sizes[target], need.shape)
            found += ((source, shared, name) for shared in shared_parts(graph, batch, name, *ends))
        found.sort(
            key=lambda each: (each[0], each[1].target_slice.index, each[1].source_slice.index)
        )
        for source, shared, name in found:
            hold = stages[source].outputs[name]
            senders = stages[source].code.devices
            for sender, receiver, sent, received in part_transfers(
                hold, stage.inputs[name], senders, stage.code.devices, shared
            ):
                pieces.append(
                    MessageSlice(
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
    Opcode.RECV: (Opcode.FORWARD,),
    Opcode.RECV_GRADIENT: (Opcode.BACKWARD, Opcode.BACKWARD_INPUT),
}
_LAST_USES = (Opcode.FORWARD, Opcode.BACKWARD, Opcode.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True)
class IncomingMessages:
    """The messages that the stage `stage` receives from the stage `source`, for one slice of its
    micro-batches.

    They carry values if `opcode` is RECV, and gradients of values that `stage` has sent if it is
    RECV_GRADIENT.
    """

    stage: int
    opcode: Opcode
    source: int
    own: MicroBatchSlice
    """Micro-batches of `stage` that use the messages."""
    sent: MicroBatchSlice
    """Micro-batches of `source` that produce the messages."""

    @staticmethod
    def of(piece: MessageSlice, gradient: bool) -> IncomingMessages:
        """Return the messages of which `piece` is a part. They carry its gradient, in the opposite
        direction, if `gradient`.
        """
        source = (piece.source_stage, piece.source_slice)
        target = (piece.target_stage, piece.target_slice)
        if gradient:
            return IncomingMessages(
                source[0], Opcode.RECV_GRADIENT, target[0], source[1], target[1]
            )
        return IncomingMessages(target[0], Opcode.RECV, source[0], target[1], source[1])

    @property
    def part(self) -> int | None:
        """Index of the slice of the source's micro-batches that send the messages; None if all
        micro-batches do.
        """
        return self.sent.index if self.sent.of > 1 else None

    def key(self) -> tuple[int, str, int, int, int]:
        """Return the key by which a rank sorts its incoming messages."""
        return self.stage, self.opcode.value, self.source, self.own.index, self.sent.index


_Receive = tuple[int, Opcode, int | None, int | None]
"""Identification of receive instructions: (stage, opcode, source, part). `source` is the sending
stage, None for all sources. `part` is the index of a slice of the micro-batches of the source, None
for all of its micro-batches.
"""


class BufferedMessages:
    """The intervals of a rank's instructions during which its received messages occupy buffers.

    An interval starts with the receive. If the task that first uses the message copies it into a
    larger tensor, the interval ends with this task. If tasks use the buffer itself, the interval
    ends with the last task of the same stage and micro-batch.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self._spans: dict[tuple[_Receive, bool], list[tuple[int, int, int]]] = defaultdict(list)
        self._overlapping = cache(self._max_overlap)
        positions = {
            (each.opcode, each.stage, each.micro_batch): position
            for position, each in enumerate(instructions)
        }
        for position, each in enumerate(instructions):
            if each.opcode in _FIRST_USES:
                for in_place, uses in ((False, _FIRST_USES[each.opcode]), (True, _LAST_USES)):
                    end = max(
                        positions.get((use, each.stage, each.micro_batch), position) for use in uses
                    )
                    receive = each.stage, each.opcode, each.source, each.part
                    self._spans[receive, in_place].append((each.micro_batch, position, end))

    def buffers(self, incoming: IncomingMessages, in_place: bool) -> int:
        """Return the maximum number of the `incoming` messages that occupy buffers at the same
        time.

        `in_place` is True if tasks use the buffers themselves (see `is_used_in_place`).
        """
        stage = incoming.stage
        opcode = incoming.opcode
        return max(
            self._overlapping((stage, opcode, source, incoming.part), in_place, incoming.own)
            for source in (incoming.source, None)
        )

    def _max_overlap(self, receive: _Receive, in_place: bool, own: MicroBatchSlice) -> int:
        """Return the maximum number of intervals that overlap, for the receives `receive` on the
        micro-batches `own`.
        """
        spans = [each[1:] for each in self._spans.get((receive, in_place), ()) if own.has(each[0])]
        # An interval that starts where another interval ends does not overlap it. Sorting places
        # ends (-1) before starts (+1) at equal positions, so the two are not counted together.
        changes = sorted(change for start, end in spans for change in ((start, 1), (end, -1)))
        return max(accumulate(change for _, change in changes), default=0)


@dataclass(frozen=True, slots=True)
class RankStep:
    """The instructions of a rank for one step, flat and folded into sections, and the intervals
    during which its messages occupy buffers.
    """

    instructions: tuple[Instruction, ...]
    sections: tuple[Section, Section, Section]
    held: BufferedMessages


def make_channels(
    wired: Sequence[Sequence[StageOnRank]], stages: Sequence[StageCode], steps: Sequence[RankStep]
) -> tuple[Channel, ...]:
    """Return the channels between different ranks, with the number of buffers at each end.

    `wired` contains the stages of each rank, `stages` the code of all stages, and `steps` the
    instructions of each rank.
    """
    found = []
    pieces = {each.channel: each for own in wired for stage in own for each in stage.sends}
    for _, piece in sorted(pieces.items()):
        source = piece.source_rank
        target = piece.target_rank
        if source == target:
            continue
        buffers = steps[target].held.buffers(
            IncomingMessages.of(piece, False), is_used_in_place(stages, piece, gradient=False)
        )
        gradients = 0
        if piece.needs_gradient:
            gradients = steps[source].held.buffers(
                IncomingMessages.of(piece, True), is_used_in_place(stages, piece, gradient=True)
            )
        found.append(Channel(piece.channel, source, target, buffers, gradients))
    return tuple(found)


def is_used_in_place(stages: Sequence[StageCode], piece: MessageSlice, gradient: bool) -> bool:
    """True if tasks use the buffer of a message itself, without a copy: the message is the complete
    local shard of its value and has the element type of the value. `gradient` is True for the
    gradient that is sent back.
    """
    values = stages[piece.source_stage].outputs if gradient else stages[piece.target_stage].inputs
    value = next(each for each in values if each.name == piece.tensor)
    box = piece.sent if gradient else piece.received
    return box.shape == value.shape and piece.dtype is value.dtype


RECEIVED_BY = {
    Phase.FORWARD: Opcode.RECV,
    Phase.BACKWARD: Opcode.RECV_GRADIENT,
    Phase.INPUT_GRADIENT: Opcode.RECV_GRADIENT,
}
"""For each phase of a task: the instruction that receives its inputs. The sender is a task of the
same phase on another stage.
"""


class SendingOrders:
    """The order in which the stages of a schedule send their results.

    All devices of a stage run its tasks in one order, so each stage has one order of sends.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._positions: dict[tuple[int, Opcode], dict[int, int]] = defaultdict(dict)
        """By (stage, opcode that receives its results): for each micro-batch, the position of the
        sending task in a joint order of the tasks of all ranks.
        """
        for place, task in enumerate(_joint_order(dict.fromkeys(schedule.tasks))):
            if task.phase in RECEIVED_BY:
                self._positions[task.stage, RECEIVED_BY[task.phase]][task.micro_batch] = place

    def positions_of_sends(self, incoming: IncomingMessages) -> Iterator[tuple[int, int]]:
        """Yield (position, micro-batch) for each of the `incoming` messages: the position in the
        joint order of the task that sends it, and the micro-batch of the receiving stage.

        If the step has fewer micro-batches than pipelines, the stages of some pipelines send no
        message.
        """
        for micro_batch, place in self._positions.get(
            (incoming.source, incoming.opcode), {}
        ).items():
            if incoming.sent.has(micro_batch):
                yield place, incoming.own.micro_batch(incoming.sent.message(micro_batch))


def _joint_order(lists: Collection[tuple[Task, ...]]) -> Iterator[Task]:
    """Yield the tasks of all ranks in one order that agrees with the order of each rank. `lists`
    has the different task lists of ranks.

    A task that several ranks run is yielded once. The iteration ends early if the orders of the
    ranks contradict each other.
    """
    ranks_of_task = Counter(task for tasks in lists for task in tasks)
    waiting = defaultdict[Task, list[Iterator[Task]]](list)
    """For each task: the iterators over the remaining tasks of the ranks whose next task it is."""
    runnable = [iter(tasks) for tasks in lists]
    while runnable:
        for remaining in runnable:
            if (task := next(remaining, None)) is not None:
                waiting[task].append(remaining)
        done = [task for task, ranks in waiting.items() if len(ranks) == ranks_of_task[task]]
        yield from done
        runnable = [remaining for task in done for remaining in waiting.pop(task)]


@dataclass(frozen=True, slots=True)
class RankPeers:
    """The messages that a rank exchanges with other ranks. Messages between two stages of one rank
    are not sent and do not count.
    """

    sends: frozenset[tuple[int, Opcode]]
    """Pairs (stage, opcode) of the instructions that send at least one message to another rank."""
    receives: tuple[tuple[IncomingMessages, frozenset[int]], ...]
    """Pairs (incoming messages, numbers of the ranks that send them), in order. Ranks are numbered
    in order of appearance, so that two ranks with equal roles have equal `RankPeers`.
    """

    @staticmethod
    def of(wired: Iterable[StageOnRank]) -> RankPeers:
        """Return the messages of a rank, given its stages."""
        sends: set[tuple[int, Opcode]] = set()
        receives: dict[IncomingMessages, set[int]] = defaultdict(set)
        for stage in wired:
            for piece in (*stage.receives, *stage.sends):
                if piece.source_rank == piece.target_rank:
                    continue
                if piece.target_stage == stage.stage:
                    receives[IncomingMessages.of(piece, False)].add(piece.source_rank)
                    if piece.needs_gradient:
                        sends.add((stage.stage, Opcode.SEND_GRADIENT))
                else:
                    sends.add((stage.stage, Opcode.SEND))
                    if piece.needs_gradient:
                        receives[IncomingMessages.of(piece, True)].add(piece.target_rank)
        numbers: dict[int, int] = {}
        found = []
        for incoming in sorted(receives, key=IncomingMessages.key):
            places = frozenset(
                numbers.setdefault(rank, len(numbers)) for rank in sorted(receives[incoming])
            )
            found.append((incoming, places))
        return RankPeers(frozenset(sends), tuple(found))


def receives_before_tasks(
    tasks: Sequence[Task], peers: RankPeers, orders: SendingOrders
) -> list[list[Instruction]]:
    """Return, for each task of a rank, the receives that the rank posts before the task runs.

    The receive of a task's input is posted one task ahead, so that the message arrives while the
    previous task computes. Receives from one rank follow the order of its sends: the receive of a
    message is posted no later than the receives of all messages that the rank sends after it. One
    instruction receives from all source stages of a stage if these send in one order and their
    ranks send no other messages to this rank.
    """
    used = {
        (task.stage, RECEIVED_BY[task.phase], task.micro_batch): position
        for position, task in enumerate(tasks)
        if task.phase in RECEIVED_BY
    }
    due = []
    for incoming, source, ranks in _receive_instructions(peers, orders):
        for sent, micro_batch in orders.positions_of_sends(incoming):
            each = Instruction(incoming.opcode, incoming.stage, micro_batch, source, incoming.part)
            due.append((sent, each, ranks))
    # A task sends to the stages of a rank in the order of their numbers, and to each stage in the
    # order of its micro-batches.
    due.sort(key=lambda each: (each[0], each[1].stage, each[1].micro_batch))
    found: list[list[Instruction]] = [[] for _ in tasks]
    latest: dict[int, int] = {}
    for _, each, ranks in reversed(due):
        last = used[each.stage, each.opcode, each.micro_batch]
        position = min(last, *(latest.get(rank, last) for rank in ranks))
        latest.update(dict.fromkeys(ranks, position))
        found[max(position - 1, 0)].append(each)
    return [received[::-1] for received in found]


def _receive_instructions(
    peers: RankPeers, orders: SendingOrders
) -> Iterator[tuple[IncomingMessages, int | None, frozenset[int]]]:
    """Yield (incoming messages, source, ranks) for each kind of receive instruction of a rank.

    source: the stage that sends, or None if the instruction receives from all sources of the stage.
    It is None if the stage has one source, or if all sources send in one order and their ranks send
    no other messages to this rank.
    ranks: the ranks that send, numbered as in `RankPeers.receives`.
    """
    senders = Counter(
        rank
        for rank, *_ in {
            (rank, *each.key()[:3]) for each, ranks in peers.receives for rank in ranks
        }
    )
    sources: dict[tuple[int, Opcode], dict[int, list[tuple[IncomingMessages, frozenset[int]]]]] = (
        defaultdict(dict)
    )
    for incoming, ranks in peers.receives:
        sources[incoming.stage, incoming.opcode].setdefault(incoming.source, []).append(
            (incoming, ranks)
        )
    for several in sources.values():
        first = next(iter(several.values()))
        ranks = frozenset[int]().union(*(own for entries in several.values() for _, own in entries))
        in_one_order = len({_order_of_sends(entries, orders) for entries in several.values()}) == 1
        if len(several) == 1:
            yield from ((incoming, None, own) for incoming, own in first)
        elif in_one_order and all(senders[rank] == 1 for rank in ranks):
            yield from ((incoming, None, ranks) for incoming, _ in first)
        else:
            yield from (
                (incoming, source, own)
                for source, each in several.items()
                for incoming, own in each
            )


def _order_of_sends(
    entries: Iterable[tuple[IncomingMessages, frozenset[int]]], orders: SendingOrders
) -> tuple[tuple[int, int | None], ...]:
    """Return (micro-batch, part) of each message in `entries`, in the order in which the messages
    are sent. The micro-batch is that of the receiving stage. The part is the index of the slice of
    the sender's micro-batches that send such messages, None for all micro-batches.
    """
    every = (
        (place, each, incoming.part)
        for incoming, _ in entries
        for place, each in orders.positions_of_sends(incoming)
    )
    return tuple((each, part) for _, each, part in sorted(every, key=lambda found: found[:2]))
