"""A frozen dataclass as a schema: its fields are the keys, their types the values, their docstrings the reference.

The same holds for the options of strategies and schedulers, which are the fields of their dataclasses.

Types: `bool`, `int`, `float`, `str`, `Literal`, `tuple[X, ...]` and `tuple[X, Y]` (lists), `tuple[tuple[str, X], ...]`
(a mapping), dataclasses, unions of these with or without `None`, each optionally `Annotated` with the marks below.

Entries of a YAML file made into the values that a schema declares, or refused with their place.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import os
import re
import textwrap
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Protocol, TypeVar

from autopipe.configs.yaml_source import Entry, Place, Unit, quote
from autopipe.ir.errors import ConfigurationError


class Dataclass(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


Shape = TypeVar("Shape", bound=Dataclass)
Mark = TypeVar("Mark")


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Mark of a number that is not below `least`."""

    least: float


@dataclass(frozen=True, slots=True)
class Above:
    """Mark of a number that is greater than `bound`."""

    bound: float


@dataclass(frozen=True, slots=True)
class AtMost:
    """Mark of a number that is not above `most`."""

    most: float


@dataclass(frozen=True, slots=True)
class FilePath:
    """Mark of a path, relative to the file it is written in; it holds a `.` or a `/`, to be told from a name."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Mark of a field of entries that holds every key no other field claims."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Mark of a field that no key sets: it is told where the key `key` was written."""

    key: str


@dataclass(frozen=True, slots=True)
class Key:
    """One key a dataclass takes."""

    name: str
    """As written in YAML."""

    hint: Any
    """Its type, with marks."""

    default: object
    """Its value where it is not given; `dataclasses.MISSING` where it must be."""

    flag: str
    """The command-line flag that sets it, or nothing."""

    @property
    def required(self) -> bool:
        """True if it has no default."""
        return self.default is dataclasses.MISSING


@functools.cache
def keys(schema: type[Dataclass]) -> tuple[Key, ...]:
    """The keys that `schema` takes in order of declaration, without fields marked `Rest` or `Origin`."""
    hints = typing.get_type_hints(schema, include_extras=True)
    found = []
    for field in dataclasses.fields(schema):
        if field.init and not any(find(unwrap(hints[field.name])[1], mark) for mark in (Rest, Origin)):
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            found.append(Key(field.name, hints[field.name], default, field.metadata.get("flag", "")))
    return tuple(found)


@functools.cache
def field_docs(schema: type[Dataclass]) -> dict[str, str]:
    """The string literal under each field, of the class and of those it inherits from."""
    docs: dict[str, str] = {}
    for parent in reversed(schema.__mro__[:-1]):
        if dataclasses.is_dataclass(parent):
            tree = ast.parse(textwrap.dedent(inspect.getsource(parent)))
            for line, after in itertools.pairwise(typing.cast(ast.ClassDef, tree.body[0]).body):
                match line, after:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        docs[name] = inspect.cleandoc(text)
    return docs


def describe(hint: Any) -> str:
    """A type in a reader's words, such as "a whole number from 1 or `auto`"."""
    base, marks = unwrap(hint)
    origin = typing.get_origin(base)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(member) for member in typing.get_args(base))
    if origin is Literal:
        return " or ".join(f"`{option}`" for option in typing.get_args(base))
    if is_mapping(base):
        return f"a mapping of {describe(pair_value(base))}"
    if origin is tuple:
        members = typing.get_args(base)
        if members[-1] is Ellipsis:
            return f"a list of {describe(members[0])}"
        return f"a list of {len(members)}: " + ", ".join(describe(member) for member in members)
    if dataclasses.is_dataclass(base):
        return "a mapping with " + ", ".join(key.name for key in keys(typing.cast("type[Dataclass]", base)))
    return _describe_scalar(base, marks)


def _describe_scalar(base: Any, marks: tuple[object, ...]) -> str:
    unit = find(marks, Unit)
    if base is type(None):
        return "`null`"
    if find(marks, FilePath):
        return "a path (text)"
    words = {str: "text", bool: "`true` or `false`", int: "a whole number", float: "a number"}.get(base, str(base))
    if unit is not None:
        return f"{unit.noun} such as {unit.example}, or {words} of {unit.symbol}"
    for mark in marks:
        if isinstance(mark, AtLeast):
            words += f" from {mark.least}"
        if isinstance(mark, Above):
            words += f" above {mark.bound}"
        if isinstance(mark, AtMost):
            words += f" up to {mark.most}"
    return words


def unwrap(hint: Any) -> tuple[Any, tuple[object, ...]]:
    """A type without its marks, and the marks."""
    if typing.get_origin(hint) is Annotated:
        base, *marks = typing.get_args(hint)
        return base, tuple(marks)
    return hint, ()


def find(marks: tuple[object, ...], kind: type[Mark]) -> Mark | None:
    """The mark of this kind, if there is one."""
    return next((mark for mark in marks if isinstance(mark, kind)), None)


