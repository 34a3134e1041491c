"""Conversion between dataclasses and documents (JSON, YAML), driven by type annotations.

The keys of a dataclass are its fields in order of declaration, or the names in its class attribute
`written`. Supported types: `bool`, `int`, `float`, `str`, `Literal`, enumerations, `tuple[X, ...]`
and `tuple[X, Y]` (lists), `tuple[tuple[str, X], ...]` (a mapping), `dict` (unchanged), dataclasses,
and unions of these and `None`. Marks refine a type: `Annotated[int, AtLeast(1)]`. Documents are
untrusted: a missing or invalid value raises ConfigurationError with its place and key.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import math
import operator
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Protocol, Self, TypeVar

from autopipe.ir.errors import ConfigurationError, quote, similar_name_hint
from autopipe.ir.words import plural


class Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


DataclassType = TypeVar("DataclassType", bound=Dataclass)
MarkType = TypeVar("MarkType")


@dataclass(frozen=True, slots=True)
class Bound:
    """Mark of a number with a bound. Errors use `words`, descriptions use `preposition`."""

    words: str
    preposition: str
    holds: Callable[[float, float], bool]
    bound: float


AtLeast = functools.partial(Bound, "at least", "from", operator.ge)
Above = functools.partial(Bound, "above", "above", operator.gt)
AtMost = functools.partial(Bound, "at most", "up to", operator.le)


class NumberWithUnit:
    """Mark of a number that may be written as text with a unit."""

    __slots__ = ()

    def parse(self, text: str) -> float | None:
        """Return the number in `text`, or None if there is none."""
        raise NotImplementedError

    def to_text(self, value: Any) -> object:
        raise NotImplementedError

    def describe(self, words: str) -> str:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class FilePath:
    """Mark of a path. A relative path is relative to the folder of the document. A path contains a
    `.` or a `/`, which distinguishes it from a name.

    A text for which `refuses` is true is rejected: `words` describe the text in the error, and
    `hint` is the hint of the error.
    """

    refuses: Callable[[str], bool] | None = None
    words: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Predicate:
    """Mark of a value for which `test` is true. `words` describe valid values."""

    test: Callable[[Any], object]
    words: str


@dataclass(frozen=True, slots=True)
class KeyPath:
    """Mark of a field whose key is not its name. A dot separates the keys of nested mappings."""

    key: str


class OmitDefault:
    """Mark of a field that is not written if its value is the default."""


class Inline:
    """Mark of a field, a dataclass, whose keys are in the mapping of the outer dataclass."""


class AsList:
    """Mark of a dataclass that is written as a list of its fields. Trailing fields with defaults
    may be missing in a document.
    """


@dataclass(frozen=True, slots=True)
class CustomCodec:
    """Mark of a value with custom functions for writing and reading."""

    write: Callable[[Any], object]
    read: Callable[[Record], object]
    words: str = "a list"


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """Mark of a field of pairs (key, value) for all keys that no other field has. The values are
    those of the document; `plain` converts a value for writing.
    """

    plain: Callable[[Any], object]


@dataclass(frozen=True, slots=True)
class PositionOfKey:
    """Mark of a field that is set to the file and line of the key `key`."""

    key: str


@dataclass(frozen=True, slots=True)
class FormerKey:
    """Mark of a field that had another key in the previous release: documents may still use it.

    `values` lists (former value, present value) for the values that changed with the key.
    """

    key: str
    values: tuple[tuple[object, object], ...] = ()

    def present_value(self, value: object) -> object:
        """Return the present form of a former value; a value that did not change is returned."""
        for former, present in self.values:
            if type(former) is type(value) and former == value:
                return present
        return value


Index = Annotated[int, AtLeast(0)]
Count = Annotated[int, AtLeast(1)]
Amount = Annotated[float, AtLeast(0)]
NonEmpty = Predicate(bool, "at least one")


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a dataclass."""

    name: str
    """Name of the field."""
    hint: Any
    """Type of the field, with its marks."""
    default: object
    """Default value; `dataclasses.MISSING` if the key is required."""
    flag: str = ""
    """Command-line flag that sets the key; "" if there is none."""
    path: tuple[str, ...] = ()
    """Keys of the nested mappings that lead to the value."""
    sparse: bool = False
    flat: bool = False

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING


