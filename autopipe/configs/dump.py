"""Values of a schema written back as the YAML they can be read from."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal

from autopipe.configs.quantity import Unit
from autopipe.configs.schema import Dataclass, find, is_mapping, keys, pair_value, rest_field, unwrap


def dump_value(value: object, hint: Any) -> object:
    """A value of the type `hint` as lists, dicts and scalars that `convert_value` reads back."""
    base, marks = unwrap(hint)
    if typing.get_origin(base) in (typing.Union, types.UnionType):
        member = next(member for member in typing.get_args(base) if _holds(value, member))
        return dump_value(value, member)
    if is_mapping(base):
        pairs = typing.cast("tuple[tuple[str, object], ...]", value)
        return {name: dump_value(item, pair_value(base)) for name, item in pairs}
    if isinstance(value, tuple):
        members = typing.get_args(base)
        repeated = members[-1] is Ellipsis
        return [dump_value(item, members[0] if repeated else members[index]) for index, item in enumerate(value)]
    if dataclasses.is_dataclass(value):
        return dump(typing.cast(Dataclass, value))
    unit = find(marks, Unit)
    if unit is not None and unit.whole and isinstance(value, int):
        return unit.format(value)
    return value


def dump(value: Dataclass) -> dict[str, object]:
    """A dataclass as a mapping that `convert` reads back."""
    schema = type(value)
    found = {key.name: dump_value(getattr(value, key.name), key.hint) for key in keys(schema)}
    rest = rest_field(schema)
    if rest is not None:
        found.update({name: entry.plain() for name, entry in getattr(value, rest)})
    return found


def _holds(value: object, hint: Any) -> bool:
    """True if a value made by `convert_value` came from this member of a union."""
    base, _ = unwrap(hint)
    origin = typing.get_origin(base)
    if base is type(None):
        return value is None
    if origin is Literal:
        return any(value == option and type(value) is type(option) for option in typing.get_args(base))
    if origin is tuple:
        return isinstance(value, tuple)
    return isinstance(value, base) and not (isinstance(value, bool) and base is not bool)
