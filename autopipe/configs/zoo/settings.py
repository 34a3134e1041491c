"""From `KEY=VALUE` words to a model of the zoo; its fields say which keys there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

from autopipe.configs.convert import convert, nearest, unknown_key
from autopipe.configs.schema import keys
from autopipe.configs.source import Entry, Place, quote, read_setting
from autopipe.configs.zoo.model import Setting, ZooModel
from autopipe.ir.errors import ConfigurationError

Model = TypeVar("Model", bound=ZooModel)

SIZE_KEY: Final = "size"


def parse_words(words: Iterable[str]) -> dict[str, str]:
    """`KEY=VALUE` words as a mapping; a later word for the same key wins."""
    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigurationError(f"--set {quote(word)} is not of the form KEY=VALUE")
        settings[key] = value
    return settings


def configure(kind: type[Model], settings: Mapping[str, Setting]) -> Model:
    """The model of class `kind` with `settings`; `size` names a preset, which the other keys then change.

    A value that is text is read as YAML, as on a command line. Raises ConfigurationError for an unknown key or preset
    (with the nearest match), a value of the wrong type, and sizes that contradict each other.
    """
    given = dict(settings)
    chosen = _preset(kind, str(given.pop(SIZE_KEY))) if SIZE_KEY in given else {}
    known = [key.name for key in keys(kind)]
    entries = {}
    for name, value in {**chosen, **given}.items():
        entries[name] = _entry(name, value)
        if name not in known:
            raise unknown_key(name, [*known, SIZE_KEY], entries[name].place, "")
    model = convert(Entry(entries, Place("--set")), kind)
    for whole, part in kind.multiples:
        _require_multiple(model, whole, part)
    for lower, upper in kind.limits:
        _require_limit(model, lower, upper)
    return model


def _entry(name: str, value: Setting) -> Entry:
    """`value` as what was read; text is YAML that is still to be read."""
    if isinstance(value, str):
        return read_setting(value, f"--set {name}={value}")
    place = Place(f"--set {name}")
    if isinstance(value, tuple):
        return Entry(tuple(_entry(name, item) for item in value), place)
    return Entry(value, place, str(value))


def _preset(kind: type[ZooModel], size: str) -> Mapping[str, Setting]:
    """The fields that preset `size` sets."""
    if size not in kind.presets:
        raise ConfigurationError(f"no such size {quote(size)}", hint=nearest(size, kind.presets), where="--set size")
    return kind.presets[size]


def _require_multiple(model: ZooModel, whole: str, part: str) -> None:
    """Raise ConfigurationError unless field `whole` of `model` is a multiple of its field `part`."""
    extent, divisor = getattr(model, whole), getattr(model, part)
    if extent % divisor:
        nearest_multiple = max(1, round(extent / divisor)) * divisor
        message = f"{whole} = {extent} is not a multiple of {part} = {divisor}"
        raise ConfigurationError(message, hint=f"{whole}={nearest_multiple} would be", where="--set")


def _require_limit(model: ZooModel, lower: str, upper: str) -> None:
    """Raise ConfigurationError unless field `lower` of `model` is at most its field `upper`."""
    extent, limit = getattr(model, lower), getattr(model, upper)
    if extent > limit:
        raise ConfigurationError(f"{lower} = {extent} exceeds {upper} = {limit}", where="--set")