def is_mapping(base: Any) -> bool:
    """True if a type is a tuple of named values."""
    members = typing.get_args(base)
    return typing.get_origin(base) is tuple and members[-1] is Ellipsis and typing.get_args(members[0])[:1] == (str,)


def pair_value(base: Any) -> Any:
    """The type of the values of a tuple of named values."""
    return typing.get_args(typing.get_args(base)[0])[1]


def marked_field(schema: type[Dataclass], kind: type[Mark]) -> tuple[str, Mark] | None:
    """The field that carries a mark of this kind, and the mark, if there is one."""
    hints = typing.get_type_hints(schema, include_extras=True)
    marks = ((field.name, find(unwrap(hints[field.name])[1], kind)) for field in dataclasses.fields(schema))
    return next(((name, mark) for name, mark in marks if mark is not None), None)


def rest_field(schema: type[Dataclass]) -> str | None:
    """The field that holds every key no other field claims, if there is one."""
    found = marked_field(schema, Rest)
    return found[0] if found else None


def convert(entry: Entry, schema: type[Shape], path: str = "") -> Shape:
    """The mapping `entry` as an instance of `schema`; `path` names it in errors (`optimizer`, say).

    Raises ConfigurationError with the place of the first entry that does not fit.
    """
    if not isinstance(entry.value, dict):
        _refuse(entry, path, "a mapping")
    known = {key.name: key for key in keys(schema)}
    rest = rest_field(schema)
    values: dict[str, object] = {}
    extra: list[tuple[str, Entry]] = []
    for name, value in entry.value.items():
        if name in known:
            values[name] = convert_value(value, known[name].hint, join(path, name))
        elif rest is not None:
            extra.append((name, value))
        else:
            raise unknown_key(name, known, value.place, path)
    for key in known.values():
        if key.required and key.name not in values:
            raise ConfigurationError(
                f"{path or 'the file'} lacks the key {key.name!r}",
                hint=f"it is {describe(key.hint)}",
                where=str(entry.place),
            )
    _check_exclusive(entry, schema, values, path)
    if rest is not None:
        values[rest] = tuple(extra)
    origin = marked_field(schema, Origin)
    if origin is not None:
        values[origin[0]] = entry.value[origin[1].key].place
    return schema(**values)


def convert_value(entry: Entry, hint: Any, path: str) -> object:
    """The entry as a value of the type `hint`."""
    base, marks = unwrap(hint)
    if typing.get_origin(base) in (typing.Union, types.UnionType):
        return _convert_union(entry, base, path)
    if not _accepts(entry, hint):
        _refuse(entry, path, describe(hint))
    origin = typing.get_origin(base)
    if base is type(None):
        return None
    if origin is Literal:
        return _convert_literal(entry, base, path)
    if origin is tuple:
        return _convert_tuple(entry, base, path)
    if dataclasses.is_dataclass(base):
        return convert(entry, typing.cast(Any, base), path)
    return _convert_scalar(entry, base, marks, path)


