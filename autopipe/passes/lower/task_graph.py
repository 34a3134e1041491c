"""The task graph of a rank, from its program, and the memory along it: what `autopipe show --tasks`
shows.

It has what the rank does in a step, in its static order, and what each task waits for: loops
unrolled, and what happens inside the program's lines made tasks of their own: the collectives of a
stage's group, the adding up of gradients, the update, the freeing of what no later task uses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopipe.ir.graph import Graph
from autopipe.ir.layout import group_members
from autopipe.ir.placement import Placement
from autopipe.ir.program import (
    Instruction,
    Loop,
    MessageBlock,
    Program,
    RankCode,
    StageCode,
    Verb,
    buckets_of,
)
from autopipe.ir.timeline import StagePrediction
from autopipe.passes.analysis.gradients import differentiable_values
from autopipe.passes.analysis.micro_batches import stage_graphs
from autopipe.passes.analysis.recompute import running_again
from autopipe.passes.lower.messages import is_whole
from autopipe.passes.lower.traffic import (
    StageExchange,
    exchanged_gradients,
    held_together,
    stage_exchanges,
)


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """One message of a send or receive: the other rank, and its task that receives or sends the
    same message.
    """

    peer: int
    channel: int
    tensor: str
    bytes: int
    task: str


@dataclass(frozen=True, slots=True)
class TaskNode:
    """One task. Tasks of a schedule are named as in the rank's file and the timeline, such as
    `2F0`; a send of its results is `2SEND_F0`, of gradients `2SEND_B0`, receives alike, `@1` behind
    one from stage 1 alone.

    `bytes` are moved, added, updated or freed; `after` are tasks of this rank, by place, that are
    really waited for; `group` are the ranks that do a collective, a reduction or a gathering
    together, `inside` is the task during which.
    """

    kind: str
    """`receive`, `forward`, `send`, `backward`, `input_gradient`, `weight_gradient`, `collective`,
    `accumulate`, `reduce`, `update`, `gather` or `free`.
    """
    name: str
    stage: int | None = None
    micro_batch: int | None = None
    bytes: int = 0
    after: tuple[int, ...] = ()
    messages: tuple[MessageEnd, ...] = ()
    group: tuple[int, ...] = ()
    inside: int | None = None
    what: str = ""
    """Value freed; or kind and value of a collective; or `shares` for a reduction that gives each
    rank one.
    """


@dataclass(frozen=True, slots=True)
class LoopedTasks:
    """Tasks that stand in a section (`warm-up`, `repetend`, `cool-down` or `end`) of the program
    once: `count` times as many as those from `start` to `end`, as a loop. `last` is where those of
    its last time start; the micro-batches of one time are `stride` further than those of the time
    before, None where stages differ in that.
    """

    section: str
    start: int
    end: int
    count: int = 1
    stride: int | None = 1
    last: int = 0


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """A rank's tasks in the order in which it does them, and by the plan's predictions the bytes in
    use after each (those of a forward or backward while it runs), of which `static_bytes` are there
    all through a step.
    """

    rank: int
    nodes: tuple[TaskNode, ...]
    held: tuple[int, ...]
    static_bytes: int
    stretches: tuple[LoopedTasks, ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.held, default=self.static_bytes)


_LETTERS = {
    Verb.FORWARD: "F",
    Verb.BACKWARD: "B",
    Verb.INPUT_GRADIENT: "I",
    Verb.WEIGHT_GRADIENT: "W",
}
_RECEIVES = (Verb.RECEIVE, Verb.RECEIVE_GRADIENT)
_OF_GRADIENTS = (Verb.RECEIVE_GRADIENT, Verb.SEND_GRADIENT)


class TaskSource:
    """Source of the task graphs of all ranks of a lowered plan; `costs` are the predictions of its
    stages.
    """

    def __init__(
        self, program: Program, graph: Graph, placement: Placement, costs: Sequence[StagePrediction]
    ) -> None:
        self.program = program
        self.costs = costs
        differentiable = differentiable_values(graph) if program.train else frozenset[str]()
        self.exchanges = [
            _by_verb(code, tuple(stage_exchanges(own, code, differentiable)))
            for own, code in zip(stage_graphs(graph, placement), program.stages, strict=True)
        ]
        """Collectives of the group of each stage for one micro-batch, by verb, in order."""
        self.one_source = {
            (rank.rank, each.verb, each.stage, each.source)
            for rank in program.ranks
            for item in (*rank.warm_up, *rank.repetend, *rank.cool_down)
            for each in (item.body if isinstance(item, Loop) else (item,))
        }
        """Receives, by rank, verb, stage and the one stage that they are from."""

    def graph(self, rank: int) -> TaskGraph:
        return _Builder(self, self.program.ranks[rank]).build()


class _Builder:
    """The tasks of one rank, one after the other, and the bytes in use after each."""

    def __init__(self, source: TaskSource, code: RankCode) -> None:
        self.source = source
        self.program = source.program
        self.code = code
        self.nodes: list[TaskNode] = []
        self.static_bytes = self.used_bytes = sum(
            source.costs[each.stage].static_bytes for each in code.stages
        )
        self.held: list[int] = []
        self.wired = {each.stage: each for each in code.stages}
        self.whole = {
            (piece.channel, gradient)
            for each in code.stages
            for gradient, pieces in ((False, each.receives), (True, each.sends))
            for piece in pieces
            if is_whole(self.program.stages, piece, gradient)
        }
        """Channels, and whether of gradients, whose messages are used as they came."""
        self.done: dict[tuple[int, str, int], int] = {}
        """By stage, F, B (the whole or its first half) or W, and micro-batch, where the task is."""
        self.received: defaultdict[tuple[int, int, bool], list[int]] = defaultdict(list)
        """By stage, micro-batch, and whether of gradients, where its receives are."""
        self.added: dict[int, int] = {}
        """Where a stage's gradients were added up last."""

    def build(self) -> TaskGraph:
        stretches = (*self._sections(), self._end())
        return TaskGraph(
            self.code.rank, tuple(self.nodes), tuple(self.held), self.static_bytes, stretches
        )

    def _sections(self) -> Iterator[LoopedTasks]:
        code = self.code
        for title, section in (
            ("warm-up", code.warm_up),
            ("repetend", code.repetend),
            ("cool-down", code.cool_down),
        ):
            for item in section:
                loop = item if isinstance(item, Loop) else Loop((item,), 1)
                start = end = last = len(self.nodes)
                for turn in range(loop.count):
                    last = len(self.nodes)
                    for each, stride in zip(
                        loop.body, loop.strides or (loop.stride,) * len(loop.body), strict=True
                    ):
                        self._add(each.shifted(turn * stride))
                    end = end if turn else len(self.nodes)
                yield LoopedTasks(
                    title, start, end, loop.count, None if loop.strides else loop.stride, last
                )

    def _node(self, node: TaskNode, allocated: int = 0, passing: int = 0) -> int:
        """Put a task at the end, with the bytes that it allocates for good and while it runs; where
        it is.
        """
        self.nodes.append(node)
        self.used_bytes += allocated
        self.held.append(self.used_bytes + passing)
        return len(self.nodes) - 1

    def _add(self, instruction: Instruction) -> None:
        verb = instruction.verb
        stage = instruction.stage
        micro_batch = instruction.micro_batch
        if verb in _LETTERS:
            self._compute(verb, stage, micro_batch)
            return
        gradient = verb in _OF_GRADIENTS
        messages = tuple(self._messages(instruction))
        size = sum(each.bytes for each in messages)
        if verb in _RECEIVES:
            name = _receive_name(stage, gradient, micro_batch, instruction.source, instruction.part)
            place = self._node(
                TaskNode("receive", name, stage, micro_batch, size, messages=messages)
            )
            self.received[stage, micro_batch, gradient].append(place)
        else:
            letter = "B" if gradient else "F"
            after = (self.done[stage, letter, micro_batch],)
            self._node(
                TaskNode(
                    "send",
                    f"{stage}SEND_{letter}{micro_batch}",
                    stage,
                    micro_batch,
                    size,
                    after,
                    messages,
                )
            )

    def _messages(self, instruction: Instruction) -> Iterator[MessageEnd]:
        """The messages of a send or a receive, each with the rank and the task at its other end."""
        verb = instruction.verb
        stage = instruction.stage
        gradient = verb in _OF_GRADIENTS
        receives = verb in _RECEIVES
        for piece, other, number in self._pieces(
            stage, instruction.micro_batch, gradient, receives
        ):
            peer = piece.target_rank if piece.source_stage == stage else piece.source_rank
            turn = piece.target_slice if gradient else piece.source_slice
            if peer == self.code.rank or instruction.source not in (None, other):
                continue
            if instruction.part not in (None, turn.index):
                continue
            if receives:
                task = f"{other}SEND_{'B' if gradient else 'F'}{number}"
            else:
                key = peer, Verb.RECEIVE_GRADIENT if gradient else Verb.RECEIVE, other, stage
                only = stage if key in self.source.one_source else None
                part = turn.index if turn.of > 1 else None
                task = _receive_name(other, gradient, number, only, part)
            yield MessageEnd(peer, piece.channel, piece.tensor, piece.bytes, task)

    def _pieces(
        self, stage: int, micro_batch: int, gradient: bool, receives: bool
    ) -> Iterator[tuple[MessageBlock, int, int]]:
        """The blocks that a stage receives or sends for a micro-batch, each with the other end's
        stage and micro-batch.

        Gradients go the other way: a stage receives those of what it sends.
        """
        wired = self.wired[stage]
        for piece in wired.receives if receives is not gradient else wired.sends:
            own = piece.target_slice
            other = piece.source_slice
            there = piece.source_stage
            if receives is gradient:
                own, other, there = other, own, piece.target_stage
            if own.has(micro_batch) and (piece.needs_gradient or not gradient):
                yield piece, there, other.micro_batch(own.message(micro_batch))

    def _compute(self, verb: Verb, stage: int, micro_batch: int) -> None:
        letter = _LETTERS[verb]
        allocated, passing, freed = _memory(self.source.costs[stage], verb, self.program.train)
        after = tuple(sorted(self._needed(verb, stage, micro_batch)))
        node = TaskNode(
            verb.value, f"{stage}{letter}{micro_batch}", stage, micro_batch, after=after
        )
        place = self._node(node, allocated, passing)
        self.done[stage, "B" if letter == "I" else letter, micro_batch] = place
        if letter == "B":
            self.done[stage, "W", micro_batch] = place
        for number, each in enumerate(self.source.exchanges[stage].get(verb, ())):
            what = f"{each.kind} of {each.value.partition(chr(0))[0]}"
            devices = self.program.stages[stage].devices
            group = devices
            size = each.bytes // len(devices)
            if each.over and each.kind != "redistribute":
                group = tuple(
                    sorted(
                        devices[place]
                        for place in group_members(each.over, devices.index(self.code.rank))
                    )
                )
            name = f"{node.name}/{number}"
            self._node(
                TaskNode(
                    "collective",
                    name,
                    stage,
                    micro_batch,
                    size,
                    group=group,
                    inside=place,
                    what=what,
                )
            )
        size = (
            _gradient_bytes(self.program, self.program.stages[stage], verb)
            if verb is not Verb.FORWARD
            else 0
        )
        # Autograd adds the gradients of parameters to what is there of the micro-batches before.
        if size:
            after = (place, self.added[stage]) if stage in self.added else (place,)
            name = f"{stage}ACC{'' if letter == 'B' else f'_{letter}'}{micro_batch}"
            self.added[stage] = self._node(
                TaskNode("accumulate", name, stage, micro_batch, size, tuple(sorted(after)))
            )
        if freed:
            what = f"what {stage}{'I' if letter == 'W' else 'F'}{micro_batch} kept"
            name = f"FREE {node.name}"
            self._node(
                TaskNode("free", name, stage, micro_batch, freed, (place,), what=what), -freed
            )
        self._free_messages(verb, stage, micro_batch, place)

    def _needed(self, verb: Verb, stage: int, micro_batch: int) -> set[int]:
        """The tasks whose results a task uses."""
        if verb is Verb.WEIGHT_GRADIENT:
            return {self.done[stage, "B", micro_batch]}
        backward = verb is not Verb.FORWARD
        found = set(self.received[stage, micro_batch, backward])
        if backward:
            found.add(self.done[stage, "F", micro_batch])
        for piece, giver, number in self._pieces(stage, micro_batch, backward, receives=True):
            if piece.source_rank == piece.target_rank:
                found.add(self.done[giver, "B" if backward else "F", number])
        return found

    def _free_messages(self, verb: Verb, stage: int, micro_batch: int, place: int) -> None:
        """Buffers that are free again for the messages that come next: see `channels`. They are
        there all the time.
        """
        is_last = {Verb.FORWARD: not self.program.train, Verb.INPUT_GRADIENT: False}.get(verb, True)
        for gradient in (False, True):
            is_first = (verb is Verb.FORWARD) is not gradient and verb is not Verb.WEIGHT_GRADIENT
            for received in self.received[stage, micro_batch, gradient]:
                receive = self.nodes[received]
                ends = (
                    is_last if (each.channel, gradient) in self.whole else is_first
                    for each in receive.messages
                )
                size = sum(
                    each.bytes
                    for each, is_end in zip(receive.messages, ends, strict=True)
                    if is_end
                )
                if size:
                    name = f"FREE {receive.name}"
                    what = f"buffers of {receive.name}"
                    self._node(
                        TaskNode("free", name, stage, micro_batch, size, (place,), what=what)
                    )

    def _end(self) -> LoopedTasks:
        """Sums of gradients over ranks, each as soon as what it adds up is there, the update, and
        what the ranks gather where each updates a share.
        """
        start = len(self.nodes)
        if self.program.train and self.code.stages:
            added = tuple(sorted(self.added.values()))
            sums: list[int] = []
            exchanged = exchanged_gradients(
                self.program.parameters, self.code.shards, self.program.shard
            )
            what = "shares" if self.program.shard else ""
            for (home, group), size in exchanged.items():
                after = (self.added[home],) if home in self.added else added
                name = f"REDUCE{len(sums)}"
                sums.append(
                    self._node(
                        TaskNode(
                            "reduce", name, home, bytes=size, after=after, group=group, what=what
                        )
                    )
                )
            size = sum(
                _trained(self.program, each.parameter) * each.box.elements
                for each in self.code.shards
            )
            for bucket in (
                buckets_of(held_together(self.program.parameters, self.code.shards)) if what else ()
            ):
                held = sum(block.elements for block in bucket.blocks)
                own = sum(run.stop - run.start for run in bucket.runs(self.code.rank))
                size -= (held - own) * bucket.blocks[0].itemsize
            update = self._node(TaskNode("update", "UPDATE", bytes=size, after=(*added, *sums)))
            for number, ((home, group), size) in enumerate(
                exchanged.items() if self.program.shard else ()
            ):
                self._node(
                    TaskNode(
                        "gather", f"GATHER{number}", home, bytes=size, after=(update,), group=group
                    )
                )
        return LoopedTasks("end", start, len(self.nodes), last=start)


