"""Messages after each task of a step, and the number that each task waits for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopipe.ir.schedule import MicroBatchSlice, Phase
from autopipe.ir.timeline import Message

PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT)
WHOLE = PHASES.index(Phase.BACKWARD)
HALF = PHASES.index(Phase.INPUT_GRADIENT) - WHOLE
"""From the number of a backward's kind to that of its first half, which receives in its place."""


def kind_of(stage: int, phase: Phase) -> int:
    """The number of a stage's phase."""
    return stage * len(PHASES) + PHASES.index(phase)


class MessageEdge(NamedTuple):
    """One message after a task, in the direction in which it goes."""

    kind: int
    """Kind of the task that receives."""
    own_turns: int
    turns: int
    turn: int
    """The micro-batch that receives is micro-batch // own_turns * turns + turn."""
    source: int
    target: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MessageEdges:
    """By kind of task, then by micro-batch: number m does as m mod the length of the kind's list says."""

    sends: list[list[list[MessageEdge]]]
    awaited: list[list[int]]
    """Number of messages that a task waits for."""


def message_edges(messages: Sequence[Message], stages: int) -> MessageEdges:
    """The messages of a step, there and back.

    Gradients go to whole backwards here, and come from whole ones and first halves alike.
    """
    periods = [1] * (stages * len(PHASES))
    for each in messages:
        for stage, turn in ((each.source_stage, each.source_turn), (each.target_stage, each.target_turn)):
            for phase in PHASES:
                kind = kind_of(stage, phase)
                periods[kind] = math.lcm(periods[kind], turn.of)
    wires = MessageEdges([[[] for _ in range(period)] for period in periods], [[0] * period for period in periods])
    for each in messages:
        source, target = (
            [kind_of(stage, phase) for phase in PHASES[:2]] for stage in (each.source_stage, each.target_stage)
        )
        there = (each.source, each.target, each.forward_bytes, each.forward_s)
        back = (each.target, each.source, each.backward_bytes, each.backward_s)
        _send(wires, source[0], target[0], each.source_turn, each.target_turn, there)
        _await(wires, target[0], each.target_turn)
        for half in (0, HALF):
            _send(wires, target[1] + half, source[1], each.target_turn, each.source_turn, back)
            _await(wires, source[1] + half, each.source_turn)
    return wires


def _send(
    wires: MessageEdges,
    kind: int,
    receiver: int,
    own: MicroBatchSlice,
    other: MicroBatchSlice,
    sent: tuple[int, int, int, float],
) -> None:
    for place in range(own.index, len(wires.sends[kind]), own.of):
        wires.sends[kind][place].append(MessageEdge(receiver, own.of, other.of, other.index, *sent))


def _await(wires: MessageEdges, kind: int, turn: MicroBatchSlice) -> None:
    for place in range(turn.index, len(wires.awaited[kind]), turn.of):
        wires.awaited[kind][place] += 1
