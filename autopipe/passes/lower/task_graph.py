"""The task graph of a rank, from its program, and the memory along it: what `autopipe show --tasks` shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopipe.ir.graph import Graph
from autopipe.ir.layout import members
from autopipe.ir.placement import Placement
from autopipe.ir.program import Instruction, Loop, Program, RankCode, StageCode, Verb, buckets_of
from autopipe.ir.task_graph import LoopedTasks, TaskGraph, TaskNode
from autopipe.ir.timeline import StagePrediction
from autopipe.passes.analysis.gradients import differentiable_values
from autopipe.passes.analysis.micro_batches import stage_graphs
from autopipe.passes.analysis.recompute import running_again
from autopipe.passes.lower.messages import MessageEnds, is_whole
from autopipe.passes.lower.traffic import StageExchange, held_together, stage_exchanges


class Memory:
    """Bytes in use after each task so far, of stages that take what is predicted."""

    def __init__(self, stages: Iterable[StagePrediction]) -> None:
        self.static = sum(each.static_bytes for each in stages)
        """All through a step."""
        self.held: list[int] = []
        self._used = self.static

    def add(self, change: int, meanwhile: int) -> None:
        """A task that takes `change` (gives back, below 0) for good, and `meanwhile` more while it runs."""
        self._used += change
        self.held.append(self._used + meanwhile)

    @staticmethod
    def taken(cost: StagePrediction, verb: Verb, train: bool) -> tuple[int, int]:
        """Bytes that a computation allocates for later tasks, and only while it runs."""
        if verb is Verb.FORWARD:
            return (cost.kept_bytes, 0) if train else (0, cost.transient_bytes)
        if verb is Verb.INPUT_GRADIENT:
            more = max(cost.weight_kept_bytes - cost.kept_bytes, 0)
            return more, max(cost.transient_bytes - more, 0)
        return 0, 0 if verb is Verb.WEIGHT_GRADIENT else cost.transient_bytes

    @staticmethod
    def freed(cost: StagePrediction, verb: Verb, train: bool) -> int:
        """Bytes that no task uses after a computation."""
        if not train or verb is Verb.FORWARD:
            return 0
        if verb is Verb.INPUT_GRADIENT:
            return max(cost.kept_bytes - cost.weight_kept_bytes, 0)
        return cost.weight_kept_bytes if verb is Verb.WEIGHT_GRADIENT else cost.kept_bytes


_COMPUTES = {
    Verb.FORWARD: "F",
    Verb.BACKWARD: "B",
    Verb.INPUT_GRADIENT: "I",
    Verb.WEIGHT_GRADIENT: "W",
}


@dataclass(frozen=True, slots=True)
class TaskSource:
    """Source of the task graphs of all ranks of a program."""

    program: Program
    costs: Sequence[StagePrediction]
    exchanges: tuple[dict[Verb, tuple[StageExchange, ...]], ...]
    """Collectives of the group of each stage for one micro-batch, by verb, in order."""
    ends: MessageEnds

    @staticmethod
    def of(program: Program, graph: Graph, placement: Placement, costs: Sequence[StagePrediction]) -> TaskSource:
        """That of a lowered plan; `costs` are the predictions of its stages."""
        differentiable = differentiable_values(graph) if program.train else frozenset[str]()
        graphs = stage_graphs(graph, placement)
        exchanges = tuple(
            _by_verb(code, tuple(stage_exchanges(own, code, differentiable, {})))
            for own, code in zip(graphs, program.stages, strict=True)
        )
        return TaskSource(program, costs, exchanges, MessageEnds(program))

    def graph(self, rank: int) -> TaskGraph:
        """The task graph of one rank."""
        return _Builder(self, self.program.ranks[rank]).build()


class _Builder:
    """The tasks of one rank, one after the other."""

    def __init__(self, source: TaskSource, code: RankCode) -> None:
        self.source = source
        self.program = source.program
        self.code = code
        self.nodes: list[TaskNode] = []
        self.memory = Memory([source.costs[each.stage] for each in code.stages])
        self.wired = {each.stage: each for each in code.stages}
        self.done: dict[tuple[int, str, int], int] = {}
        """By stage, F, B (the whole or its first half) or W, and micro-batch, where the task is."""
        self.asked: dict[tuple[int, int, bool], list[int]] = {}
        """By stage, micro-batch, and whether of gradients, where its receives are."""
        self.added: dict[int, int] = {}
        """Where a stage's gradients were added up last."""

    def build(self) -> TaskGraph:
        stretches = [*self._sections(), self._end()]
        held, static = tuple(self.memory.held), self.memory.static
        return TaskGraph(self.code.rank, tuple(self.nodes), held, static, tuple(stretches))

    def _sections(self) -> Iterator[LoopedTasks]:
        code = self.code
        for title, section in (("warm-up", code.warm_up), ("repetend", code.repetend), ("cool-down", code.cool_down)):
            for item in section:
                start = last = len(self.nodes)
                if isinstance(item, Instruction):
                    self._add(item)
                    yield LoopedTasks(title, start, len(self.nodes), last=last)
                    continue
                end = start
                for turn in range(item.count):
                    last = len(self.nodes)
                    for each in _moved(item, turn):
                        self._add(each)
                    end = end if turn else len(self.nodes)
                yield LoopedTasks(title, start, end, item.count, None if item.strides else item.stride, last)

    def _add(self, instruction: Instruction) -> None:
        match instruction.verb:
            case Verb.RECEIVE | Verb.RECEIVE_GRADIENT:
                self._receive(instruction)
            case Verb.SEND | Verb.SEND_GRADIENT:
                self._send(instruction)
            case _:
                self._compute(instruction)

    def _node(self, node: TaskNode, change: int = 0, meanwhile: int = 0) -> int:
        """Put a task at the end, with what it makes memory hold more from now on, and while it runs; where it is."""
        self.nodes.append(node)
        self.memory.add(change, meanwhile)
        return len(self.nodes) - 1

    def _receive(self, instruction: Instruction) -> None:
        stage, micro_batch = instruction.stage, instruction.micro_batch
        gradient = instruction.verb is Verb.RECEIVE_GRADIENT
        messages = self.source.ends.received(self.wired[stage], instruction)
        name = self.source.ends.receive_name(stage, gradient, micro_batch, instruction.source)
        size = sum(each.bytes for each in messages)
        place = self._node(TaskNode("receive", name, stage, micro_batch, size, messages=messages))
        self.asked.setdefault((stage, micro_batch, gradient), []).append(place)

    def _send(self, instruction: Instruction) -> None:
        stage, micro_batch = instruction.stage, instruction.micro_batch
        gradient = instruction.verb is Verb.SEND_GRADIENT
        messages = self.source.ends.sent(self.wired[stage], instruction)
        name = f"{stage}SEND_{'B' if gradient else 'F'}{micro_batch}"
        size = sum(each.bytes for each in messages)
        after = (self.done[stage, "B" if gradient else "F", micro_batch],)
        self._node(TaskNode("send", name, stage, micro_batch, size, after, messages))

    def _compute(self, instruction: Instruction) -> None:
        verb, stage, micro_batch = instruction.verb, instruction.stage, instruction.micro_batch
        letter, cost = _COMPUTES[verb], self.source.costs[stage]
        after = tuple(sorted(self._needed(verb, stage, micro_batch)))
        kept, meanwhile = Memory.taken(cost, verb, self.program.train)
        place = self._node(
            TaskNode(verb.value, f"{stage}{letter}{micro_batch}", stage, micro_batch, after=after), kept, meanwhile
        )
        self.done[stage, "B" if letter == "I" else letter, micro_batch] = place
        if letter == "B":
            self.done[stage, "W", micro_batch] = place
        self._collectives(verb, stage, micro_batch, place)
        if verb is not Verb.FORWARD:
            self._accumulate(verb, stage, micro_batch, place)
        freed = Memory.freed(cost, verb, self.program.train)
        if freed:
            what = f"what {stage}{'I' if letter == 'W' else 'F'}{micro_batch} kept"
            self._node(
                TaskNode("free", f"FREE {stage}{letter}{micro_batch}", stage, micro_batch, freed, (place,), what=what),
                -freed,
            )
        self._free_messages(verb, stage, micro_batch, place)

    def _needed(self, verb: Verb, stage: int, micro_batch: int) -> set[int]:
        """The tasks whose results a task uses."""
        if verb is Verb.WEIGHT_GRADIENT:
            return {self.done[stage, "B", micro_batch]}
        backward = verb is not Verb.FORWARD
        found = set(self.asked.get((stage, micro_batch, backward), ()))
        if backward:
            found.add(self.done[stage, "F", micro_batch])
        for giver, number in self.source.ends.handed(self.wired[stage], backward, micro_batch):
            found.add(self.done[giver, "B" if backward else "F", number])
        return found

    def _collectives(self, verb: Verb, stage: int, micro_batch: int, place: int) -> None:
        """Collectives of a task's group while it runs."""
        code, task = self.program.stages[stage], self.nodes[place].name
        for number, each in enumerate(self.source.exchanges[stage].get(verb, ())):
            group, size = _group(code, each, self.code.rank), each.bytes // len(code.devices)
            what = f"{each.kind} of {each.value.partition(chr(0))[0]}"
            name = f"{task}/{number}"
            self._node(TaskNode("collective", name, stage, micro_batch, size, group=group, inside=place, what=what))

    def _accumulate(self, verb: Verb, stage: int, micro_batch: int, place: int) -> None:
        """Autograd adds the gradients of parameters to what is there of the micro-batches before."""
        size = _gradient_bytes(self.program, self.program.stages[stage], verb)
        if size:
            after = (place, self.added[stage]) if stage in self.added else (place,)
            half = {Verb.INPUT_GRADIENT: "_I", Verb.WEIGHT_GRADIENT: "_W"}.get(verb, "")
            name = f"{stage}ACC{half}{micro_batch}"
            self.added[stage] = self._node(TaskNode("accumulate", name, stage, micro_batch, size, tuple(sorted(after))))

    def _free_messages(self, verb: Verb, stage: int, micro_batch: int, place: int) -> None:
        """Buffers that are free again for the messages that come next: see `channels`. They are there all the time."""
        ends = {Verb.FORWARD: not self.program.train, Verb.INPUT_GRADIENT: False}.get(verb, True)
        for gradient in (False, True):
            for asked in self.asked.get((stage, micro_batch, gradient), ()):
                receive = self.nodes[asked]
                first = (verb is Verb.FORWARD) is not gradient and verb is not Verb.WEIGHT_GRADIENT
                size = sum(
                    each.bytes
                    for each in receive.messages
                    if (ends if is_whole(self.program, self.wired[stage], each, gradient) else first)
                )
                if size:
                    what = f"buffers of {receive.name}"
                    self._node(TaskNode("free", f"FREE {receive.name}", stage, micro_batch, size, (place,), what=what))

    def _end(self) -> LoopedTasks:
        """Sums of gradients over ranks, each as soon as what it adds up is there, the update, and what the ranks gather
        where each updates a share."""
        start = len(self.nodes)
        if self.program.train and self.code.stages:
            added = tuple(sorted(self.added.values()))
            sums: list[int] = []
            exchanged = _exchanged(self.program, self.code)
            what = "shares" if self.program.shard else ""
            for (home, group), size in exchanged.items():
                after = (self.added[home],) if home in self.added else added
                name = f"REDUCE{len(sums)}"
                sums.append(self._node(TaskNode("reduce", name, home, bytes=size, after=after, group=group, what=what)))
            size = _updated_bytes(self.program, self.code)
            update = self._node(TaskNode("update", "UPDATE", bytes=size, after=(*added, *sums)))
            for number, ((home, group), size) in enumerate(exchanged.items() if self.program.shard else ()):
                self._node(TaskNode("gather", f"GATHER{number}", home, bytes=size, after=(update,), group=group))
        return LoopedTasks("end", start, len(self.nodes), last=start)


