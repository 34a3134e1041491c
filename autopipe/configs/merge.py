"""Settings laid over one another: YAML over the defaults, the command line over YAML."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from autopipe.configs.configuration import Configuration
from autopipe.configs.dump import dump
from autopipe.configs.schema import keys, unwrap
from autopipe.configs.source import Entry, quote, read_setting, read_text, read_word
from autopipe.ir.errors import ConfigurationError

Setting = tuple[tuple[str, ...], Entry]
"""A path of keys and what is set there."""


OPTION_FLAGS = {
    "--stages": (
        ("strategy", "stages"),
        "Pipeline stages to make, where the strategy has an option stages (strategy.stages).",
    )
}
"""Flags of an option that several strategies have: the path of keys, and what it does."""


def flags() -> dict[str, str]:
    """The flags that set a key, in order of declaration: flag -> key."""
    return {key.flag: key.name for key in keys(Configuration) if key.flag}


def settings(words: Mapping[str, str], dims: Sequence[str], assignments: Sequence[str]) -> list[Setting]:
    """Settings of a command line, the later over the earlier.

    `words` are flags, of `OPTION_FLAGS` too, with their words, `dims` the words of `--dim NAME=EXTENT`, `assignments`
    those of `--set KEY=VALUE`. Raises ConfigurationError for a word without `=` or a key without a name.
    """
    found = [_flag_setting(flag, word) for flag, word in words.items()]
    for text in dims:
        name, value = _assignment(text, "--dim", "NAME=EXTENT")
        found.append((("model", "dims", name), read_word(value, f"--dim {text}")))
    for text in assignments:
        name, value = _assignment(text, "--set", "KEY=VALUE")
        found.append((tuple(name.split(".")), read_setting(value, f"--set {text}")))
    return found


def override(documents: Sequence[Entry], given: Sequence[Setting]) -> Entry:
    """The defaults with `documents`, configurations, at least one, laid over them in order, and the settings over all.

    A mapping is merged key by key, with two exceptions that keep leftovers away: another strategy, scheduler or cluster
    comes without the options of the one it replaces, and of two keys that exclude each other the given one stays.
    """
    over = Entry({}, documents[0].place)
    for path, entry in given:
        over = _lay(over, _nest(path, entry), None)
    merged = read_text(yaml.safe_dump(dump(Configuration())), "the defaults")
    for document in (*documents, over):
        merged = _lay(merged, document, Configuration)
    return merged


def _flag_setting(flag: str, word: str) -> Setting:
    entry = read_word(word, f"{flag} {word}")
    if flag in OPTION_FLAGS:
        return OPTION_FLAGS[flag][0], entry
    key = flags()[flag]
    if key == "cluster":
        return (key, "file" if "." in word or "/" in word else "preset"), entry
    return ((key, "name") if key in ("strategy", "schedule") else (key,)), entry


def _assignment(text: str, flag: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not all(name.split(".")):
        raise ConfigurationError(f"{flag} {quote(text)} is not of the form {form}")
    return name, value


def _nest(path: Iterable[str], entry: Entry) -> Entry:
    for name in reversed(tuple(path)):
        entry = Entry({name: entry}, entry.place)
    return entry


def _lay(base: Entry, over: Entry, hint: Any) -> Entry:
    """`over` laid on `base`; `hint` is the type of the value where it is known."""
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    schema = _schema(hint)
    chosen = {name for name in getattr(schema, "selectors", ()) if name in over.value}
    if any(over.value[name] != base.value.get(name) for name in chosen):
        return over
    merged = dict(base.value)
    for group in getattr(schema, "exclusive", ()):
        given = {name for name in group if name in over.value and over.value[name].value is not None}
        for name in set(group) - given if given else ():
            merged.pop(name, None)
    hints = {key.name: key.hint for key in keys(schema)} if schema else {}
    for name, entry in over.value.items():
        merged[name] = _lay(merged[name], entry, hints.get(name)) if name in merged else entry
    return Entry(merged, base.place)


def _schema(hint: Any) -> Any:
    """The dataclass that a mapping of this type becomes, if it becomes one."""
    base, _ = unwrap(hint)
    members = typing.get_args(base) or (base,)
    return next((member for member in members if dataclasses.is_dataclass(member)), None)
