"""The task graph of a rank with its predicted memory, for `autopipe show --tasks`.

The graph has the tasks of one step in the order in which the rank runs them, and for each task the
tasks that it waits for. Loops are unrolled. Work that belongs to a line of the program has
separate tasks: collectives inside a stage, the accumulation of gradients, the update, and freeing
memory.
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
    MessageSlice,
    Opcode,
    Program,
    RankCode,
    StageCode,
    make_buckets,
)
from autopipe.ir.timeline import StagePrediction
from autopipe.passes.analysis.gradients import differentiable_values
from autopipe.passes.analysis.micro_batches import stage_graphs
from autopipe.passes.analysis.recompute import recomputed_segments
from autopipe.passes.lower.messages import is_used_in_place
from autopipe.passes.lower.traffic import (
    StageExchange,
    gradient_bytes_by_ranks,
    shards_on_several_ranks,
    stage_exchanges,
)


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """One message of a send or receive task, as seen from one end.

    `peer` is the rank at the other end, and `task` the name of the task that receives or sends the
    message there. `tensor` is the name of the value.
    """

    peer: int
    channel: int
    tensor: str
    bytes: int
    task: str


@dataclass(frozen=True, slots=True)
class TaskNode:
    """One task of a rank.

    A task of the schedule has the name that it has in the rank's file, such as `2F0`: stage 2,
    forward, micro-batch 0. The task that sends its results is `2SEND_F0`, the task that sends
    gradients `2SEND_B0`. Receives are `2RECV_F0` and `2RECV_B0`, followed by `@1` if they receive
    from stage 1 only.

    bytes: bytes that the task moves, accumulates, updates or frees.
    after: indices of the tasks of this rank that the task waits for.
    messages: the messages of a send or receive task.
    group: ranks that take part in a collective, a gradient reduction or a gather of parameters.
    inside: index of the task during which a collective runs.
    """

    kind: str
    """One of `receive`, `forward`, `send`, `backward`, `input_gradient`, `weight_gradient`,
    `collective`, `accumulate`, `reduce`, `update`, `gather` and `free`.
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
    """Description: for `free`, the memory that is freed; for `collective`, its kind and value; for
    `reduce`, `shards` if it is a reduce-scatter; otherwise "".
    """


@dataclass(frozen=True, slots=True)
class LoopedTasks:
    """The tasks of a loop of the program, or of an instruction outside of loops (`count` is 1).

    The tasks of the first iteration have the indices `start` to `end` - 1. The tasks of the last
    iteration begin at index `last`.
    """

    section: str
    """Section of the program: `warm-up`, `repetend` (the steady state), `cool-down` or `end` (after
    the last task).
    """
    start: int
    end: int
    count: int = 1
    """Number of iterations of the loop."""
    stride: int | None = 1
    """Difference between the micro-batches of two successive iterations; None if it differs between
    stages.
    """
    last: int = 0


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """The tasks of a rank in order, with the predicted memory in use.

    memory_bytes: for each task, the bytes in use after the task, or the peak during the task if it
    needs temporary memory.
    static_bytes: bytes in use during the whole step, such as parameters and optimizer state.
    """

    rank: int
    nodes: tuple[TaskNode, ...]
    memory_bytes: tuple[int, ...]
    static_bytes: int
    loops: tuple[LoopedTasks, ...]

    @property
    def peak_bytes(self) -> int:
        """Maximum of the bytes in use during the step."""
        return max(self.memory_bytes, default=self.static_bytes)


_LETTERS = {
    Opcode.FORWARD: "F",
    Opcode.BACKWARD: "B",
    Opcode.BACKWARD_INPUT: "I",
    Opcode.BACKWARD_WEIGHT: "W",
}
_RECEIVES = (Opcode.RECV, Opcode.RECV_GRADIENT)
_OF_GRADIENTS = (Opcode.RECV_GRADIENT, Opcode.SEND_GRADIENT)