def unknown_key(name: str, known: Iterable[str], place: Place, path: str) -> ConfigurationError:
    """The error for a key that nothing declares, with the nearest one that is declared."""
    within = f" in {path}" if path else ""
    return ConfigurationError(f"unknown key {quote(name)}{within}", hint=nearest(name, known), where=str(place))


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint: the known name most like `name`, or all of them."""
    names = list(known)
    match = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if match:
        return f"did you mean {match[0]!r}?"
    return f"known: {', '.join(names)}" if names else "none are known here"


def _convert_union(entry: Entry, union: Any, path: str) -> object:
    fitting = [member for member in typing.get_args(union) if _accepts(entry, member)]
    if not fitting:
        _refuse(entry, path, describe(union))
    refusals = []
    for member in fitting:
        try:
            return convert_value(entry, member, path)
        except ConfigurationError as error:
            refusals.append(error)  # the next member may take it
    # On a command line a number may stand for text as well; what is wrong with it is wrong with the number.
    raise refusals[-1 if isinstance(entry.value, str) else 0]


def _convert_literal(entry: Entry, literal: Any, path: str) -> object:
    options = typing.get_args(literal)
    value = entry.text if isinstance(options[0], str) and _reads_as_text(entry) else entry.value
    for option in options:
        if value == option and type(value) is type(option):
            return option
    raise ConfigurationError(
        f"{path}: {quote(str(value))} is none of {', '.join(map(str, options))}",
        hint=nearest(str(value), [str(option) for option in options]),
        where=str(entry.place),
    )


def _convert_tuple(entry: Entry, base: Any, path: str) -> tuple[object, ...]:
    members = typing.get_args(base)
    if isinstance(entry.value, dict):
        value_hint = pair_value(base)
        return tuple((name, convert_value(item, value_hint, join(path, name))) for name, item in entry.value.items())
    items = typing.cast("tuple[Entry, ...]", entry.value)
    if members[-1] is Ellipsis:
        return tuple(convert_value(item, members[0], f"{path}[{index}]") for index, item in enumerate(items))
    if len(items) != len(members):
        raise ConfigurationError(
            f"{path}: {len(items)} items where {len(members)} are expected", where=str(entry.place)
        )
    return tuple(
        convert_value(item, member, f"{path}[{index}]")
        for index, (item, member) in enumerate(zip(items, members, strict=True))
    )


def _convert_scalar(entry: Entry, base: Any, marks: tuple[object, ...], path: str) -> object:
    value = entry.value
    unit = find(marks, Unit)
    if base is str:
        text = entry.text if _reads_as_text(entry) else value
        return _file_path(entry, str(text), path) if find(marks, FilePath) else text
    if unit is not None and isinstance(value, str):
        value = unit.parse(value)
        if value is None:
            _refuse(entry, path, describe(Annotated[base, *marks]))
    if base is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    _check_bounds(typing.cast(float, value), entry, marks, path)
    return value


def _check_bounds(value: float, entry: Entry, marks: tuple[object, ...], path: str) -> None:
    for mark in marks:
        if isinstance(mark, AtLeast) and value < mark.least:
            problem = f"at least {mark.least}"
        elif isinstance(mark, Above) and value <= mark.bound:
            problem = f"above {mark.bound}"
        elif isinstance(mark, AtMost) and value > mark.most:
            problem = f"at most {mark.most}"
        else:
            continue
        shown = entry.text or value
        raise ConfigurationError(f"{path} is {shown}", hint=f"it must be {problem}", where=str(entry.place))


def _file_path(entry: Entry, text: str, path: str) -> str:
    if ("/" not in text and "." not in text) or "\0" in text:
        raise ConfigurationError(
            f"{path}: {quote(text)} is no path", hint="a path holds a '.' or a '/'", where=str(entry.place)
        )
    return os.path.normpath(os.path.join(entry.place.folder, text))


def _accepts(entry: Entry, hint: Any) -> bool:
    """True if an entry of this kind can be of this type at all, whatever it holds."""
    base, marks = unwrap(hint)
    value = entry.value
    origin = typing.get_origin(base)
    if origin in (typing.Union, types.UnionType):
        return any(_accepts(entry, member) for member in typing.get_args(base))
    if base is type(None):
        return value is None
    if dataclasses.is_dataclass(base):
        return isinstance(value, dict)
    if origin is tuple:
        return isinstance(value, tuple) or (isinstance(value, dict) and is_mapping(base))
    if base is str or (origin is Literal and isinstance(typing.get_args(base)[0], str)):
        return isinstance(value, str) or _reads_as_text(entry)
    if origin is Literal:
        return type(value) is type(typing.get_args(base)[0])
    if base is bool:
        return isinstance(value, bool)
    if isinstance(value, str):
        return find(marks, Unit) is not None
    number = int | float if base is float else int
    return isinstance(value, number) and not isinstance(value, bool)


def _reads_as_text(entry: Entry) -> bool:
    """True if a scalar that YAML reads as something else is text here: on a command line nobody writes quotes."""
    return entry.place.is_flag and isinstance(entry.value, str | int | float | bool) and bool(entry.text)


def _refuse(entry: Entry, path: str, expected: str) -> NoReturn:
    value = entry.value
    hint = f"expected {expected}"
    if isinstance(value, dict | tuple):
        found = "a mapping" if isinstance(value, dict) else "a list"
    elif value is None:
        found = "nothing" if not entry.text else entry.text
    elif isinstance(value, str):
        found = quote(value)
        hint = _number_hint(entry, expected) or hint
    elif isinstance(value, bool):
        found = f"{entry.text} (which YAML reads as {str(value).lower()})"
        if "text" in expected:
            hint += f'; write "{entry.text}" in quotes'
    else:
        found = entry.text
        if "text" in expected:
            hint += f'; write "{entry.text}" in quotes'
    raise ConfigurationError(f"{path or 'the file'} is {found}", hint=hint, where=str(entry.place))


def _number_hint(entry: Entry, expected: str) -> str:
    """Suggest a spelling for a number that YAML reads as text; nothing where the text is no number."""
    if "number" not in expected or not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", entry.text, re.ASCII):
        return ""
    if entry.quoted:
        return f"write {entry.text} without quotes"
    mantissa, _, exponent = entry.text.lower().partition("e")
    mantissa = mantissa if "." in mantissa else mantissa + ".0"
    sign = "" if exponent[:1] in ("-", "+") else "+"
    return f"YAML reads it as text; write {mantissa}e{sign}{exponent}"


def _check_exclusive(entry: Entry, schema: type[Dataclass], values: dict[str, object], path: str) -> None:
    given = typing.cast("dict[str, Entry]", entry.value)
    defaults = {key.name: key.default for key in keys(schema)}
    for group in getattr(schema, "exclusive", ()):
        together = [name for name in group if name in values and values[name] != defaults[name]]
        if len(together) > 1:
            raise ConfigurationError(
                f"{' and '.join(join(path, name) for name in together)} exclude each other",
                hint="keep one of them",
                where=str(given[together[-1]].place),
            )


def join(path: str, name: str) -> str:
    """The path of the key `name` below `path`."""
    return f"{path}.{name}" if path else name
