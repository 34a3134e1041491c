"""Frozen dataclasses as schemas of YAML files.

Fields are keys, the type of a field is the type of its value, and the string under a field is its
documentation. The options of strategies and schedulers are the fields of their classes. Types and
marks are those of `autopipe.ir.codec`, which reads and writes the values.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import os
import re
import textwrap
import typing
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from autopipe.configs.yaml_source import Entry, Place
from autopipe.ir.codec import (
    Dataclass,
    DataclassType,
    ExtraKeys,
    FilePath,
    Key,
    NumberWithUnit,
    PositionOfKey,
    Record,
    decode,
    describe_type,
    former_keys,
    marked_field,
    schema_keys,
)
from autopipe.ir.errors import ConfigurationError, RenamedWarning, quote, similar_name_hint

_NUMBER_PATTERN = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


@functools.cache
def field_docs(schema: type[Dataclass]) -> dict[str, str]:
    """Return the string under each field of a dataclass, including inherited fields."""
    docs: dict[str, str] = {}
    for parent in reversed(schema.__mro__[:-1]):
        if dataclasses.is_dataclass(parent):
            tree = ast.parse(textwrap.dedent(inspect.getsource(parent)))
            for line, after in itertools.pairwise(typing.cast(ast.ClassDef, tree.body[0]).body):
                match line, after:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                        value=ast.Constant(value=str(text))
                    ):
                        docs[name] = inspect.cleandoc(text)
    return docs


def convert(entry: Entry, schema: type[DataclassType], path: str = "") -> DataclassType:
    """Return the mapping `entry` as an instance of `schema`. `path`, such as `optimizer`, names the
    mapping in errors. Raise ConfigurationError with file and line of the first invalid entry.
    """
    found: DataclassType = decode(YamlRecord(entry, key=path), schema)
    return found


def unknown_key(name: str, known: Iterable[str], place: Place, path: str) -> ConfigurationError:
    """Return the error for an unknown key, with the most similar known key as the hint."""
    within = f" in {path}" if path else ""
    return ConfigurationError(
        f"unknown key {quote(name)}{within}", hint=similar_name_hint(name, known), where=str(place)
    )


def with_present_keys(entry: Entry, schema: type[Dataclass], path: str = "") -> Entry:
    """Return the mapping `entry` with each former key of `schema` replaced by its present key.

    Emits a RenamedWarning per former key. If the mapping has a former key and its present key too,
    a flag overrides a file; otherwise raises ConfigurationError.
    """
    former = former_keys(schema)
    if not former or not isinstance(entry.value, dict) or former.keys().isdisjoint(entry.value):
        return entry
    present = dict(entry.value)
    prefix = f"{path}." if path else ""
    for old in [name for name in present if name in former]:
        new, mark = former[old]
        given = present.pop(old)
        other = present.get(new)
        if other is not None and other.place.is_flag == given.place.is_flag:
            raise ConfigurationError(
                f"{prefix}{old} is the former name of {prefix}{new}, and both keys are set",
                f"remove {prefix}{old}",
                str(given.place),
            )
        value: Any = mark.present_value(given.value)
        setting = f"{prefix}{new}"
        if value is not given.value:
            setting = f"{setting}: {value}"
        message = f"{given.place}: {prefix}{old} is deprecated, write {setting}"
        warnings.warn(message, RenamedWarning, stacklevel=2)
        if other is None or given.place.is_flag:
            text = given.text if value is given.value else str(value)
            present[new] = replace(given, value=value, text=text)
    return replace(entry, value=present)


class YamlRecord(Record):
    """A value of a YAML file or of the command line."""

    __slots__ = ("entry",)

    def __init__(self, entry: Entry, parent: Record | None = None, key: str | int = "") -> None:
        super().__init__(entry.value, parent, key)
        self.entry = entry

    @property
    def text(self) -> str | None:
        # Users do not quote text on a command line as in YAML. So a value that is parsed as a
        # number or bool may be text.
        if (
            self.entry.place.is_flag
            and isinstance(self.value, str | int | float | bool)
            and self.entry.text
        ):
            return self.entry.text
        return self.value if isinstance(self.value, str) else None

    @property
    def display(self) -> str:
        return self.entry.text or str(self.value)

    def child(self, value: Entry, key: str | int) -> YamlRecord:
        return YamlRecord(value, self, key)

    def error(self, message: str, hint: str = "") -> ConfigurationError:
        return ConfigurationError(message, hint=hint, where=str(self.entry.place))

    def lacks(self, key: str, hint: Any) -> ConfigurationError:
        return self.error(
            f"{self.path or 'the file'} lacks the key {key!r}", f"it is {describe_type(hint)}"
        )

    def rejection_by_all_members(
        self, union: Any, refusals: list[ConfigurationError]
    ) -> ConfigurationError:
        # A number on a command line is also valid text, so a number type and a text type of the
        # union may both reject it. The error of the number type, which is the first, is more
        # specific.
        return refusals[-1 if isinstance(self.value, str) else 0]

    def scalar(self, base: type, marks: tuple[object, ...]) -> object:
        path = next((mark for mark in marks if isinstance(mark, FilePath)), None)
        if base is str and path is not None:
            text = self.text or ""
            if path.refuses is not None and path.refuses(text):
                raise self.error(f"{self.path}: {quote(text)} is {path.words}", path.hint)
            if ("/" not in text and "." not in text) or "\0" in text:
                raise self.error(
                    f"{self.path}: {quote(text)} is not a path", "write a path with a '.' or a '/'"
                )
            return os.path.normpath(os.path.join(self.entry.place.folder, text))
        if base is str:
            return self.text
        for mark in marks:
            if isinstance(mark, NumberWithUnit) and isinstance(self.value, str):
                found = mark.parse(self.value)
                if found is None:
                    self.reject(describe_type(typing.Annotated[base, *marks]))
                return found
        return self.value

    def listed(self) -> YamlRecord:
        if isinstance(self.value, dict | tuple) or self.text is None:
            return self
        return YamlRecord(replace(self.entry, value=(self.entry,)), self.parent, self.key)

    def is_optional(self, key: Key) -> bool:
        return not key.required

    def rest(self, schema: type[Dataclass]) -> dict[str, object]:
        values: dict[str, object] = {}
        claimed = {key.name for key in schema_keys(schema)}
        more = [name for name in self.value if name not in claimed]
        if rest := marked_field(schema, ExtraKeys):
            values[rest[0]] = tuple((name, self.value[name]) for name in more)
        elif more:
            known = (key.name for key in schema_keys(schema))
            raise unknown_key(more[0], known, self.value[more[0]].place, self.path)
        origin = marked_field(schema, PositionOfKey)
        if origin and origin[1].key in self.value:
            values[origin[0]] = self.value[origin[1].key].place
        return values

    def with_present_keys(self, schema: type[Dataclass]) -> YamlRecord:
        entry = with_present_keys(self.entry, schema, self.path)
        return self if entry is self.entry else YamlRecord(entry, self.parent, self.key)

    def complete(self, schema: type[Dataclass], values: dict[str, object]) -> None:
        """Raise ConfigurationError if keys that exclude each other are set."""
        defaults = {key.name: key.default for key in schema_keys(schema)}
        for group in getattr(schema, "exclusive", ()):
            together = [name for name in group if name in values and values[name] != defaults[name]]
            if len(together) > 1:
                names = " and ".join(self.child(self.entry, name).path for name in together)
                raise self.at(together[-1]).error(
                    f"{names} exclude each other", "remove all but one"
                )

    def refusal(self, expected: str) -> ConfigurationError:
        value = self.value
        text = self.entry.text
        hint = f"expected {expected}"
        if isinstance(value, dict | tuple):
            found = "a mapping" if isinstance(value, dict) else "a list"
        elif value is None:
            found = text or "nothing"
        elif isinstance(value, str):
            found = quote(value)
            if (
                self.entry.quoted
                and "number" in expected
                and _NUMBER_PATTERN.fullmatch(self.entry.text)
            ):
                hint = f"write {self.entry.text} without quotes"
        else:
            found = (
                f"{text} (which YAML reads as {str(value).lower()})"
                if isinstance(value, bool)
                else text
            )
            hint += f'; write "{text}" in quotes' if "text" in expected else ""
        return self.error(f"{self.path or 'the file'} is {found}", hint)
