"""Alternatives as JSON: an object for each; unknown members are left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from autopipe.ir.alternatives import Alternative, Choice
from autopipe.ir.serial.record import JsonRecord


def alternatives_form(alternatives: Iterable[Alternative]) -> list[dict[str, object]]:
    """The alternatives as lists, dicts and scalars."""
    return [_form(each) for each in alternatives]


def _form(alternative: Alternative) -> dict[str, object]:
    choice = alternative.choice
    decided: dict[str, object] = {
        "strategy": choice.strategy,
        "options": dict(choice.options),
        "schedule": choice.schedule,
        "micro_batches": choice.micro_batches,
        "recompute": choice.recompute,
        "shard": choice.shard,
    }
    fields = (field.name for field in dataclasses.fields(Alternative) if field.name != "choice")
    found = {name: getattr(alternative, name) for name in fields}
    return {"choice": decided, **{name: value for name, value in found.items() if value is not None}}


def alternatives_of(record: JsonRecord) -> tuple[Alternative, ...]:
    """The alternatives that `alternatives_form` gave. Raises ConfigurationError."""
    return tuple(map(_alternative_of, record.items()))


def _alternative_of(record: JsonRecord) -> Alternative:
    def text(key: str) -> str | None:
        return record.at(key).text() if record.has(key) else None

    def number(key: str) -> float | None:
        return record.at(key).number() if record.has(key) else None

    def integer(key: str) -> int | None:
        return record.at(key).integer() if record.has(key) else None

    return Alternative(
        choice=_choice_of(record.at("choice")),
        step_time_s=number("step_time_s"),
        lower_bound_s=number("lower_bound_s"),
        micro_batches=integer("micro_batches"),
        stages=integer("stages"),
        bubble_rate=number("bubble_rate"),
        peak_memory_bytes=integer("peak_memory_bytes"),
        refused=text("refused"),
        same_as=text("same_as"),
    )


def _choice_of(record: JsonRecord) -> Choice:
    schedule, micro_batches = record.at("schedule"), record.at("micro_batches")
    return Choice(
        strategy=record.at("strategy").text(),
        options=tuple((name, each.text()) for name, each in record.at("options").members()),
        schedule=None if schedule.value is None else schedule.text(),
        micro_batches=None if micro_batches.value is None else micro_batches.integer(1),
        recompute=record.at("recompute").text(),
        shard=record.at("shard").boolean(),
    )
