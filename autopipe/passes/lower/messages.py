"""Messages between stages: the blocks that ranks exchange, when receives are posted, and how many are held at once.

A rank posts its receives from another rank in the order in which that one sends to it, whatever its own order (Lin et
al., "Tessel", HPCA 2024, section V): NCCL matches what two ranks send each other by order alone. A message is held from
its receive's posting to the end of the last task that may use it; that many buffers serve all of a step.
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
from autopipe.ir.program import Channel, Instruction, MessageBlock, Section, StageCode, StageOnRank, Verb
from autopipe.ir.schedule import MicroBatchSlice, Phase, Schedule, Task, sharing
from autopipe.passes.analysis.micro_batches import block_transfers, shared_blocks
from autopipe.passes.lower.shard import ShardedStage


def transfer_pieces(
    graph: Graph,
    placement: Placement,
    stages: tuple[ShardedStage, ...],
    differentiable: frozenset[str],
    types: Mapping[str, DType],
) -> tuple[MessageBlock, ...]:
    """All pieces that cross between stages, by target stage, source stage, value, turn, and target rank. `types` are
    those of messages, by value.

    Raises InfeasibleError for values that cannot be shared out among micro-batches of different sizes.
    """
    producers = {(stage.code.pipeline, name): number for number, stage in enumerate(stages) for name in stage.outputs}
    sizes = [stage.micro_batch_size for stage in placement.stages]
    batch = batch_axes_of(graph) if len(set(sizes)) > 1 else BatchAxes(0, (), {})
    pieces: list[MessageBlock] = []
    for target, stage in enumerate(stages):
        computed = [name for name in stage.inputs if graph.producer(name) is not None]
        for name in sorted(computed, key=lambda each: producers[stage.code.pipeline, each]):
            source, need = producers[stage.code.pipeline, name], stage.inputs[name]
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
                            dtype=types[name],
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


@dataclass(frozen=True, slots=True)
class RankStep:
    """A rank's step, and how long it holds messages in it."""

    instructions: tuple[Instruction, ...]
    sections: tuple[Section, Section, Section]
    held: HeldMessages


def channels_of(
    wired: Sequence[Sequence[StageOnRank]], stages: Sequence[StageCode], steps: Sequence[RankStep]
) -> tuple[Channel, ...]:
    """The channels between different ranks, from what is sent and received by each and what each does in a step."""
    found = []
    pieces = {each.channel: each for own in wired for stage in own for each in stage.sends}
    apart = _out_of_order(wired, steps, [each for each in pieces.values() if _is_part(each)])
    for _, piece in sorted(pieces.items()):
        source, target = piece.source_rank, piece.target_rank
        if source == target:
            continue
        whole = is_whole(stages, piece, gradient=False)
        buffers = steps[target].held.most(
            piece.target_stage, Verb.RECEIVE, piece.source_stage, whole, piece.target_slice
        )
        gradients = 0
        if piece.needs_gradient:
            verb, turn = Verb.RECEIVE_GRADIENT, piece.source_slice
            whole = is_whole(stages, piece, gradient=True)
            gradients = steps[source].held.most(piece.source_stage, verb, piece.target_stage, whole, turn)
        own = _is_part(piece) and (min(source, target), max(source, target)) in apart
        found.append(Channel(piece.channel, source, target, buffers, gradients, own))
    return tuple(found)


def _is_part(piece: MessageBlock) -> bool:
    """True if a message is a part of a micro-batch of either stage."""
    return piece.source_slice.of > 1 or piece.target_slice.of > 1


