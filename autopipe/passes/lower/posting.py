"""When a rank asks for what other ranks send it.

Messages of one channel arrive in the order in which they are sent, so a rank asks for them in the order in which the
stage that sends them runs: the order of send and receive pairs is one for both ends, whatever order the rank itself
takes micro-batches in (Lin et al., "Tessel" (HPCA 2024), section V).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopipe.ir.program import Instruction, Verb
from autopipe.ir.schedule import Phase, Schedule, Task, sharing

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
