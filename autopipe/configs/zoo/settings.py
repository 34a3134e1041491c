"""From `KEY=VALUE` words to a model of the zoo; its fields say which keys there are."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

from autopipe.configs.zoo.model import Setting, ZooModel
from autopipe.ir.errors import ConfigurationError

Model = TypeVar("Model", bound=ZooModel)

SIZE_KEY: Final = "size"
LEAST: Final = {"seed": 0, "opset": 20}
MOST: Final = {"seed": 2**63 - 1, "opset": 23}


def parse_words(words: Iterable[str]) -> dict[str, str]:
    """`KEY=VALUE` words as a mapping; a later word for the same key wins."""
    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigurationError(f"'{word}' is not of the form KEY=VALUE", where="--set")
        settings[key.strip()] = value.strip()
    return settings


def configure(kind: type[Model], settings: Mapping[str, Setting]) -> Model:
    """The model of class `kind` with `settings`; `size` names a preset, which the other keys then change.

    Values may be text, as typed by a user, or already of the field's type. Raises ConfigurationError for an unknown
    key or preset (with the nearest match), a value of the wrong type, and sizes that contradict each other.
    """
    hints = typing.get_type_hints(kind)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    values: dict[str, typing.Any] = {}
    if SIZE_KEY in settings:
        values.update(_preset(kind, str(settings[SIZE_KEY])))
    for key, value in settings.items():
        if key == SIZE_KEY:
            continue
        if key not in fields:
            raise ConfigurationError(f"no such setting '{key}'", hint=_nearest(key, [*fields, SIZE_KEY]), where="--set")
        values[key] = _typed(key, value, fields[key], {**LEAST, **kind.least})
    model = kind(**values)
    for whole, part in kind.multiples:
        _require_multiple(model, whole, part)
    for lower, upper in kind.limits:
        _require_limit(model, lower, upper)
    return model


def _preset(kind: type[ZooModel], size: str) -> Mapping[str, Setting]:
    """The fields that preset `size` sets."""
    if size not in kind.presets:
        raise ConfigurationError(f"no such size '{size}'", hint=_nearest(size, list(kind.presets)), where="--set size")
    return kind.presets[size]


def _nearest(word: str, known: list[str]) -> str:
    """Advice for a word that is not among `known`."""
    near = difflib.get_close_matches(word, known, n=1)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"there are: {', '.join(sorted(known))}" if known else "this model has no presets"


def _require_multiple(model: ZooModel, whole: str, part: str) -> None:
    """Raise ConfigurationError unless field `whole` of `model` is a multiple of its field `part`."""
    extent, divisor = getattr(model, whole), getattr(model, part)
    if extent % divisor:
        nearest = max(1, round(extent / divisor)) * divisor
        message = f"{whole} = {extent} is not a multiple of {part} = {divisor}"
        raise ConfigurationError(message, hint=f"{whole}={nearest} would be", where="--set")


def _require_limit(model: ZooModel, lower: str, upper: str) -> None:
    """Raise ConfigurationError unless field `lower` of `model` is at most its field `upper`."""
    extent, limit = getattr(model, lower), getattr(model, upper)
    if extent > limit:
        raise ConfigurationError(f"{lower} = {extent} exceeds {upper} = {limit}", where="--set")


def _typed(key: str, value: Setting, hint: object, least: Mapping[str, int]) -> Setting:
    """`value` as the field's type wants it, whole numbers at least `least` (1 where it has no entry)."""
    where = f"--set {key}"
    if typing.get_origin(hint) is typing.Literal:
        options = [str(option) for option in typing.get_args(hint)]
        if value not in options:
            raise ConfigurationError(f"'{value}' is none of {', '.join(options)}", where=where)
        return value
    if hint is bool:
        return _truth(value, where)
    if hint is int:
        return _whole(value, where, least.get(key, 1), MOST.get(key))
    if typing.get_origin(hint) is tuple:
        parts = value if isinstance(value, tuple) else str(value).split(",")
        return tuple(_whole(part, where, 1, None) for part in parts)
    assert typing.get_origin(hint) in (typing.Union, types.UnionType), f"no reader for fields of type {hint}"
    return None if value in (None, "symbolic") else _whole(value, where, 1, None)


def _truth(value: Setting, where: str) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    raise ConfigurationError(f"'{value}' is neither true nor false", where=where)


def _whole(value: Setting, where: str, least: int, most: int | None) -> int:
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if not isinstance(number, int) or isinstance(number, bool):
        raise ConfigurationError(f"'{value}' is not a whole number", where=where)
    if number < least or (most is not None and number > most):
        limits = f"at least {least}" + ("" if most is None else f" and at most {most}")
        raise ConfigurationError(f"{number} is out of range", hint=limits, where=where)
    return number