def _by_verb(code: StageCode, every: tuple[StageExchange, ...]) -> dict[Verb, tuple[StageExchange, ...]]:
    """A stage's exchanges; a segment that runs again exchanges again before its backward does."""
    forward, backward = ([each for each in every if each.backward is way] for way in (False, True))
    again = running_again(code)
    found: list[StageExchange] = []
    for number in reversed(range(max(1, len(code.segments)))):
        found += [each for each in forward if each.segment == number and number in again]
        found += [each for each in reversed(backward) if each.segment == number]
    return {Verb.FORWARD: tuple(forward), Verb.BACKWARD: tuple(found), Verb.INPUT_GRADIENT: tuple(found)}


def _moved(loop: Loop, turn: int) -> Iterator[Instruction]:
    strides = loop.strides or (loop.stride,) * len(loop.body)
    return (each.shifted(turn * stride) for each, stride in zip(loop.body, strides, strict=True))


def _group(code: StageCode, exchange: StageExchange, rank: int) -> tuple[int, ...]:
    """The ranks that a collective of a stage goes over, from where `rank` is."""
    if not exchange.over or exchange.kind == "redistribute":
        return code.devices
    return tuple(sorted(code.devices[each] for each in members(exchange.over, code.devices.index(rank))))


def _trained(program: Program, parameter: int) -> int:
    """Bytes of an element of a parameter's gradient; 0 where it has none."""
    found = program.parameters[parameter]
    return found.value.dtype.itemsize if found.trainable and found.value.dtype.is_floating else 0


