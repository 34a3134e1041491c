"""Conversion between dataclasses and documents (JSON or YAML), which follows the type annotations
of the dataclasses.

A dataclass is written as a mapping. Its keys are its fields in order of declaration, or the names
in its class attribute `written`. Supported types of fields are `bool`, `int`, `float`, `str`,
`Literal`, enumerations, `tuple[X, ...]` and `tuple[X, Y]` (lists), `tuple[tuple[str, X], ...]` (a
mapping), `dict` (unchanged), dataclasses, and unions of these and `None`. A mark in an annotation
refines a type: `Annotated[int, AtLeast(1)]`. Documents are untrusted: a missing or invalid value
raises ConfigurationError with its file and key.
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
    """Any dataclass; used in annotations."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


DataclassType = TypeVar("DataclassType", bound=Dataclass)
MarkType = TypeVar("MarkType")


@dataclass(frozen=True, slots=True)
class Bound:
    """Mark (in `Annotated`) of a number with a lower or upper bound. `holds(value, bound)` must be
    true. `words` describe the bound in errors, and `preposition` in descriptions of types.
    """

    words: str
    preposition: str
    holds: Callable[[float, float], bool]
    bound: float


AtLeast = functools.partial(Bound, "at least", "from", operator.ge)
Above = functools.partial(Bound, "above", "above", operator.gt)
AtMost = functools.partial(Bound, "at most", "up to", operator.le)


class NumberWithUnit:
    """Mark (in `Annotated`) of a number that a document may state as text with a unit, such as "80
    GiB".
    """

    __slots__ = ()

    def parse(self, text: str) -> float | None:
        """Return the number that `text` states, or None if it states none."""
        raise NotImplementedError

    def to_text(self, value: Any) -> object:
        """Return the number `value` as a document states it."""
        raise NotImplementedError

    def describe(self, words: str) -> str:
        """Return a description of the type. `words` describe the number."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class FilePath:
    """Mark (in `Annotated`) of a path. In a document, a relative path is relative to the document's
    folder. It must contain a `.` or a `/`, which distinguishes a path from a name.

    A text for which `refuses` returns true is rejected. `words` describe such a text in the error,
    and `hint` is the hint of the error.
    """

    refuses: Callable[[str], bool] | None = None
    words: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Predicate:
    """Mark (in `Annotated`) of a value for which `test` must return true. `words` describe valid
    values.
    """

    test: Callable[[Any], object]
    words: str


@dataclass(frozen=True, slots=True)
class KeyPath:
    """Mark (in `Annotated`) of a field whose key differs from its name. A dot in `key` separates
    the keys of nested mappings.
    """

    key: str


class OmitDefault:
    """Mark (in `Annotated`) of a field that is not written if it has its default value."""


class Inline:
    """Mark (in `Annotated`) of a field that is a dataclass and whose keys are part of the outer
    dataclass's mapping.
    """


class AsList:
    """Mark (in `Annotated`) of a dataclass that is written as a list of its fields. A document may
    omit fields with defaults at the end.
    """


@dataclass(frozen=True, slots=True)
class CustomCodec:
    """Mark (in `Annotated`) of a value that custom functions write and read. `words` describe valid
    values.
    """

    write: Callable[[Any], object]
    read: Callable[[Record], object]
    words: str = "a list"


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """Mark (in `Annotated`) of a field that collects all keys of the mapping that no other field
    has, as pairs (key, value). The values are those of the document; `plain` converts them for
    writing.
    """

    plain: Callable[[Any], object]


@dataclass(frozen=True, slots=True)
class PositionOfKey:
    """Mark (in `Annotated`) of a field that is set to the file and line of the key `key` in the
    document.
    """

    key: str


@dataclass(frozen=True, slots=True)
class FormerKey:
    """Mark (in `Annotated`) of a field that had the key `key` in the previous release. Documents
    may still use this key.

    `values` lists (former value, present value) for values that were renamed with the key.
    """

    key: str
    values: tuple[tuple[object, object], ...] = ()

    def present_value(self, value: object) -> object:
        """Return the present value for a former value. A value that was not renamed is returned
        unchanged.
        """
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
    """A key of a dataclass in a document."""

    name: str
    """Name of the field."""
    hint: Any
    """Annotated type of the field, with its marks."""
    default: object
    """Default value; `dataclasses.MISSING` if the key is required."""
    flag: str = ""
    """Command-line flag that sets the value; "" if there is none."""
    path: tuple[str, ...] = ()
    """Keys from the dataclass's mapping to the value, one per level of nesting."""
    sparse: bool = False
    flat: bool = False

    @property
    def required(self) -> bool:
        """True if the field has no default."""
        return self.default is dataclasses.MISSING