@functools.cache
def schema_keys(schema: type[Dataclass]) -> tuple[Key, ...]:
    """Return the keys of `schema` in order, except fields marked `ExtraKeys` or `PositionOfKey`."""
    hints = typing.get_type_hints(schema, include_extras=True)
    found = {}
    for field in dataclasses.fields(schema):
        name = field.name
        hint = hints[field.name]
        factory = field.default_factory
        marks = {type(mark): mark for mark in split_annotated(hint)[1]}
        if field.init and marks.keys().isdisjoint((ExtraKeys, PositionOfKey)):
            default = field.default if factory is dataclasses.MISSING else factory()
            path = tuple(typing.cast(KeyPath, marks.get(KeyPath, KeyPath(name))).key.split("."))
            found[name] = Key(
                name,
                hint,
                default,
                field.metadata.get("flag", ""),
                path,
                OmitDefault in marks,
                Inline in marks,
            )
    return tuple(found[name] for name in getattr(schema, "written", found))


@functools.cache
def former_keys(schema: type[Dataclass]) -> Mapping[str, tuple[str, FormerKey]]:
    """Return the key that replaces each former key of `schema`, with the mark of its field."""
    found = {}
    for key in schema_keys(schema):
        if mark := find_mark(split_annotated(key.hint)[1], FormerKey):
            found[mark.key] = (key.path[0], mark)
    return found


def split_annotated(hint: Any) -> tuple[Any, tuple[object, ...]]:
    """Return (type without marks, marks)."""
    if typing.get_origin(hint) is Annotated:
        base, *marks = typing.get_args(hint)
        return base, tuple(marks)
    return hint, ()


def find_mark(marks: tuple[object, ...], kind: type[MarkType]) -> MarkType | None:
    return next((mark for mark in marks if isinstance(mark, kind)), None)


def is_union(base: Any) -> bool:
    return typing.get_origin(base) in (typing.Union, types.UnionType)


def is_mapping(base: Any) -> bool:
    """True if a type is `tuple[tuple[str, X], ...]`, which is written as a mapping."""
    pair, *more = typing.get_args(base) or (None,)
    is_pair = typing.get_origin(pair) is tuple and typing.get_args(pair)[0] is str
    return (
        typing.get_origin(base) is tuple
        and more == [Ellipsis]
        and is_pair
        and ... not in typing.get_args(pair)
    )


def marked_field(schema: type[Dataclass], kind: type[MarkType]) -> tuple[str, MarkType] | None:
    """Return (name of the field, mark) of the first field with a mark of class `kind`, or None."""
    hints = typing.get_type_hints(schema, include_extras=True)
    marks = (
        (field.name, find_mark(split_annotated(hints[field.name])[1], kind))
        for field in dataclasses.fields(schema)
    )
    return next(((name, mark) for name, mark in marks if mark is not None), None)


def describe_type(hint: Any) -> str:
    """Return a type in words, such as "a whole number from 1 or `auto`"."""
    base, marks = split_annotated(hint)
    for mark in marks:
        if isinstance(mark, CustomCodec | Predicate):
            return mark.words
    origin = typing.get_origin(base)
    members = typing.get_args(base)
    if is_union(base):
        return " or ".join(map(describe_type, members))
    if origin is Literal:
        return " or ".join(f"`{option}`" for option in members)
    if is_mapping(base):
        return f"a mapping of {describe_type(typing.get_args(members[0])[1])}"
    if origin is tuple and members[-1] is Ellipsis:
        return f"a list of {describe_type(members[0])}"
    if origin is tuple:
        return f"a list of {len(members)}: " + ", ".join(map(describe_type, members))
    if dataclasses.is_dataclass(base):
        names = ", ".join(
            ".".join(key.path) for key in schema_keys(typing.cast("type[Dataclass]", base))
        )
        return f"a list: {names}" if find_mark(marks, AsList) else f"a mapping with {names}"
    if find_mark(marks, FilePath):
        return "a path (text)"
    plain = {
        str: "text",
        bool: "`true` or `false`",
        int: "a whole number",
        float: "a number",
        type(None): "`null`",
    }
    words = plain.get(base, "a mapping" if origin is dict else str(base))
    if spelling := find_mark(marks, NumberWithUnit):
        return spelling.describe(words)
    return " ".join(
        [words, *(f"{mark.preposition} {mark.bound}" for mark in marks if isinstance(mark, Bound))]
    )