def _gradient_bytes(program: Program, code: StageCode, verb: Verb) -> int:
    """Bytes of the gradients of a stage's parameters that a backward, or one of its halves, gives."""
    nodes = set(code.deferred)
    later = {
        name for operation in code.operations if getattr(operation, "node", None) in nodes for name in operation.reads
    }
    found = 0
    for index, value in code.parameters:
        waits = value.name in later and len(value.shape) > 1
        if verb is Verb.BACKWARD or waits is (verb is Verb.WEIGHT_GRADIENT):
            found += _trained(program, index) * value.elements
    return found


def _exchanged(program: Program, code: RankCode) -> Mapping[tuple[int | None, tuple[int, ...]], int]:
    """Bytes of gradients by the stage whose last backward completes them, if one does, and the ranks that add them."""
    blocks = tuple(held_together(program.parameters, code.shards))
    found: dict[tuple[int | None, tuple[int, ...]], int] = {}
    if program.shard:
        for bucket in buckets_of(blocks):
            found[bucket.home, bucket.ranks] = found.get((bucket.home, bucket.ranks), 0) + bucket.bytes
        return found
    for block in blocks:
        found[block.home, block.ranks] = found.get((block.home, block.ranks), 0) + block.elements * block.itemsize
    return found


def _updated_bytes(program: Program, code: RankCode) -> int:
    """Bytes of the parameters, or shares of them, that the rank updates."""
    found = sum(_trained(program, shard.parameter) * shard.box.elements for shard in code.shards)
    if program.shard:
        for bucket in buckets_of(held_together(program.parameters, code.shards)):
            held = sum(block.elements for block in bucket.blocks)
            own = sum(run.stop - run.start for run in bucket.runs(code.rank))
            found -= (held - own) * bucket.blocks[0].itemsize
    return found