@functools.cache
def schema_keys(schema: type[Dataclass]) -> tuple[Key, ...]:
    """Return the keys of the dataclass `schema` in order. Fields marked `ExtraKeys` or
    `PositionOfKey` have no key.
    """
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
    """Return, by each former key of the dataclass `schema`, the present key and the mark of its
    field.
    """
    found = {}
    for key in schema_keys(schema):
        if mark := find_mark(split_annotated(key.hint)[1], FormerKey):
            found[mark.key] = (key.path[0], mark)
    return found


def split_annotated(hint: Any) -> tuple[Any, tuple[object, ...]]:
    """Return (type, marks) of an annotated type. The marks are the further arguments of
    `Annotated`; () if there are none.
    """
    if typing.get_origin(hint) is Annotated:
        base, *marks = typing.get_args(hint)
        return base, tuple(marks)
    return hint, ()


def find_mark(marks: tuple[object, ...], kind: type[MarkType]) -> MarkType | None:
    """Return the first mark of the class `kind`, or None if there is none."""
    return next((mark for mark in marks if isinstance(mark, kind)), None)


def is_union(base: Any) -> bool:
    """Return True if the type is a union."""
    return typing.get_origin(base) in (typing.Union, types.UnionType)


def is_mapping(base: Any) -> bool:
    """Return True if the type is `tuple[tuple[str, X], ...]`, which is written as a mapping."""
    pair, *more = typing.get_args(base) or (None,)
    is_pair = typing.get_origin(pair) is tuple and typing.get_args(pair)[0] is str
    return (
        typing.get_origin(base) is tuple
        and more == [Ellipsis]
        and is_pair
        and ... not in typing.get_args(pair)
    )


def marked_field(schema: type[Dataclass], kind: type[MarkType]) -> tuple[str, MarkType] | None:
    """Return (field name, mark) for the first field of `schema` with a mark of the class `kind`, or
    None if there is none.
    """
    hints = typing.get_type_hints(schema, include_extras=True)
    marks = (
        (field.name, find_mark(split_annotated(hints[field.name])[1], kind))
        for field in dataclasses.fields(schema)
    )
    return next(((name, mark) for name, mark in marks if mark is not None), None)


