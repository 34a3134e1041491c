"""JSON documents: written compactly, read strictly; what is missing or of the wrong type is refused with its key."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from autopipe.ir.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class JsonRecord:
    """A value of a JSON document and where it stands: `placement.stages[2]` of a file."""

    value: object
    file: str
    path: str = ""

    def at(self, key: str) -> JsonRecord:
        """The value under `key` of an object."""
        if not isinstance(self.value, dict):
            self.refuse("an object")
        if key not in self.value:
            raise ConfigurationError(f"{self._key(key)} is missing", hint="write the file anew", where=self.file)
        return JsonRecord(self.value[key], self.file, self._key(key))

    def has(self, key: str) -> bool:
        """True if an object has a value under `key`."""
        return isinstance(self.value, dict) and key in self.value

    def items(self) -> Iterator[JsonRecord]:
        """The members of a list."""
        if not isinstance(self.value, list):
            self.refuse("a list")
        for index, value in enumerate(self.value):
            yield JsonRecord(value, self.file, f"{self.path}[{index}]")

    def members(self) -> Iterator[tuple[str, JsonRecord]]:
        """The entries of an object."""
        if not isinstance(self.value, dict):
            self.refuse("an object")
        for key, value in self.value.items():
            yield key, JsonRecord(value, self.file, self._key(key))

    def text(self) -> str:
        """A text."""
        if not isinstance(self.value, str):
            self.refuse("a text")
        return self.value

    def integer(self, least: int = 0) -> int:
        """A whole number of at least `least`."""
        if not isinstance(self.value, int) or isinstance(self.value, bool) or self.value < least:
            self.refuse(f"a whole number, at least {least}")
        return self.value

    def number(self) -> float:
        """A finite number."""
        if not isinstance(self.value, int | float) or isinstance(self.value, bool) or not math.isfinite(self.value):
            self.refuse("a number")
        return float(self.value)

    def boolean(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            self.refuse("true or false")
        return self.value

    def integers(self) -> tuple[int, ...]:
        """A list of whole numbers, at least 0 each."""
        return tuple(item.integer() for item in self.items())

    def refuse(self, expected: str) -> NoReturn:
        """Raise ConfigurationError for a value that is not `expected`."""
        shown = json.dumps(self.value, default=str)
        shown = shown if len(shown) <= 40 else shown[:37] + "..."
        raise ConfigurationError(
            f"{self.path or 'the document'} is {shown}", hint=f"expected {expected}", where=self.file
        )

    def _key(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key


def read_record(path: Path, form: str) -> JsonRecord:
    """The JSON document in `path`, an object whose `format` is `form`.

    Raises ConfigurationError for a file that cannot be read, is not JSON, or has another format.
    """
    where = str(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise ConfigurationError(f"cannot read the file: {error.strerror}", where=where) from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"not JSON: {error}", where=where) from error
    record = JsonRecord(document, where)
    found = record.at("format").text()
    if found != form:
        raise ConfigurationError(
            f"the format is {found!r}", hint=f"this autopipe reads {form!r}; write the file anew", where=where
        )
    return record


def record_text(form: dict[str, object]) -> str:
    """The document as JSON, an entry of the outer object a line: compact files, and differences that can be read."""
    lines = [f"{json.dumps(key)}: {_value_text(value)}" for key, value in form.items()]
    return "{" + ",\n ".join(lines) + "}\n"


def _value_text(value: object) -> str:
    """A value as JSON. What a list holds many times is worked out once: devices that do the same share their tasks."""
    if not isinstance(value, list | tuple):
        return json.dumps(value, allow_nan=False)
    texts = {key: json.dumps(entry, allow_nan=False) for key, entry in {id(each): each for each in value}.items()}
    return "[" + ", ".join(texts[id(each)] for each in value) + "]"


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")