def _out_of_order(
    wired: Sequence[Sequence[StageOnRank]], steps: Sequence[RankStep], parts: Iterable[MessageBlock]
) -> frozenset[tuple[int, int]]:
    """Pairs of ranks, the smaller first, of those that exchange `parts` of micro-batches, which do not ask for all that
    the other one sends in the order in which it does: a receive may ask for several parts, sent by several tasks."""
    pairs = {(piece.source_rank, piece.target_rank) for piece in parts if piece.source_rank != piece.target_rank}
    both = pairs | {(target, source) for source, target in pairs}
    sequences: dict[tuple[int, int, bool], list[tuple[int, bool, int]]] = defaultdict(list)
    for rank in {rank for pair in both for rank in pair}:
        stages = {each.stage: each for each in wired[rank]}
        for each in steps[rank].instructions:
            if each.verb not in _EXCHANGES:
                continue
            receives, backward = _EXCHANGES[each.verb]
            stage = stages[each.stage]
            for piece in stage.receives if receives != backward else stage.sends:
                at_target = receives != backward
                turn = piece.target_slice if at_target else piece.source_slice
                other_stage = piece.source_stage if at_target else piece.target_stage
                other = piece.source_rank if at_target else piece.target_rank
                if (
                    other == rank
                    or not turn.has(each.micro_batch)
                    or (backward and not piece.needs_gradient)
                    or each.source not in (None, other_stage)
                ):
                    continue
                ends = (other, rank) if receives else (rank, other)
                if ends in both:
                    sequences[(*ends, receives)].append((piece.channel, backward, turn.message(each.micro_batch)))
    wrong = (pair for pair in both if sequences[(*pair, True)] != sequences[(*pair, False)])
    return frozenset((min(pair), max(pair)) for pair in wrong)


_EXCHANGES = {
    Verb.RECEIVE: (True, False),
    Verb.RECEIVE_GRADIENT: (True, True),
    Verb.SEND: (False, False),
    Verb.SEND_GRADIENT: (False, True),
}
"""By verb, True if it receives, and True if it is about gradients."""


def is_whole(stages: Sequence[StageCode], piece: MessageBlock, gradient: bool) -> bool:
    """True if a message is used as it came, neither put together with others into a tensor of their own nor widened."""
    values = stages[piece.source_stage].outputs if gradient else stages[piece.target_stage].inputs
    value, box = next(each for each in values if each.name == piece.tensor), piece.sent if gradient else piece.received
    return box.shape == value.shape and piece.dtype is value.dtype


RECEIVED_BY = {
    Phase.FORWARD: Verb.RECEIVE,
    Phase.BACKWARD: Verb.RECEIVE_GRADIENT,
    Phase.INPUT_GRADIENT: Verb.RECEIVE_GRADIENT,
}
"""How a task's input is received; a task of the same kind on another stage sends it."""


class SendingOrders:
    """The order in which stages send; the devices of a stage run its tasks together, so it has one.

    `ratios` are the micro-batches that each stage makes of one of the program's.
    """

    def __init__(self, schedule: Schedule, ratios: tuple[int, ...]) -> None:
        self._ratios = ratios
        self._places: dict[tuple[int, Verb], dict[int, int]] = defaultdict(dict)
        """By micro-batch, where the task that sends stands in one order of the tasks of all ranks."""
        for place, task in enumerate(_joint_order(dict.fromkeys(schedule.tasks))):
            if task.phase in RECEIVED_BY:
                self._places[task.stage, RECEIVED_BY[task.phase]][task.micro_batch] = place

    def reaching(self, stage: int, verb: Verb, source: int) -> tuple[tuple[int, int], ...]:
        """(place, micro-batch of `stage`) in the order in which all is there that they need of `source`.

        A stage whose pipeline gets no micro-batch, since the step has too few, sends nothing.
        """
        sent, own, other = self._places.get((source, verb), {}), self._ratios[stage], self._ratios[source]
        last: dict[int, int] = {}
        for each, place in sent.items():
            for reached in (each,) if own == other else sharing(each, other, own):
                last[reached] = max(place, last.get(reached, 0))
        return tuple(sorted((place, each) for each, place in last.items()))


