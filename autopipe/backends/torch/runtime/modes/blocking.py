"""Stages with blocking send and receive (`--blocking`): the baseline for the gain from overlapping
communication with computation.

A generated step posts sends and receives at points that overlap best; ranks that block at these
points would deadlock. So these stages exchange tensors between tasks instead, in one global order
of all tasks and messages. It is a topological order of the tasks, in which each message follows the
task that computes it (Lin et al., "Tessel", HPCA 2024, section V). A message is one event, at which
both its sender and its receiver block.

A task is one forward or backward pass, or half of a split backward pass, of one micro-batch on one
stage.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from autopipe.backends.torch.runtime.modes.execution import Execution
from autopipe.backends.torch.runtime.step.ports import Port, Recv, Send
from autopipe.backends.torch.runtime.step.stage import RankContext, Stage
from autopipe.ir.schedule import EVERY_MICRO_BATCH, MicroBatchSlice, Phase, Task

_DURATION_BY_PHASE = {
    Phase.FORWARD: 1,
    Phase.BACKWARD: 2,
    Phase.INPUT_GRADIENT: 1,
    Phase.WEIGHT_GRADIENT: 1,
}
"""Estimated durations of tasks, relative to a forward. They determine which of several valid orders
is used.
"""


@dataclass(frozen=True, slots=True)
class StageChannel:
    """A channel from a source stage to a target stage, on one rank or two. `gradient` is True if
    gradients go in the other direction. `source_slice` and `target_slice` select the micro-batches
    of the source and target stage whose tensors use the channel.
    """

    channel: int
    source_stage: int
    source_rank: int
    target_stage: int
    target_rank: int
    gradient: bool
    source_slice: MicroBatchSlice = EVERY_MICRO_BATCH
    target_slice: MicroBatchSlice = EVERY_MICRO_BATCH


@dataclass(frozen=True, slots=True)
class Message:
    """One transfer of a tensor on the channel `end`, or of its gradient in the other direction if
    `gradient`. `number` is the index of the transfer among the transfers of the channel in this
    direction in a batch.
    """

    end: StageChannel
    gradient: bool
    number: int

    @property
    def ranks(self) -> tuple[int, int]:
        """(sender, receiver)."""
        ends = self.end.source_rank, self.end.target_rank
        return (ends[1], ends[0]) if self.gradient else ends


Event = Task | Message


def global_event_order(
    lists: Sequence[Sequence[Task]], ends: Sequence[StageChannel]
) -> list[list[Event]]:
    """Return, for each rank, its tasks and the messages that it sends or receives, in the global
    order.

    `lists[r]` are the tasks of rank r in the order in which the rank runs them; `ends` are all
    channels. The ranks of a stage run each of its tasks together.

    The order is a list schedule: repeatedly run the task that can start first (ties: lower stage,
    then lower micro-batch). This order is close to the order of a run with overlap. Tasks that
    cannot run because of a cycle are omitted.
    """
    orders: list[list[Event]] = [[] for _ in lists]
    rest = [deque(tasks) for tasks in lists]
    clocks = [0] * len(lists)
    ranks = defaultdict[int, list[int]](list)
    for rank, tasks in enumerate(lists):
        for stage in {task.stage for task in tasks}:
            ranks[stage].append(rank)
    # Keys of both maps are (stage, is gradient). `needs` lists the tasks that must precede: (slice
    # of the stage's micro-batches, stage that sends to it, slice of the sender's micro-batches).
    # `leaving` lists the channels to other ranks, each with the slice of the stage's micro-batches
    # that use it.
    needs = defaultdict[tuple[int, bool], set[tuple[MicroBatchSlice, int, MicroBatchSlice]]](set)
    leaving = defaultdict[tuple[int, bool], list[tuple[StageChannel, MicroBatchSlice]]](list)
    for end in ends:
        there = (end.source_stage, end.source_slice)
        back = (end.target_stage, end.target_slice)
        for gradient, (source, given), (target, taken) in (
            (False, there, back),
            (True, back, there),
        ):
            if end.gradient or not gradient:
                needs[target, gradient].add((taken, source, given))
                if end.source_rank != end.target_rank:
                    leaving[source, gradient].append((end, given))
    done: set[tuple[int, bool, int]] = set()

    def can_run(task: Task) -> bool:
        """Return True if `task` is the next task of all ranks of its stage, and if the tasks have
        run whose results or gradients it needs.
        """
        if any(not rest[rank] or rest[rank][0] != task for rank in ranks[task.stage]):
            return False
        backward = task.phase is not Phase.FORWARD
        number = task.micro_batch
        return task.phase is Phase.WEIGHT_GRADIENT or all(
            (source, backward, given.micro_batch(taken.message(number))) in done
            for taken, source, given in needs[task.stage, backward]
            if taken.has(number)
        )

    def start(task: Task) -> int:
        """Return the time at which all ranks of the task's stage are free."""
        return max(clocks[rank] for rank in ranks[task.stage])

    while ready := [task for task in {tasks[0] for tasks in rest if tasks} if can_run(task)]:
        task = min(ready, key=lambda task: (start(task), task.stage, task.micro_batch))
        ends_at = start(task) + _DURATION_BY_PHASE[task.phase]
        for rank in ranks[task.stage]:
            rest[rank].popleft()
            clocks[rank] = ends_at
            orders[rank].append(task)
        if task.phase is Phase.WEIGHT_GRADIENT:
            continue
        backward = task.phase is not Phase.FORWARD
        done.add((task.stage, backward, task.micro_batch))
        for end, given in leaving[task.stage, backward]:
            if given.has(task.micro_batch):
                message = Message(end, backward, given.message(task.micro_batch))
                for rank in message.ranks:
                    orders[rank].append(message)
    return orders