def _receive_name(
    stage: int, gradient: bool, micro_batch: int, source: int | None, part: int | None
) -> str:
    """A receive's name: `2RECV_F0`, with `@1` behind it where it is of what stage 1 alone sends,
    and `.0` where it is the first part of the micro-batch that it takes.
    """
    behind = f"{'' if source is None else f'@{source}'}{'' if part is None else f'.{part}'}"
    return f"{stage}RECV_{'B' if gradient else 'F'}{micro_batch}{behind}"


def _memory(cost: StagePrediction, verb: Verb, train: bool) -> tuple[int, int, int]:
    """Bytes that a computation allocates for later tasks, only while it runs, and those that no
    task uses after it.
    """
    kept = cost.kept_bytes
    waiting = cost.weight_kept_bytes
    passing = cost.transient_bytes
    match verb:
        case Verb.FORWARD:
            return (kept, 0, 0) if train else (0, passing, 0)
        case Verb.INPUT_GRADIENT:
            more = max(waiting - kept, 0)
            return more, max(passing - more, 0), max(kept - waiting, 0)
        case Verb.WEIGHT_GRADIENT:
            return 0, 0, waiting
        case _:
            return 0, passing, kept


def _by_verb(
    code: StageCode, every: tuple[StageExchange, ...]
) -> dict[Verb, tuple[StageExchange, ...]]:
    """A stage's exchanges; a segment that runs again exchanges again before its backward does."""
    forward, backward = ([each for each in every if each.backward is way] for way in (False, True))
    again = running_again(code)
    found: list[StageExchange] = []
    for number in reversed(range(max(1, len(code.segments)))):
        found += [each for each in forward if each.segment == number and number in again]
        found += [each for each in reversed(backward) if each.segment == number]
    return {
        Verb.FORWARD: tuple(forward),
        Verb.BACKWARD: tuple(found),
        Verb.INPUT_GRADIENT: tuple(found),
    }


def _trained(program: Program, parameter: int) -> int:
    """Bytes of an element of a parameter's gradient; 0 where it has none."""
    found = program.parameters[parameter]
    return found.value.dtype.itemsize if found.trainable and found.value.dtype.is_floating else 0


def _gradient_bytes(program: Program, code: StageCode, verb: Verb) -> int:
    """Bytes of the gradients of a stage's parameters that a backward, or one of its halves,
    gives.
    """
    nodes = set(code.deferred)
    deferred = {
        name
        for operation in code.operations
        if getattr(operation, "node", None) in nodes
        for name in operation.reads
    }
    found = 0
    for index, value in code.parameters:
        waits = value.name in deferred and len(value.shape) > 1
        if verb is Verb.BACKWARD or waits is (verb is Verb.WEIGHT_GRADIENT):
            found += _trained(program, index) * value.elements
    return found