class TaskSource:
    """Builds the task graphs of the ranks of a lowered plan. `costs` are the predicted times and
    bytes of the plan's stages.
    """

    def __init__(
        self, program: Program, graph: Graph, placement: Placement, costs: Sequence[StagePrediction]
    ) -> None:
        self.program = program
        self.costs = costs
        differentiable = differentiable_values(graph) if program.train else frozenset[str]()
        self.exchanges = [
            _collectives_by_opcode(code, tuple(stage_exchanges(own, code, differentiable)))
            for own, code in zip(stage_graphs(graph, placement), program.stages, strict=True)
        ]
        """For each stage and opcode, the collectives inside the stage for one micro-batch, in
        order.
        """
        self.one_source = {
            (rank.rank, each.opcode, each.stage, each.source)
            for rank in program.ranks
            for item in (*rank.warm_up, *rank.repetend, *rank.cool_down)
            for each in (item.body if isinstance(item, Loop) else (item,))
        }
        """The instructions of all ranks, as (rank, opcode, stage, source). `source` is the sending
        stage of a receive that receives from this stage only, None for other receives.
        """

    def graph(self, rank: int) -> TaskGraph:
        """Return the task graph of a rank."""
        return _Builder(self, self.program.ranks[rank]).build()


class _Builder:
    """Builds the task graph of one rank: its tasks in order, with the memory in use after each
    task.
    """

    def __init__(self, source: TaskSource, code: RankCode) -> None:
        self.source = source
        self.program = source.program
        self.code = code
        self.nodes: list[TaskNode] = []
        self.static_bytes = self.used_bytes = sum(
            source.costs[each.stage].static_bytes for each in code.stages
        )
        self.memory_bytes: list[int] = []
        self.wired = {each.stage: each for each in code.stages}
        self.whole = {
            (piece.channel, gradient)
            for each in code.stages
            for gradient, pieces in ((False, each.receives), (True, each.sends))
            for piece in pieces
            if is_used_in_place(self.program.stages, piece, gradient)
        }
        """Messages that tasks use in place, without a copy, as pairs (number of the channel, True
        for gradients).
        """
        self.done: dict[tuple[int, str, int], int] = {}
        """Index of the newest task by (stage, letter, micro-batch). The letter is F for a forward,
        B for a backward or its first half, W for a backward or its second half.
        """
        self.received: defaultdict[tuple[int, int, bool], list[int]] = defaultdict(list)
        """Indices of the receive tasks by (stage, micro-batch, True for gradients)."""
        self.accumulated: dict[int, int] = {}
        """For each stage, the index of its newest task that accumulates gradients."""

    def build(self) -> TaskGraph:
        """Return the task graph of the rank."""
        loops = (*self._sections(), self._add_end_of_step())
        return TaskGraph(
            self.code.rank, tuple(self.nodes), tuple(self.memory_bytes), self.static_bytes, loops
        )

    def _sections(self) -> Iterator[LoopedTasks]:
        """Append the tasks of all instructions, and yield the range of tasks of each loop."""
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
                        self._add_instruction(each.shifted(turn * stride))
                    end = end if turn else len(self.nodes)
                yield LoopedTasks(
                    title, start, end, loop.count, None if loop.strides else loop.stride, last
                )

    def _append_task(self, node: TaskNode, allocated: int = 0, passing: int = 0) -> int:
        """Append a task and return its index.

        allocated: bytes that stay in use after the task; negative if the task frees memory.
        passing: additional bytes that are in use only while the task runs.
        """
        self.nodes.append(node)
        self.used_bytes += allocated
        self.memory_bytes.append(self.used_bytes + passing)
        return len(self.nodes) - 1

    def _add_instruction(self, instruction: Instruction) -> None:
        """Append the tasks of an instruction."""
        opcode = instruction.opcode
        stage = instruction.stage
        micro_batch = instruction.micro_batch
        if opcode in _LETTERS:
            self._add_computation(opcode, stage, micro_batch)
            return
        gradient = opcode in _OF_GRADIENTS
        messages = tuple(self._messages(instruction))
        size = sum(each.bytes for each in messages)
        if opcode in _RECEIVES:
            name = _receive_name(stage, gradient, micro_batch, instruction.source, instruction.part)
            place = self._append_task(
                TaskNode("receive", name, stage, micro_batch, size, messages=messages)
            )
            self.received[stage, micro_batch, gradient].append(place)
        else:
            letter = "B" if gradient else "F"
            after = (self.done[stage, letter, micro_batch],)
            self._append_task(
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
        """Yield the messages of a send or receive instruction that have another rank at their other
        end.
        """
        opcode = instruction.opcode
        stage = instruction.stage
        gradient = opcode in _OF_GRADIENTS
        receives = opcode in _RECEIVES
        for piece, other, number in self._message_slices(
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
                key = peer, Opcode.RECV_GRADIENT if gradient else Opcode.RECV, other, stage
                only = stage if key in self.source.one_source else None
                part = turn.index if turn.of > 1 else None
                task = _receive_name(other, gradient, number, only, part)
            yield MessageEnd(peer, piece.channel, piece.tensor, piece.bytes, task)

    def _message_slices(
        self, stage: int, micro_batch: int, gradient: bool, receives: bool
    ) -> Iterator[tuple[MessageSlice, int, int]]:
        """Yield (message slice, stage at the other end, micro-batch at the other end) for each
        slice that a stage receives (if `receives`) or sends for a micro-batch.

        Gradients travel in the opposite direction: a stage receives the gradients of the values
        that it sends.
        """
        wired = self.wired[stage]
        for piece in wired.receives if receives is not gradient else wired.sends:
            if receives is gradient:
                own = piece.source_slice
                other = piece.target_slice
                there = piece.target_stage
            else:
                own = piece.target_slice
                other = piece.source_slice
                there = piece.source_stage
            if own.has(micro_batch) and (piece.needs_gradient or not gradient):
                yield piece, there, other.micro_batch(own.message(micro_batch))

    def _add_computation(self, opcode: Opcode, stage: int, micro_batch: int) -> None:
        """Append a forward, a backward or a half of a backward. Then append its collectives, the
        accumulation of its gradients, and tasks that free memory.
        """
        letter = _LETTERS[opcode]
        allocated, passing, freed = _memory_of_computation(
            self.source.costs[stage], opcode, self.program.train
        )
        after = tuple(sorted(self._dependencies(opcode, stage, micro_batch)))
        node = TaskNode(
            opcode.value, f"{stage}{letter}{micro_batch}", stage, micro_batch, after=after
        )
        place = self._append_task(node, allocated, passing)
        self.done[stage, "B" if letter == "I" else letter, micro_batch] = place
        if letter == "B":
            self.done[stage, "W", micro_batch] = place
        for number, each in enumerate(self.source.exchanges[stage].get(opcode, ())):
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
            self._append_task(
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
            _gradient_bytes(self.program, self.program.stages[stage], opcode)
            if opcode is not Opcode.FORWARD
            else 0
        )
        # Autograd adds these gradients to the gradients of earlier micro-batches, so the task waits
        # for the previous accumulation.
        if size:
            after = (place, self.accumulated[stage]) if stage in self.accumulated else (place,)
            name = f"{stage}ACC{'' if letter == 'B' else f'_{letter}'}{micro_batch}"
            self.accumulated[stage] = self._append_task(
                TaskNode("accumulate", name, stage, micro_batch, size, tuple(sorted(after)))
            )
        if freed:
            what = f"tensors saved by {stage}{'I' if letter == 'W' else 'F'}{micro_batch}"
            name = f"FREE {node.name}"
            self._append_task(
                TaskNode("free", name, stage, micro_batch, freed, (place,), what=what), -freed
            )
        self._free_messages(opcode, stage, micro_batch, place)

    def _dependencies(self, opcode: Opcode, stage: int, micro_batch: int) -> set[int]:
        """Return the indices of the tasks whose results are used by the task with this opcode."""
        if opcode is Opcode.BACKWARD_WEIGHT:
            return {self.done[stage, "B", micro_batch]}
        backward = opcode is not Opcode.FORWARD
        found = set(self.received[stage, micro_batch, backward])
        if backward:
            found.add(self.done[stage, "F", micro_batch])
        for piece, giver, number in self._message_slices(
            stage, micro_batch, backward, receives=True
        ):
            if piece.source_rank == piece.target_rank:
                found.add(self.done[giver, "B" if backward else "F", number])
        return found

    def _free_messages(self, opcode: Opcode, stage: int, micro_batch: int, place: int) -> None:
        """Append tasks that make the buffers of used messages available for later messages. The
        task `place` is the last user of these messages.

        The buffers stay allocated during the whole step, so the memory in use does not change.
        """
        is_last = {Opcode.FORWARD: not self.program.train, Opcode.BACKWARD_INPUT: False}.get(
            opcode, True
        )
        for gradient in (False, True):
            is_first = (
                opcode is Opcode.FORWARD
            ) is not gradient and opcode is not Opcode.BACKWARD_WEIGHT
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
                    self._append_task(
                        TaskNode("free", name, stage, micro_batch, size, (place,), what=what)
                    )

    def _add_end_of_step(self) -> LoopedTasks:
        """Append the tasks at the end of the step: gradient reductions, the update and, if the
        optimizer state is sharded, all-gathers of the updated parameters. Return their range.
        """
        start = len(self.nodes)
        if self.program.train and self.code.stages:
            accumulated = tuple(sorted(self.accumulated.values()))
            reductions: list[int] = []
            exchanged = gradient_bytes_by_ranks(
                self.program.parameters, self.code.shards, self.program.shard
            )
            what = "shards" if self.program.shard else ""
            for (home, group), size in exchanged.items():
                after = (self.accumulated[home],) if home in self.accumulated else accumulated
                name = f"REDUCE{len(reductions)}"
                reductions.append(
                    self._append_task(
                        TaskNode(
                            "reduce", name, home, bytes=size, after=after, group=group, what=what
                        )
                    )
                )
            size = sum(
                _gradient_element_bytes(self.program, each.parameter) * each.box.elements
                for each in self.code.shards
            )
            for bucket in (
                make_buckets(shards_on_several_ranks(self.program.parameters, self.code.shards))
                if what
                else ()
            ):
                held = sum(block.elements for block in bucket.blocks)
                own = sum(run.stop - run.start for run in bucket.element_ranges(self.code.rank))
                size -= (held - own) * bucket.blocks[0].itemsize
            update = self._append_task(
                TaskNode("update", "UPDATE", bytes=size, after=(*accumulated, *reductions))
            )
            for number, ((home, group), size) in enumerate(
                exchanged.items() if self.program.shard else ()
            ):
                self._append_task(
                    TaskNode(
                        "gather", f"GATHER{number}", home, bytes=size, after=(update,), group=group
                    )
                )
        return LoopedTasks("end", start, len(self.nodes), last=start)


def _receive_name(
    stage: int, gradient: bool, micro_batch: int, source: int | None, part: int | None
) -> str:
    """Return the name of a receive task, such as `2RECV_F0`.

    The suffix `@1` is added if the task receives from stage 1 only (`source`). The suffix `.0` is
    added if it receives only from the slice 0 of the sender's micro-batches (`part`).
    """
    suffix = f"{'' if source is None else f'@{source}'}{'' if part is None else f'.{part}'}"
    return f"{stage}RECV_{'B' if gradient else 'F'}{micro_batch}{suffix}"


def _memory_of_computation(
    cost: StagePrediction, opcode: Opcode, train: bool
) -> tuple[int, int, int]:
    """Return (allocated, passing, freed) bytes of a computation: bytes that stay in use for later
    tasks, additional bytes in use only while it runs, and bytes that no later task uses.
    """
    kept = cost.kept_bytes
    waiting = cost.weight_kept_bytes
    passing = cost.transient_bytes
    match opcode:
        case Opcode.FORWARD:
            return (kept, 0, 0) if train else (0, passing, 0)
        case Opcode.BACKWARD_INPUT:
            more = max(waiting - kept, 0)
            return more, max(passing - more, 0), max(kept - waiting, 0)
        case Opcode.BACKWARD_WEIGHT:
            return 0, 0, waiting
        case _:
            return 0, passing, kept


def _collectives_by_opcode(
    code: StageCode, every: tuple[StageExchange, ...]
) -> dict[Opcode, tuple[StageExchange, ...]]:
    """Return the collectives of a stage by the opcode of the task in which they run. `every` are
    the collectives of one forward and backward.

    A stage that recomputes activations is divided into segments. The backward of a recomputed
    segment first repeats the collectives of the segment's forward.
    """
    forward = [each for each in every if not each.backward]
    backward = [each for each in every if each.backward]
    again = recomputed_segments(code)
    found: list[StageExchange] = []
    for number in reversed(range(max(1, len(code.segments)))):
        found += [each for each in forward if each.segment == number and number in again]
        found += [each for each in reversed(backward) if each.segment == number]
    return {
        Opcode.FORWARD: tuple(forward),
        Opcode.BACKWARD: tuple(found),
        Opcode.BACKWARD_INPUT: tuple(found),
    }


def _gradient_element_bytes(program: Program, parameter: int) -> int:
    """Return the bytes per element of the gradient of the parameter with this index; 0 if the
    parameter is not trained.
    """
    found = program.parameters[parameter]
    return found.value.dtype.itemsize if found.trainable and found.value.dtype.is_floating else 0


def _gradient_bytes(program: Program, code: StageCode, opcode: Opcode) -> int:
    """Return the bytes of the parameter gradients that a stage computes in a task with this opcode:
    a backward, or one of its halves.
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
        if opcode is Opcode.BACKWARD or waits is (opcode is Opcode.BACKWARD_WEIGHT):
            found += _gradient_element_bytes(program, index) * value.elements
    return found