class Record:
    """A value of a document, with its path of keys. Each format has a subclass, which creates the
    errors.
    """

    __slots__ = ("key", "parent", "value")
    is_plain: ClassVar[bool] = False
    """True if nested values are plain lists, dicts and scalars."""

    def __init__(self, value: Any, parent: Record | None = None, key: str | int = "") -> None:
        self.value = value
        """A scalar, or a list, tuple or dict with values of the format."""
        self.parent = parent
        self.key = key

    @property
    def path(self) -> str:
        """Path of keys of this value: `placement.stages[2]`."""
        above = self.parent.path if self.parent else ""
        if isinstance(self.key, int):
            return f"{above}[{self.key}]"
        return f"{above}.{self.key}" if above and self.key else above or self.key

    @property
    def text(self) -> str | None:
        """The value as text, or None if it is not text."""
        return self.value if isinstance(self.value, str) else None

    @property
    def display(self) -> str:
        raise NotImplementedError

    def child(self, value: Any, key: str | int) -> Self:
        raise NotImplementedError

    def error(self, message: str, hint: str = "") -> ConfigurationError:
        raise NotImplementedError

    def refusal(self, expected: str) -> ConfigurationError:
        raise NotImplementedError

    def reject(self, expected: str) -> NoReturn:
        raise self.refusal(expected)

    def lacks(self, key: str, hint: Any) -> ConfigurationError:
        """Return the error for a missing key with a value of type `hint`."""
        raise NotImplementedError

    def rejection_by_all_members(
        self, union: Any, refusals: list[ConfigurationError]
    ) -> ConfigurationError:
        """Return the error for a value that several members of a union rejected."""
        return self.refusal(describe_type(union))

    def scalar(self, base: type, marks: tuple[object, ...]) -> Any:
        return self.value

    def listed(self) -> Self:
        """Return the record to read as a list of texts. Formats that accept a single text as a list
        of one override this.
        """
        return self

    def is_optional(self, key: Key) -> bool:
        """True if this key may be missing."""
        return key.sparse

    def rest(self, schema: type[Dataclass]) -> dict[str, object]:
        """Return the values of fields marked `ExtraKeys` or `PositionOfKey`. Formats that reject
        unknown keys override this.
        """
        return {}

    def with_present_keys(self, schema: type[Dataclass]) -> Self:
        """Return this mapping with former keys of `schema` (see `FormerKey`) replaced."""
        former = former_keys(schema)
        if not former or former.keys().isdisjoint(self.value):
            return self
        present = dict(self.value)
        for name in former.keys() & present.keys():
            key, mark = former[name]
            present.setdefault(key, mark.present_value(present.pop(name)))
        record = copy.copy(self)
        record.value = present
        return record

    def complete(self, schema: type[Dataclass], values: dict[str, object]) -> None:
        """Check the values of a dataclass, by field name, before it is constructed."""

    def has(self, key: str) -> bool:
        return isinstance(self.value, dict) and key in self.value

    def at(self, key: str, hint: Any = object) -> Self:
        if not isinstance(self.value, dict):
            self.reject("an object")
        if key not in self.value:
            raise self.lacks(key, hint)
        return self.child(self.value[key], key)

    def get(self, key: str, hint: Any) -> Any:
        """Return the value of key `key` as a value of type `hint`."""
        if self.is_plain and (quick := _fast_reader(hint)) and self.has(key):
            found = quick(self.value[key])
            if found is not _NOT_READ_FAST:
                return found
        return decode(self.at(key, hint), hint)

    def items(self) -> Iterator[Self]:
        if not isinstance(self.value, list | tuple):
            self.reject("a list")
        for index, value in enumerate(self.value):
            yield self.child(value, index)

    def members(self) -> Iterator[tuple[str, Self]]:
        if not isinstance(self.value, dict):
            self.reject("an object")
        for key, value in self.value.items():
            yield key, self.child(value, key)


