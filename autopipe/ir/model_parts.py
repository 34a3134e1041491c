"""The parts of a model that a stage holds, in words: `embedding, decoder layers 0–7`.

Plans, tables and reports name the contents of a stage in this way. `passes/analysis/layer_ranges`
finds the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated

from autopipe.ir.codec import Index, OmitDefault
from autopipe.ir.placement import node_ranges
from autopipe.ir.words import plural, printable

LayerSelection = tuple[Index, Index] | str | tuple[str, ...]
"""Layers that a configuration selects: [first, last] of the model's main layers, a text such as
`encoder[0:4]`, which selects layers 0 to 3 of the encoder, or a list of texts.
"""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Consecutive layers of a model, a part of one layer, or a part outside of all layers."""

    name: str
    """Name of each of the layers, such as `decoder layer`, or of the part, such as `embedding`."""
    first: Annotated[Index | None, OmitDefault()] = None
    """Number of the first layer among the layers of this name, which are numbered from 0 in the
    order of the model; None for a part outside of all layers.
    """
    last: Annotated[Index | None, OmitDefault()] = None
    """Number of the last layer; None for a part outside of all layers."""
    incomplete: Annotated[bool, OmitDefault()] = False
    """True if the stage holds only some of the nodes of the layer `first`."""

    @property
    def numbers(self) -> range:
        """The numbers of the layers; empty for a part outside of all layers."""
        if self.first is None or self.last is None:
            return range(0)
        return range(self.first, self.last + 1)


MAX_LISTED_PARTS = 4
"""Maximum number of parts that a text lists. The others are counted."""


def numbers_text(numbers: Iterable[int]) -> str:
    """Return ascending numbers of layers as text with ranges, such as `0–3, 8`."""
    return ", ".join(
        f"{first}" if stop == first + 1 else f"{first}–{stop - 1}"
        for first, stop in node_ranges(numbers)
    )


def parts_text(parts: Sequence[ModelPart], most: int = MAX_LISTED_PARTS) -> str:
    """Return parts as text, such as `embedding, layers 0–7, part of layer 8`. Texts of several
    ranges of one name share the name: `layers 0–1, 4–5`.

    If there are more than `most` parts, the last one, and the parts before it up to this number,
    are listed, with `...` for the others.
    """
    if len(parts) > most:
        shown = [*_texts(parts[: most - 1]), "...", *_texts(parts[-1:])]
    else:
        shown = list(_texts(parts))
    return printable(", ".join(shown))


def _texts(parts: Sequence[ModelPart]) -> list[str]:
    """Return one text per part. Consecutive complete ranges of one name share a text."""
    found = []
    for (name, incomplete, is_outside), group in groupby(
        parts, key=lambda each: (each.name, each.incomplete, each.first is None)
    ):
        several = list(group)
        if is_outside:
            found.append(name)
        elif incomplete:
            found += [f"part of {name} {each.first}" for each in several]
        else:
            numbers = [number for each in several for number in each.numbers]
            found.append(f"{plural(len(numbers), name)} {numbers_text(numbers)}")
    return found
