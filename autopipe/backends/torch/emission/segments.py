"""The operations of a stage that recomputes, by segment: what each of them reads of others, and gives to others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopipe.ir.program import Operation, StageCode


@dataclass(frozen=True, slots=True)
class Part:
    """A segment's operations; names of values in the order of their first use."""

    operations: tuple[Operation, ...]
    arguments: tuple[str, ...]
    flowing: tuple[str, ...]
    """Of what it gives, what gradients flow through."""
    others: tuple[str, ...]
    """Results through which no gradient flows."""

    @property
    def results(self) -> tuple[str, ...]:
        """Names of all the segment's results."""
        return self.flowing + self.others


def parts_of(stage: StageCode) -> tuple[Part, ...]:
    """The segments that give something."""
    held = {value.name for _, value in stage.parameters} | {each.value.name for _, each in stage.constants}
    wanted = {value.name for value in stage.outputs}
    flowing = frozenset(name for segment in stage.segments for name in segment.flowing)
    found: list[Part] = []
    for operations in reversed(stage.by_segment()):
        written = dict.fromkeys(name for each in operations for name in each.writes)
        read = dict.fromkeys(name for each in operations for name in each.reads)
        results = [name for name in written if name in wanted]
        if results:
            arguments = tuple(name for name in read if name not in written and name not in held)
            found.append(Part(operations, arguments, *_divided(results, flowing)))
            wanted |= set(arguments)
    return tuple(reversed(found))


def _divided(names: Iterable[str], chosen: frozenset[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split `names` into the chosen ones and the others."""
    found = tuple(names)
    return tuple(name for name in found if name in chosen), tuple(name for name in found if name not in chosen)