Reader = Callable[[Record], Any]


def decode(record: Record, hint: Any, **more: object) -> Any:
    """Return the record as a value of type `hint`. If fields are given in `more`, `hint` is a
    dataclass and these fields are not read. Raise ConfigurationError for an invalid record.
    """
    return _read_dataclass(hint, record, **more) if more else _reader(hint)(record)


@functools.cache
def _reader(hint: Any) -> Reader:
    """Return the function that reads a type. It is cached: large documents have few types."""
    base, marks = split_annotated(hint)
    origin = typing.get_origin(base)
    if coded := find_mark(marks, CustomCodec):
        return coded.read
    if is_union(base):
        return functools.partial(_read_union, base)
    if fits := find_mark(marks, Predicate):
        inner = tuple(mark for mark in marks if mark is not fits)
        return functools.partial(
            _read_with_predicate, _reader(Annotated[base, *inner] if inner else base), fits
        )
    if dataclasses.is_dataclass(base):
        return functools.partial(
            _read_row if find_mark(marks, AsList) else _read_dataclass, typing.cast(Any, base)
        )
    if origin is Literal:
        return functools.partial(_read_literal, base)
    if origin is tuple:
        return functools.partial(_read_tuple, base)
    if isinstance(base, type) and issubclass(base, enum.Enum):
        values: Any = Literal[tuple(each.value for each in base)]
        return lambda record: base(_read_literal(values, record))
    if base is Any:
        return lambda record: record.value
    return functools.partial(_read_scalar, hint, origin or base, marks)


def _read_with_predicate(read: Reader, fits: Predicate, record: Record) -> object:
    if not fits.test(value := read(record)):
        record.reject(fits.words)
    return value


def _read_union(union: Any, record: Record) -> object:
    fitting = [member for member in typing.get_args(union) if fits_type(record, member)]
    if not fitting:
        record.reject(describe_type(union))
    refusals = []
    for member in fitting:
        try:
            return decode(record, member)
        except ConfigurationError as error:
            refusals.append(error)  # The next member may accept the value.
    raise refusals[0] if len(refusals) == 1 else record.rejection_by_all_members(union, refusals)


def _read_literal(literal: Any, record: Record) -> object:
    if not fits_type(record, literal):
        record.reject(describe_type(literal))
    options = typing.get_args(literal)
    value = record.text if isinstance(options[0], str) else record.value
    if _is_literal_value(value, literal):
        return value
    message = f"{record.path}: {quote(str(value))} is none of {', '.join(map(str, options))}"
    raise record.error(message, similar_name_hint(str(value), map(str, options)))


def _is_literal_value(value: object, literal: Any) -> bool:
    return any(
        value == option and type(value) is type(option) for option in typing.get_args(literal)
    )


def _read_tuple(base: Any, record: Record) -> tuple[object, ...]:
    members = typing.get_args(base)
    if members == (str, ...):
        record = record.listed()
    if not fits_type(record, base):
        record.reject(describe_type(base))
    if isinstance(record.value, dict):
        read = _reader(typing.get_args(members[0])[1])
        return tuple((name, read(item)) for name, item in record.members())
    if members[-1] is Ellipsis:
        return tuple(map(_reader(members[0]), record.items()))
    if len(record.value) != len(members):
        raise record.error(
            f"{record.path}: {len(record.value)} {plural(len(record.value), 'item')} where "
            f"{len(members)} are expected"
        )
    return tuple(decode(item, member) for item, member in zip(record.items(), members, strict=True))


def _read_row(schema: type[DataclassType], record: Record) -> DataclassType:
    if not isinstance(record.value, list | tuple):
        record.reject("a list")
    values: dict[str, object] = {}
    position = 0
    for key, read, quick in _key_readers(schema):
        inner = _key_readers(split_annotated(key.hint)[0]) if key.flat else ((key, read, quick),)
        if len(record.value) - position < len(inner):
            break
        taken: dict[str, object] = {}
        for inner_key, read_cell, quick_cell in inner:
            cell = record.value[position]
            found = quick_cell(cell) if quick_cell and record.is_plain else _NOT_READ_FAST
            if found is _NOT_READ_FAST:
                found = read_cell(record.child(cell, position))
            taken[inner_key.name] = found
            position += 1
        values |= {key.name: split_annotated(key.hint)[0](**taken)} if key.flat else taken
    is_incomplete = any(key.required and key.name not in values for key in schema_keys(schema))
    if position < len(record.value) or is_incomplete:
        record.reject(describe_type(Annotated[schema, AsList()]))
    return schema(**values)


