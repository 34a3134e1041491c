"""A strategy or a scheduler by name, with options that only its own dataclass can check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from autopipe.configs.convert import convert
from autopipe.configs.schema import Origin, Rest, Shape
from autopipe.configs.source import Entry, Place


@dataclass(frozen=True, slots=True)
class Choice:
    """A name and its options, not checked yet."""

    selectors: ClassVar[tuple[str, ...]] = ("name",)

    name: str
    """Its name."""

    options: Annotated[tuple[tuple[str, Entry], ...], Rest()] = field(default=())
    """The options of the one that is named, under their own names."""

    place: Annotated[Place, Origin("name")] = field(default=Place("the defaults"), compare=False)
    """Where the name was written."""


def build(choice: Choice, schema: type[Shape], path: str) -> Shape:
    """An instance of `schema`, the dataclass that `choice.name` stands for, with the options chosen.

    `path` is `strategy` or `schedule`. Raises ConfigurationError, with the place of the option, for an option that
    `schema` does not have (and names the nearest) or that is of the wrong type.
    """
    options = Entry(dict(choice.options), Place(path))
    return convert(options, schema, path)
