"""Reading of YAML text as entries with file and line, and of quantities such as `14GiB`, `900GB/s`
and `5us`.

Files are untrusted. In addition to what `yaml.safe_load` rejects, this reader rejects duplicate
keys, keys that are not text, anchors, aliases, tags, several documents, numbers in base 8 or 60,
NaN and infinity, deep nesting and large files.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from autopipe.ir.codec import NumberWithUnit
from autopipe.ir.errors import ConfigurationError, quote

MAX_FILE_BYTES = 2**23
MAX_NESTING = 32
_DECIMAL_INTEGER_PATTERN = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_EXPONENT_PATTERN = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+\Z")
"""Numbers such as 1e-4 and 1.5e3, which YAML 1.1 reads as text and YAML 1.2 as numbers."""
_BASE_SIXTY_PATTERN = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")


@dataclass(frozen=True, slots=True)
class Place:
    source: str
    """A file's path, or a flag such as `--set seed=1`."""
    line: int | None = None
    """Line in the file, from 1; None for a flag."""
    folder: str = ""
    """Folder to which relative paths are relative."""

    @property
    def is_flag(self) -> bool:
        return self.line is None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One value of a YAML file: a scalar, a list of entries or named entries."""

    value: str | int | float | bool | tuple[Entry, ...] | dict[str, Entry] | None
    """The value. A mapping has the key order of the file."""
    place: Place = field(compare=False)
    """File and line, or flag, of the value."""
    text: str = field(default="", compare=False)
    """Source text of a scalar."""
    quoted: bool = field(default=False, compare=False)
    """True if a scalar was written in quotes or as a block."""

    def plain(self) -> object:
        """Return the value as lists, dicts and scalars, without file and line."""
        if isinstance(self.value, tuple):
            return [entry.plain() for entry in self.value]
        if isinstance(self.value, dict):
            return {key: entry.plain() for key, entry in self.value.items()}
        return self.value


def read_file(path: str | Path) -> Entry:
    """Return the single YAML document of a file, a mapping. Raise ConfigurationError with
    `file:line` for a file that cannot be read, is not UTF-8 or is not valid YAML of this reader.
    """
    name = str(path)
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(
            f"the file cannot be read: {error.strerror}", where=name
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"the file cannot be read: {error}", where=repr(name)) from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigurationError(
            "the file is too large for a configuration",
            hint="use a file of 8 MiB or less",
            where=name,
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(
            "the file is not UTF-8 text", hint="save the file as UTF-8", where=f"{name}:{line}"
        ) from error
    return read_text(text, name, folder=os.path.dirname(os.path.abspath(name)))


def read_text(text: str, source: str, folder: str = "") -> Entry:
    """Return the single YAML document in `text`, a mapping. `source` names the text in errors."""
    entry = _read_document(text, Place(source, 1, folder))
    if entry is None or (entry.value is None and not entry.text):
        raise ConfigurationError("the file is empty", hint="add one key or more", where=source)
    if not isinstance(entry.value, dict):
        raise ConfigurationError(
            "the document is not a mapping", "write `key: value` lines", str(entry.place)
        )
    return entry


def read_setting(text: str, flag: str) -> Entry:
    """Return a command-line value that is YAML. Paths are relative to the working directory."""
    place = Place(flag, None, os.getcwd())
    if text.startswith("*"):
        # YAML would read a text that starts with an asterisk, for example the glob `*.bias`, as an
        # alias. So this text is returned without parsing.
        return Entry(text, place, text)
    return _read_document(text, place) or Entry(None, place)


def read_word(text: str, flag: str) -> Entry:
    """Return the value of a flag: a finite number if it is one, otherwise text."""
    place = Place(flag, None, os.getcwd())
    for number in (int, float):
        try:
            value = number(text)
        except ValueError:
            continue
        if math.isfinite(value):
            return Entry(value, place, text)
    return Entry(text, place, text)


def _read_document(text: str, start: Place) -> Entry | None:
    loader: _Composer | None = None
    try:
        loader = _Composer(text, start)
        node = loader.get_single_node()
        return None if node is None else loader.entry(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.context, error.problem) if part)
        several = problem.startswith("expected a single document")
        message = "several documents where one is expected" if several else f"not YAML: {problem}"
        hint = "write text that begins with * in quotes" if "scanning an alias" in problem else ""
        raise ConfigurationError(message, hint, str(_place_of_mark(start, mark))) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        place = start if start.is_flag else Place(start.source, line)
        raise ConfigurationError(
            "the text contains a control character", where=str(place)
        ) from error
    finally:
        if loader is not None:
            loader.dispose()


class _Composer(yaml.SafeLoader):
    """A YAML composer that rejects anchors, aliases, tags and deep nesting."""

    def __init__(self, text: str, start: Place) -> None:
        super().__init__(text)
        self.start = start
        self.depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        place = str(_place_of_mark(self.start, event.start_mark))
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            hint = "replace the alias by the value, and quote text that begins with * or &"
            raise ConfigurationError("anchors and aliases are not supported", hint, place)
        if event.tag is not None:
            raise ConfigurationError(
                f"the tag {quote(event.tag)} is not supported", "write the plain value", place
            )
        if self.depth >= MAX_NESTING:
            raise ConfigurationError(
                f"the YAML is nested deeper than {MAX_NESTING} levels", where=place
            )
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def entry(self, node: yaml.Node, key: Place | None = None) -> Entry:
        """Return the node as an entry. `key`, if given, is the place of its key."""
        place = key or _place_of_mark(self.start, node.start_mark)
        if isinstance(node, yaml.SequenceNode):
            return Entry(tuple(self.entry(item) for item in node.value), place)
        if isinstance(node, yaml.MappingNode):
            return Entry(self._mapping(node), place)
        assert isinstance(node, yaml.ScalarNode)
        return Entry(_scalar_value(node, place), place, node.value, quoted=node.style is not None)

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for key_node, value_node in node.value:
            place = _place_of_mark(self.start, key_node.start_mark)
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigurationError(
                    "a key is a list or a mapping, expected text", where=str(place)
                )
            key = key_node.value
            if key_node.style is None and key_node.tag != "tag:yaml.org,2002:str":
                message = f"YAML does not read the key {key or 'of this line'} as text"
                raise ConfigurationError(message, f'quote the key: "{key}"', str(place))
            if key in entries:
                line = entries[key].place.line
                first = f" (first in line {line})" if line is not None else ""
                raise ConfigurationError(
                    f"the key {quote(key)} occurs twice{first}",
                    "remove one of the two keys",
                    str(place),
                )
            entries[key] = self.entry(value_node, place)
        return entries


class Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes text that `_Composer` would read as a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind in (_Composer, Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT_PATTERN, list("-+.0123456789"))


def _scalar_value(node: yaml.ScalarNode, place: Place) -> str | int | float | bool | None:
    text: str = node.value
    decimal = f'write a decimal number, or "{text}" in quotes'
    match node.tag.rpartition(":")[2]:
        case "null":
            return None
        case "bool":
            return text.lower() in ("yes", "true", "on")
        case "int" if not _DECIMAL_INTEGER_PATTERN.fullmatch(text):
            message = f"YAML does not read {text} as a decimal number"
            hint = decimal
        case "int" if len(text) > 64 or abs(int(text)) >= 2**63:
            message = "the number is too large"
            hint = "at most 2^63 - 1"
        case "int":
            return int(text)
        case "float" if _BASE_SIXTY_PATTERN.fullmatch(text):
            message = f"YAML reads {text} in base 60"
            hint = decimal
        case "float":
            # `float` raises ValueError for YAML's notations `.nan` and `.inf`, which are then
            # rejected below.
            with suppress(ValueError):
                if math.isfinite(value := float(text)):
                    return value
            message = f"{text} is not a finite number"
            hint = "write a finite number"
        case _:
            return text
    raise ConfigurationError(message, hint, str(place))


def _place_of_mark(start: Place, mark: yaml.Mark | None) -> Place:
    if start.is_flag or mark is None:
        return start
    return Place(start.source, mark.line + 1, start.folder)


_PREFIX_FACTORS = {
    "": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50,
}  # fmt: skip
_FRACTION_PREFIX_FACTORS = {
    "": Fraction(1),
    "m": Fraction(1, 10**3),
    "u": Fraction(1, 10**6),
    "n": Fraction(1, 10**9),
}
_QUANTITY_PATTERN = re.compile(
    r"\s*(\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})\s*([a-zA-Z/]*)\s*", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Unit(NumberWithUnit):
    """A unit of a quantity, with SI or binary prefixes."""

    symbol: str
    """Symbol of the unit, such as `B`."""
    noun: str
    """Name of the quantity with its article, such as `a size`."""
    example: str
    """An example of a quantity."""
    whole: bool = False
    """True if a quantity must be an integer number of units."""
    eighths: tuple[str, ...] = ()
    """Symbols of units that are 1/8 of this unit: `400Gb/s` is 50 GB/s."""

    def parse(self, text: str) -> float | None:
        """Return the quantity in this unit, or None if `text` is not a quantity."""
        written = _QUANTITY_PATTERN.fullmatch(text)
        if written is None:
            return None
        number, suffix = written.groups()
        symbol = next(
            (each for each in (self.symbol, *self.eighths) if suffix.endswith(each)), None
        )
        if suffix and symbol is None:
            return None
        prefixes: Mapping[str, int | Fraction] = (
            _FRACTION_PREFIX_FACTORS if self.symbol == "s" else _PREFIX_FACTORS
        )
        scale = prefixes.get(suffix.removesuffix(symbol or ""))
        if scale is None:
            return None
        value = Fraction("0" + number) * scale
        if symbol in self.eighths:
            value /= 8
        if not self.whole:
            return float(value)
        return int(value) if value.denominator == 1 else None

    def to_text(self, value: Any) -> object:
        return self.format(value) if self.whole and isinstance(value, int) else value

    def describe(self, words: str) -> str:
        return f"{self.noun} such as {self.example}, or {words} of {self.symbol}"

    def format(self, value: float) -> str:
        """Return an integer quantity with the largest prefix that is exact; otherwise the number
        without a unit.
        """
        if self.whole and value >= 1:
            for prefix, scale in sorted(_PREFIX_FACTORS.items(), key=lambda pair: -pair[1]):
                if value % scale == 0 and prefix != "K":
                    return f"{int(value) // scale}{prefix}{self.symbol}"
        return repr(value)


BYTES = Unit("B", "a size", "14GiB", whole=True)
BYTES_PER_SECOND = Unit("B/s", "a rate", "900GB/s or 400Gb/s", eighths=("b/s", "bit/s", "bps"))
FLOPS = Unit("FLOP/s", "a rate", "15.7TFLOP/s")
SECONDS = Unit("s", "a time", "5us or 10s")