def _read_dataclass(schema: type[DataclassType], record: Record, **more: object) -> DataclassType:
    if not isinstance(record.value, dict):
        record.reject(describe_type(schema) if record.path else "a mapping")
    record = record.with_present_keys(schema)
    values = record.rest(schema)
    missing: list[ConfigurationError] = []  # Reported after errors of present keys.
    for key, read, quick in _key_readers(schema):
        if key.name in more:
            continue
        if (
            quick
            and record.is_plain
            and (found := quick(record.value.get(key.path[0], _NOT_READ_FAST)))
            is not _NOT_READ_FAST
        ):
            values[key.name] = found
            continue
        if key.flat and missing:
            break
        place = record
        for step in () if key.flat else key.path:
            if not place.has(step):
                missing += [] if record.is_optional(key) else [place.lacks(step, key.hint)]
                break
            place = place.at(step)
        else:
            values[key.name] = read(place)
    if missing:
        raise missing[0]
    record.complete(schema, values)
    return schema(**values, **more)


@functools.cache
def _key_readers(
    schema: type[Dataclass],
) -> tuple[tuple[Key, Reader, Callable[[Any], Any] | None], ...]:
    return tuple(
        (key, _reader(key.hint), _fast_reader(key.hint) if len(key.path) == 1 else None)
        for key in schema_keys(schema)
    )


_NOT_READ_FAST = object()


@functools.cache
def _fast_reader(hint: Any) -> Callable[[Any], Any] | None:
    """Return a fast reader of plain JSON values for simple types, or None for other types.

    The reader returns the value that `decode` would return, or `_NOT_READ_FAST` if `decode` must
    read the value or report its error. Most values of large documents are strings, integers and
    lists of integers, and the fast reader creates no Record for them.
    """
    base, marks = split_annotated(hint)
    bounds = [mark for mark in marks if isinstance(mark, Bound)]
    if any(each.holds is not operator.ge for each in bounds) or not all(
        isinstance(each, Bound | KeyPath | OmitDefault | FormerKey) for each in marks
    ):
        return None
    least = max((each.bound for each in bounds), default=-math.inf)
    if base is str or base is bool:
        return lambda value: value if type(value) is base else _NOT_READ_FAST
    if base is int:
        return lambda value: value if type(value) is int and value >= least else _NOT_READ_FAST
    if base is float:
        return lambda value: (
            value
            if type(value) is float and least <= value <= sys.float_info.max
            else _NOT_READ_FAST
        )
    if is_union(base) and len(members := typing.get_args(base)) == 2 and members[1] is type(None):
        quick = _fast_reader(members[0])
        return quick and (lambda value: None if value is None else quick(value))
    return _read_indices_fast if base == tuple[Index, ...] else None


def _read_indices_fast(value: Any) -> object:
    are_integers = type(value) is list and {int}.issuperset(map(type, value))
    return tuple(value) if are_integers and min(value, default=0) >= 0 else _NOT_READ_FAST


def _read_scalar(hint: Any, base: type, marks: tuple[object, ...], record: Record) -> object:
    if not fits_type(record, hint):
        record.reject(describe_type(hint))
    value = record.scalar(base, marks)
    if base is float and not abs(value) <= sys.float_info.max:  # Too large, infinite or NaN.
        record.reject(describe_type(hint))
    value = float(value) if base is float else value
    for mark in marks:
        if isinstance(mark, Bound) and not mark.holds(value, mark.bound):
            raise record.error(
                f"{record.path} is {record.display}", f"it must be {mark.words} {mark.bound}"
            )
    return value