def _joint_order(lists: Collection[tuple[Task, ...]]) -> Iterator[Task]:
    """All ranks' tasks in an order that keeps to each rank's own. It ends early where there is none."""
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
    """Messages that a rank exchanges with others; values between its own stages are handed over, not sent."""

    sends: frozenset[tuple[int, Verb]]
    """(stage, verb) that send anything."""
    receives: tuple[tuple[int, Verb, int, frozenset[int]], ...]
    """(stage, verb, stage that sends, ranks that send) of all that comes from other ranks, in order. Those ranks are
    numbered as they appear, so that ranks which do the same are equal."""

    @staticmethod
    def of(wired: Iterable[StageOnRank]) -> RankPeers:
        sends: set[tuple[int, Verb]] = set()
        receives: dict[tuple[int, str, int], set[int]] = defaultdict(set)
        for stage in wired:
            for piece in (*stage.receives, *stage.sends):
                if piece.source_rank == piece.target_rank:
                    continue
                if piece.target_stage == stage.stage:
                    receives[stage.stage, Verb.RECEIVE.value, piece.source_stage].add(piece.source_rank)
                    if piece.needs_gradient:
                        sends.add((stage.stage, Verb.SEND_GRADIENT))
                else:
                    sends.add((stage.stage, Verb.SEND))
                    if piece.needs_gradient:
                        key = stage.stage, Verb.RECEIVE_GRADIENT.value, piece.target_stage
                        receives[key].add(piece.target_rank)
        numbers: dict[int, int] = {}
        found = []
        for (number, verb, source), ranks in sorted(receives.items()):
            places = frozenset(numbers.setdefault(rank, len(numbers)) for rank in sorted(ranks))
            found.append((number, Verb(verb), source, places))
        return RankPeers(frozenset(sends), tuple(found))


def postings(tasks: Sequence[Task], peers: RankPeers, orders: SendingOrders) -> list[list[Instruction]]:
    """For each task the receives that the rank posts before the task computes.

    What a task needs is received one task ahead, so that it travels while the previous task computes; earlier where
    the same rank sends something before it that is received earlier. A stage receives from all its sources at once
    where they send in one order and nothing else comes from their ranks.
    """
    used = {
        (task.stage, RECEIVED_BY[task.phase], task.micro_batch): position
        for position, task in enumerate(tasks)
        if task.phase in RECEIVED_BY
    }
    due = []
    for stage, verb, source, ranks in _together(peers, orders):
        sender = next(each[2] for each in peers.receives if each[:2] == (stage, verb)) if source is None else source
        for sent, micro_batch in orders.reaching(stage, verb, sender):
            due.append((sent, stage, Instruction(verb, stage, micro_batch, source), ranks))
    # A task sends to the stages of a rank in the order of their numbers.
    due.sort(key=lambda each: each[:2])
    found: list[list[Instruction]] = [[] for _ in tasks]
    latest: dict[int, int] = {}
    for _, _, each, ranks in reversed(due):
        last = used[each.stage, each.verb, each.micro_batch]
        position = min(last, *(latest.get(rank, last) for rank in ranks))
        latest.update(dict.fromkeys(ranks, position))
        found[max(position - 1, 0)].append(each)
    return [received[::-1] for received in found]


def _together(peers: RankPeers, orders: SendingOrders) -> Iterator[tuple[int, Verb, int | None, frozenset[int]]]:
    """Receives by stage and source; as one, from None, those of a stage from sources that send in one order and whose
    ranks send nothing else."""
    senders = Counter(rank for *_, ranks in peers.receives for rank in ranks)
    sources: dict[tuple[int, Verb], list[tuple[int, frozenset[int]]]] = defaultdict(list)
    for stage, verb, source, ranks in peers.receives:
        sources[stage, verb].append((source, ranks))
    for (stage, verb), several in sources.items():
        sent = {tuple(each for _, each in orders.reaching(stage, verb, source)) for source, _ in several}
        ranks = frozenset[int]().union(*(own for _, own in several))
        if len(several) == 1 or (len(sent) == 1 and all(senders[rank] == 1 for rank in ranks)):
            yield stage, verb, None, ranks
        else:
            yield from ((stage, verb, source, own) for source, own in several)
