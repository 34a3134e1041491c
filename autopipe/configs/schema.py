"""A frozen dataclass as a schema: its fields are the keys, their types the values, their docstrings the reference.

The same holds for the options of strategies and schedulers, which are the fields of their dataclasses.

Types: `bool`, `int`, `float`, `str`, `Literal`, `tuple[X, ...]` and `tuple[X, Y]` (lists), `tuple[tuple[str, X], ...]`
(a mapping), dataclasses, unions of these with or without `None`, each optionally `Annotated` with the marks below.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

from autopipe.configs.quantity import Unit


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