def fits_type(record: Record, hint: Any) -> bool:
    """True if the JSON or YAML type of the record fits `hint`, regardless of its contents."""
    base, marks = split_annotated(hint)
    value = record.value
    origin = typing.get_origin(base)
    if is_union(base):
        return any(fits_type(record, member) for member in typing.get_args(base))
    if base is type(None):
        return value is None
    if dataclasses.is_dataclass(base) or origin is dict:
        return isinstance(value, list | tuple if find_mark(marks, AsList) else dict)
    if origin is tuple:
        return isinstance(value, list | tuple) or (isinstance(value, dict) and is_mapping(base))
    if base is str or (origin is Literal and isinstance(typing.get_args(base)[0], str)):
        return record.text is not None
    if origin is Literal:
        return type(value) is type(typing.get_args(base)[0])
    if base is bool:
        return isinstance(value, bool)
    if isinstance(value, str):
        return find_mark(marks, NumberWithUnit) is not None
    return isinstance(value, int | float if base is float else int) and not isinstance(value, bool)


Writer = Callable[[Any], Any]


def encode(value: Dataclass) -> dict[str, Any]:
    """Return a dataclass as lists, dicts and scalars that `decode` reads."""
    return _write_dataclass(type(value), value)


def encode_as(value: object, hint: Any) -> Any:
    """Return a value of type `hint` as lists, dicts and scalars that `decode` reads."""
    return _writer(hint)(value)


def _identity(value: Any) -> Any:
    return value


@functools.cache
def _writer(hint: Any) -> Writer:
    base, marks = split_annotated(hint)
    origin = typing.get_origin(base)
    members = typing.get_args(base)
    if coded := find_mark(marks, CustomCodec):
        return coded.write
    if spelling := find_mark(marks, NumberWithUnit):
        return spelling.to_text
    if is_union(base):
        if all(_writer(member) is _identity for member in members):
            return _identity
        return lambda value: _writer(
            next(member for member in members if _is_member_of_union(value, member))
        )(value)
    if is_mapping(base):
        inner = _writer(typing.get_args(members[0])[1])
        return lambda pairs: {name: inner(value) for name, value in pairs}
    if origin is tuple and members[-1] is Ellipsis:
        inner = _writer(members[0])
        return list if inner is _identity else lambda values: [inner(value) for value in values]
    if origin is tuple:
        return lambda values: [
            _writer(member)(value) for member, value in zip(members, values, strict=True)
        ]
    if isinstance(base, type) and issubclass(base, enum.Enum):
        return lambda value: value.value
    if dataclasses.is_dataclass(base):
        return functools.partial(
            _write_row if find_mark(marks, AsList) else _write_dataclass, typing.cast(Any, base)
        )
    return _identity


def _write_dataclass(schema: type[Dataclass], value: object) -> dict[str, Any]:
    found: dict[str, Any] = {}
    writers, rest = _key_writers(schema)
    for key, write in writers:
        member = getattr(value, key.name)
        if key.sparse and member == key.default:
            continue
        if key.flat:
            found.update(write(member))
        elif len(key.path) == 1:
            found[key.path[0]] = write(member)
        else:
            inner = found
            for step in key.path[:-1]:
                inner = inner.setdefault(step, {})
            inner[key.path[-1]] = write(member)
    if rest:
        found.update((name, rest[1].plain(item)) for name, item in getattr(value, rest[0]))
    return found


@functools.cache
def _key_writers(
    schema: type[Dataclass],
) -> tuple[tuple[tuple[Key, Writer], ...], tuple[str, ExtraKeys] | None]:
    return tuple((key, _writer(key.hint)) for key in schema_keys(schema)), marked_field(
        schema, ExtraKeys
    )


def _write_row(schema: type[Dataclass], value: object) -> list[object]:
    cells: list[object] = []
    for key, write in _key_writers(schema)[0]:
        member = write(getattr(value, key.name))
        cells.extend(member.values() if key.flat else [member])
    return cells


def _is_member_of_union(value: object, hint: Any) -> bool:
    """True if `value` is a value of `hint`, a member of a union."""
    base, _ = split_annotated(hint)
    origin = typing.get_origin(base)
    if base is type(None):
        return value is None
    if origin is Literal:
        return _is_literal_value(value, base)
    return isinstance(value, origin or base) and not (isinstance(value, bool) and base is not bool)