def _is_forward(event: Event) -> bool:
    """Return True for a forward task, and for a message that is not a gradient."""
    return not event.gradient if isinstance(event, Message) else event.phase is Phase.FORWARD


class BlockingStage(Stage):
    """A stage that exchanges tensors only before its tasks, in the order of a `GlobalOrder`."""

    def __init__(self, order: GlobalOrder, *wiring: Any) -> None:
        super().__init__(*wiring)
        self._order = order

    def _ports_to_other_ranks(self, *_: Any, **__: Any) -> list[Any]:
        # `GlobalOrder` transfers the messages to other ranks. So `recv` and `send`, which the
        # generated step calls, find no ports here and transfer no message.
        return []

    def forward(self, micro_batch: int) -> None:
        if self._order.exchange_before(Task(self.number, Phase.FORWARD, micro_batch)):
            super().forward(micro_batch)

    def backward(self, micro_batch: int) -> None:
        if self._rank.training and self._order.exchange_before(
            Task(self.number, Phase.BACKWARD, micro_batch)
        ):
            super().backward(micro_batch)

    def backward_input(self, micro_batch: int) -> None:
        if self._rank.training and self._order.exchange_before(
            Task(self.number, Phase.INPUT_GRADIENT, micro_batch)
        ):
            super().backward_input(micro_batch)

    def backward_weight(self, micro_batch: int) -> None:
        if self._rank.training and self._order.exchange_before(
            Task(self.number, Phase.WEIGHT_GRADIENT, micro_batch)
        ):
            super().backward_weight(micro_batch)


class GlobalOrder:
    """The tasks and messages of this rank in the global order, and the position of the current
    batch in this order.
    """

    def __init__(self, rank: RankContext) -> None:
        self._rank = rank
        self._tasks: list[Task] = []
        self._order: list[Event] | None = None
        self._rest: deque[Event] = deque()

    def order_of_batch(self, step: Callable[[], None]) -> list[Event]:
        """Return this rank's tasks and messages of one batch in the global order. `step` is the
        generated function that runs a batch. The first call of this method calls `step` only to
        record which tasks it runs, without computing. It then derives the order from the tasks of
        all ranks, so it is collective over all ranks.
        """
        if self._order is None:
            step()
            self._order = self._exchange_tasks_and_channels()
        return self._order

    def begin_batch(self, step: Callable[[], None]) -> None:
        """Start a batch, which the generated function `step` will run. In a validation, only
        forward tasks and their messages are expected.
        """
        order = self.order_of_batch(step)
        self._rest.extend(order if self._rank.training else filter(_is_forward, order))

    def exchange_before(self, task: Task | None) -> bool:
        """Exchange all messages that precede `task` in the global order, and return True; if `task`
        is None, exchange all remaining messages of the batch. While the order is not known yet,
        record `task` and return False; the caller must then not run the task.
        """
        if self._order is None:
            assert task is not None, "tasks are being recorded"
            self._tasks.append(task)
            return False
        while self._rest and (event := self._rest.popleft()) != task:
            assert isinstance(event, Message), f"the step does not run {event}"
            end = event.end
            rank = self._rank
            leaves = rank.number == end.source_rank
            stage = rank.stages[end.source_stage if leaves else end.target_stage]
            ports: Sequence[Send | Recv] = stage.sends if leaves else stage.receives
            port = next(each for each in ports if each.channel == end.channel)
            act = stage.start_send if event.ranks[0] == rank.number else stage.post_recv
            with rank.heartbeat.record_wait(port.rank, port.channel):
                act(port, MicroBatchSlice(*port.slice).micro_batch(event.number)).wait()
        return True

    def _exchange_tasks_and_channels(self) -> list[Event]:
        """Exchange recorded tasks and channels with the other ranks. Return this rank's tasks and
        messages in the global order. Collective over all ranks.
        """
        number = self._rank.number
        stages = self._rank.stages.values()
        train = self._rank.train
        own = {
            "tasks": [str(task) for task in self._tasks],
            "ends": [
                (
                    port.channel,
                    stage.number,
                    number,
                    port.stage,
                    port.rank,
                    port.gradient and train,
                    port.slice,
                )
                for stage in stages
                for port in stage.sends
            ],
            "arriving": [(port.channel, port.slice) for stage in stages for port in stage.receives],
        }
        every = self._rank.transport.make_control_group().run_collectively("order", lambda: own)
        arriving = {
            channel: MicroBatchSlice(*numbers)
            for each in every
            for channel, numbers in each["arriving"]
        }
        ends = [
            StageChannel(*(*end, MicroBatchSlice(*leaving), arriving[end[0]]))
            for *end, leaving in sorted(end for each in every for end in each["ends"])
        ]
        return global_event_order(
            [[Task.parse(task) for task in each["tasks"]] for each in every], ends
        )[number]


class BlockingExecution(Execution):
    """Runs stages with blocking send and receive, in the order of a `GlobalOrder`."""

    def __init__(self) -> None:
        self._order: GlobalOrder | None = None

    def _global_order(self, rank: RankContext) -> GlobalOrder:
        """Return the `GlobalOrder` of the rank; create it at the first call."""
        if self._order is None:
            self._order = GlobalOrder(rank)
        return self._order

    def make_stage(
        self, rank: RankContext, number: int, module: ModuleType, ports: tuple[Port, ...]
    ) -> Stage:
        return BlockingStage(self._global_order(rank), rank, number, module, ports)

    def before_step(self, rank: RankContext, step: Callable[[], None]) -> None:
        self._global_order(rank).order_of_batch(step)

    def run_batch(self, rank: RankContext, step: Callable[[], None]) -> None:
        order = self._global_order(rank)
        order.begin_batch(step)
        step()
        order.exchange_before(None)
