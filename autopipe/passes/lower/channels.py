"""Channels between ranks, and how many messages of each are held at once: that many buffers serve all of a step.

A message is held from where its receive is posted to the end of the last task that may use it. Messages in blocks are
put together for the first task that uses them; a whole tensor is used as it came, and kept for later tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autopipe.ir.graph import Value
from autopipe.ir.program import Channel, Instruction, MessageBlock, StageCode, Verb
from autopipe.ir.schedule import MicroBatchSlice

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