def describe_type(hint: Any) -> str:
    """Return a description of an annotated type, such as "a whole number from 1 or `auto`"."""
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
    """A value of a document, with the path of keys that leads to it. Each document format has a
    subclass, which creates the errors.
    """

    __slots__ = ("key", "parent", "value")
    is_plain: ClassVar[bool] = False
    """True if the nested values are plain lists, dicts and scalars, which need no conversion."""

    def __init__(self, value: Any, parent: Record | None = None, key: str | int = "") -> None:
        self.value = value
        """A scalar, or a list, tuple or dict whose members are values of the document format."""
        self.parent = parent
        self.key = key

    @property
    def path(self) -> str:
        """Keys and indices that lead to this value, such as `placement.stages[2]`."""
        above = self.parent.path if self.parent else ""
        if isinstance(self.key, int):
            return f"{above}[{self.key}]"
        return f"{above}.{self.key}" if above and self.key else above or self.key

    @property
    def text(self) -> str | None:
        """The value if it is text, otherwise None."""
        return self.value if isinstance(self.value, str) else None

    @property
    def display(self) -> str:
        """Text of the value for messages."""
        raise NotImplementedError

    def child(self, value: Any, key: str | int) -> Self:
        """Return the record for `value`, which is a member of this value at `key`, a key or an
        index.
        """
        raise NotImplementedError

    def error(self, message: str, hint: str = "") -> ConfigurationError:
        """Return an error at the position of this value."""
        raise NotImplementedError

    def refusal(self, expected: str) -> ConfigurationError:
        """Return the error for an invalid value. `expected` describes valid values."""
        raise NotImplementedError

    def reject(self, expected: str) -> NoReturn:
        """Raise the error for an invalid value. `expected` describes valid values."""
        raise self.refusal(expected)

    def lacks(self, key: str, hint: Any) -> ConfigurationError:
        """Return the error for the missing key `key`, whose value would have the type `hint`."""
        raise NotImplementedError

    def rejection_by_all_members(
        self, union: Any, refusals: list[ConfigurationError]
    ) -> ConfigurationError:
        """Return the error for a value that more than one member of the union `union` rejected with
        the errors `refusals`.
        """
        return self.refusal(describe_type(union))

    def scalar(self, base: type, marks: tuple[object, ...]) -> Any:
        """Return the value as a scalar of the type `base`, whose marks are `marks`. A format whose
        documents contain scalars as text overrides this method.
        """
        return self.value

    def listed(self) -> Self:
        """Return the record to read as a list of texts. A format that accepts a single text in
        place of a list with one text overrides this method.
        """
        return self

    def is_optional(self, key: Key) -> bool:
        """Return True if a document may omit the key. JSON documents may omit fields marked
        `OmitDefault`; other formats override this method.
        """
        return key.sparse

    def rest(self, schema: type[Dataclass]) -> dict[str, object]:
        """Return the values of fields marked `ExtraKeys` or `PositionOfKey`, by field name. A
        format that rejects unknown keys does so here.
        """
        return {}

    def with_present_keys(self, schema: type[Dataclass]) -> Self:
        """Return this mapping with the former keys of `schema` (see `FormerKey`) replaced by the
        present ones.
        """
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
        """Check the values of a dataclass, by field name, before it is constructed. The base class
        accepts all values.
        """

    def has(self, key: str) -> bool:
        """Return True if the value is a mapping with the key `key`."""
        return isinstance(self.value, dict) and key in self.value

    def at(self, key: str, hint: Any = object) -> Self:
        """Return the record at the key `key`. Raise ConfigurationError if the key is missing; its
        value would have the type `hint`.
        """
        if not isinstance(self.value, dict):
            self.reject("an object")
        if key not in self.value:
            raise self.lacks(key, hint)
        return self.child(self.value[key], key)

    def get(self, key: str, hint: Any) -> Any:
        """Return the value at the key `key`, decoded as the type `hint`. Raise ConfigurationError
        if it is missing or invalid.
        """
        if self.is_plain and (quick := _fast_reader(hint)) and self.has(key):
            found = quick(self.value[key])
            if found is not _NOT_READ_FAST:
                return found
        return decode(self.at(key, hint), hint)

    def items(self) -> Iterator[Self]:
        """Yield the items of a list as records. Raise ConfigurationError if the value is not a
        list.
        """
        if not isinstance(self.value, list | tuple):
            self.reject("a list")
        for index, value in enumerate(self.value):
            yield self.child(value, index)

    def members(self) -> Iterator[tuple[str, Self]]:
        """Yield (key, record) for the members of a mapping. Raise ConfigurationError if the value
        is not a mapping.
        """
        if not isinstance(self.value, dict):
            self.reject("an object")
        for key, value in self.value.items():
            yield key, self.child(value, key)


Reader = Callable[[Record], Any]


def decode(record: Record, hint: Any, **more: object) -> Any:
    """Return the value of the record as the type `hint`. If fields are given in `more`, `hint` is a
    dataclass, and these fields are not read from the record. Raise ConfigurationError if the record
    is invalid.
    """
    return _read_dataclass(hint, record, **more) if more else _reader(hint)(record)


@functools.cache
def _reader(hint: Any) -> Reader:
    """Return the function that decodes a record as the type `hint`. It is cached, because large
    documents have few types.
    """
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
    """Return the value that `read` decodes. Raise ConfigurationError unless `fits.test` accepts
    it.
    """
    if not fits.test(value := read(record)):
        record.reject(fits.words)
    return value


def _read_union(union: Any, record: Record) -> object:
    """Return the record as the first member of the union that accepts it."""
    fitting = [member for member in typing.get_args(union) if fits_type(record, member)]
    if not fitting:
        record.reject(describe_type(union))
    refusals = []
    for member in fitting:
        try:
            return decode(record, member)
        except ConfigurationError as error:
            # The error is stored instead of raised, because the next member of the union may accept
            # the value.
            refusals.append(error)
    raise refusals[0] if len(refusals) == 1 else record.rejection_by_all_members(union, refusals)


def _read_literal(literal: Any, record: Record) -> object:
    """Return the record as one of the values of a `Literal` type."""
    if not fits_type(record, literal):
        record.reject(describe_type(literal))
    options = typing.get_args(literal)
    value = record.text if isinstance(options[0], str) else record.value
    if _is_literal_value(value, literal):
        return value
    message = f"{record.path}: {quote(str(value))} is none of {', '.join(map(str, options))}"
    raise record.error(message, similar_name_hint(str(value), map(str, options)))


