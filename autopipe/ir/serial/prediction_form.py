"""Predictions as JSON."""

from __future__ import annotations

import dataclasses

from autopipe.ir.placement import Placement
from autopipe.ir.prediction import Message, Prediction, StagePrediction
from autopipe.ir.serial.record import JsonRecord
from autopipe.ir.turn import MicroBatchSlice

_MESSAGE = tuple(field.name for field in dataclasses.fields(Message) if "turn" not in field.name)
_TURNS = ("source_turn", "source_turns", "target_turn", "target_turns")
"""Columns behind those of `_MESSAGE` where stages have micro-batches of different sizes."""


def prediction_form(prediction: Prediction) -> dict[str, object]:
    """The predictions as lists, dicts and scalars; a message is a list whose columns `message_columns` names."""
    turns = any(message.source_turn.of * message.target_turn.of > 1 for message in prediction.messages)
    return {
        "stages": [dataclasses.asdict(stage) for stage in prediction.stages],
        "message_columns": [*_MESSAGE, *(_TURNS if turns else ())],
        "messages": [_message_form(message, turns) for message in prediction.messages],
    }


def _message_form(message: Message, turns: bool) -> list[object]:
    cells = [getattr(message, name) for name in _MESSAGE]
    source, target = message.source_turn, message.target_turn
    return [*cells, source.index, source.of, target.index, target.of] if turns else cells


def prediction_of(record: JsonRecord, placement: Placement) -> Prediction:
    """The predictions that `prediction_form` gave for the stages of `placement`. Raises ConfigurationError."""
    stages = record.at("stages")
    found = tuple(_stage_of(each) for each in stages.items())
    if len(found) != len(placement.stages):
        stages.refuse(f"one entry for each of {len(placement.stages)} stages")
    messages = tuple(_message_of(each, placement) for each in record.at("messages").items())
    return Prediction(found, messages)


def _stage_of(record: JsonRecord) -> StagePrediction:
    return StagePrediction(
        forward_s=record.at("forward_s").number(),
        backward_s=record.at("backward_s").number(),
        input_gradient_s=record.at("input_gradient_s").number(),
        weight_gradient_s=record.at("weight_gradient_s").number(),
        split_s=record.at("split_s").number(),
        gradient_s=record.at("gradient_s").number(),
        update_s=record.at("update_s").number(),
        parameter_bytes=record.at("parameter_bytes").integer(),
        static_bytes=record.at("static_bytes").integer(),
        kept_bytes=record.at("kept_bytes").integer(),
        weight_kept_bytes=record.at("weight_kept_bytes").integer(),
        transient_bytes=record.at("transient_bytes").integer(),
    )


def _message_of(record: JsonRecord, placement: Placement) -> Message:
    cells = tuple(record.items())
    if len(cells) not in (len(_MESSAGE), len(_MESSAGE) + len(_TURNS)):
        record.refuse(f"{len(_MESSAGE)} columns, or {len(_TURNS)} more with turns")
    counts = [cell.integer() for cell in cells[:6]]
    if not counts[0] < counts[1] < len(placement.stages):
        record.refuse("a message from a stage to a later one")
    for stage, device in ((counts[0], counts[2]), (counts[1], counts[3])):
        if device not in placement.stages[stage].devices:
            record.refuse(f"devices of the stages it names: {device} is none of stage {stage}")
    source, target, sender, receiver, forward_bytes, backward_bytes = counts
    forward_s, backward_s = (cell.number() for cell in cells[6:8])
    message = Message(source, target, sender, receiver, forward_bytes, backward_bytes, forward_s, backward_s)
    if len(cells) == len(_MESSAGE):
        return message
    return dataclasses.replace(message, source_turn=_turn_of(*cells[8:10]), target_turn=_turn_of(*cells[10:12]))


def _turn_of(index: JsonRecord, count: JsonRecord) -> MicroBatchSlice:
    if index.integer() >= count.integer(1):
        index.refuse(f"one of {count.integer()} turns, counted from 0")
    return MicroBatchSlice(index.integer(), count.integer())