def _is_literal_value(value: object, literal: Any) -> bool:
    """Return True if the value equals a value of the `Literal` type and has its class."""
    return any(
        value == option and type(value) is type(option) for option in typing.get_args(literal)
    )


def _read_tuple(base: Any, record: Record) -> tuple[object, ...]:
    """Return the record, a list or a mapping, as a tuple."""
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
    """Return the record, a list of field values, as a dataclass marked `AsList`."""
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
    """Return the record, a mapping, as a dataclass. The fields in `more` are not read."""
    if not isinstance(record.value, dict):
        record.reject(describe_type(schema) if record.path else "a mapping")
    record = record.with_present_keys(schema)
    values = record.rest(schema)
    # `missing` collects errors for missing keys. They are raised last, only if all present keys are
    # valid.
    missing: list[ConfigurationError] = []
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
    """Return, for each key of the dataclass, (key, reader, fast reader). The fast reader is None if
    there is none, or if the key is in a nested mapping.
    """
    return tuple(
        (key, _reader(key.hint), _fast_reader(key.hint) if len(key.path) == 1 else None)
        for key in schema_keys(schema)
    )


_NOT_READ_FAST = object()


@functools.cache
def _fast_reader(hint: Any) -> Callable[[Any], Any] | None:
    """Return a function that reads plain JSON values of a simple type, or None if the type is not
    simple.

    The function returns the value that `decode` would return, or `_NOT_READ_FAST` if `decode` must
    read the value or report its error. It creates no Record. Most values of large documents are
    strings, integers and lists of integers.
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
    """Return a list of nonnegative integers as a tuple, or `_NOT_READ_FAST` for any other value."""
    are_integers = type(value) is list and {int}.issuperset(map(type, value))
    return tuple(value) if are_integers and min(value, default=0) >= 0 else _NOT_READ_FAST


def _read_scalar(hint: Any, base: type, marks: tuple[object, ...], record: Record) -> object:
    """Return the record as a text, number or Boolean, and check its bounds."""
    if not fits_type(record, hint):
        record.reject(describe_type(hint))
    value = record.scalar(base, marks)
    # This condition is also true for a NaN, an infinite number, and an integer that is too large
    # for a float.
    if base is float and not abs(value) <= sys.float_info.max:
        record.reject(describe_type(hint))
    value = float(value) if base is float else value
    for mark in marks:
        if isinstance(mark, Bound) and not mark.holds(value, mark.bound):
            raise record.error(
                f"{record.path} is {record.display}", f"it must be {mark.words} {mark.bound}"
            )
    return value


def fits_type(record: Record, hint: Any) -> bool:
    """Return True if the record's kind of JSON or YAML value fits the type `hint`, whatever its
    content is.
    """
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
    """Return a dataclass as lists, dicts and scalars, from which `decode` restores it."""
    return _write_dataclass(type(value), value)


def encode_as(value: object, hint: Any) -> Any:
    """Return a value of the type `hint` as lists, dicts and scalars, from which `decode` restores
    it.
    """
    return _writer(hint)(value)


def _identity(value: Any) -> Any:
    """Return the value unchanged: the writer of types that documents contain directly."""
    return value


@functools.cache
def _writer(hint: Any) -> Writer:
    """Return the function that encodes values of the type `hint`."""
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
    """Return a dataclass as a mapping."""
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
    """Return (pairs of a key and its writer, the field marked `ExtraKeys` or None) of a
    dataclass.
    """
    return tuple((key, _writer(key.hint)) for key in schema_keys(schema)), marked_field(
        schema, ExtraKeys
    )


def _write_row(schema: type[Dataclass], value: object) -> list[object]:
    """Return a dataclass marked `AsList` as a list of its field values."""
    cells: list[object] = []
    for key, write in _key_writers(schema)[0]:
        member = write(getattr(value, key.name))
        cells.extend(member.values() if key.flat else [member])
    return cells


def _is_member_of_union(value: object, hint: Any) -> bool:
    """Return True if the value is a value of the type `hint`, which is a member of a union."""
    base, _ = split_annotated(hint)
    origin = typing.get_origin(base)
    members = typing.get_args(base)
    if base is type(None):
        return value is None
    if origin is Literal:
        return _is_literal_value(value, base)
    if is_union(base):
        return any(_is_member_of_union(value, member) for member in members)
    if origin is tuple and isinstance(value, tuple) and members[-1] is not Ellipsis:
        return len(value) == len(members) and all(map(_is_member_of_union, value, members))
    return isinstance(value, origin or base) and not (isinstance(value, bool) and base is not bool)
