"""Names of the variables of a generated function, and the `del` statements that free their memory.

A name is used again if no later statement reads its value, as in `query = query.reshape(…)`. The
assignment frees the previous value then. A `del` frees a value whose name is not used again, unless
the value is small or the function ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from autopipe.backends.torch.codegen.identifiers import numbered_name
from autopipe.backends.torch.codegen.layer_functions import (
    Item,
    LayerLoop,
    variables_read,
    variables_written,
)
from autopipe.backends.torch.codegen.value_names import NameHint

_MIN_FREED_FRACTION: Final = 1 / 256
"""Minimum size of a value that a `del` frees, as a fraction of the largest value of the
function."""


@dataclass(frozen=True, slots=True)
class NamedVariables:
    """The variables of a function."""

    names: Mapping[str, str]
    """Name of each variable by its token."""
    freed: Sequence[tuple[str, ...]]
    """For each item, the names of the variables to delete after it."""


def name_variables(
    items: Sequence[Item],
    arguments: Mapping[str, str],
    results: Collection[str],
    hint_of: Callable[[str], NameHint],
    sizes: Mapping[str, int],
    reserved: Collection[str],
    kept: Collection[str] = (),
) -> NamedVariables:
    """Return names for the variables of a function whose body is `items`.

    `arguments` has the suggested names of the function's arguments, `results` are the variables
    that it returns, and `hint_of` suggests a name for a variable. `sizes` has the bytes of
    variables. No name is in `reserved`. Variables in `kept` are not deleted, because the caller
    refers to them.

    Invariant: two variables with one name are not in use together. A variable is in use from the
    item that assigns it to the last item that reads it. Time is linear in the number of operands.
    """
    naming = _Naming(items, arguments, results, hint_of, reserved)
    names = naming.names
    limit = _MIN_FREED_FRACTION * max((sizes.get(each, 0) for each in names), default=0)
    freed: list[tuple[str, ...]] = []
    for index, item in enumerate(items):
        dead = [
            names[each]
            for each in dict.fromkeys((*variables_read(item), *variables_written(item)))
            if each != "_"
            and naming.last_use[each] == index
            and each not in kept
            and sizes.get(each, 0) >= limit
            and names[each] not in naming.written_names[index]
        ]
        is_last = index == len(items) - 1
        freed.append(() if is_last else tuple(dict.fromkeys(dead)))
    return NamedVariables(names, freed)


class _Naming:
    """The names of the variables of one function."""

    def __init__(
        self,
        items: Sequence[Item],
        arguments: Mapping[str, str],
        results: Iterable[str],
        hint_of: Callable[[str], NameHint],
        reserved: Collection[str],
    ) -> None:
        self.hint_of = hint_of
        self.reserved = reserved
        self.names: dict[str, str] = {}
        """Name of each variable that has one so far."""
        self.stems: dict[str, str] = {}
        """Name of each variable without the number that makes it unique."""
        self.holders: dict[str, str] = {}
        """Variable that each name refers to."""
        self.last_use: dict[str, int] = dict.fromkeys(arguments, -1)
        """Index of the last item that reads or writes each variable."""
        self.written_names: list[set[str]] = []
        """For each item, the names that it assigns."""
        for index, item in enumerate(items):
            self.last_use |= dict.fromkeys(variables_read(item), index)
            self.last_use |= dict.fromkeys(variables_written(item), index)
        self.last_use |= dict.fromkeys(results, len(items))
        # All arguments of the function have different names, also those that no statement reads.
        for token, stem in arguments.items():
            self.stems[token] = stem
            self._assign(token, numbered_name(stem, self._refuses(set(self.names.values()), -1)))
        for index, item in enumerate(items):
            self.written_names.append(self._name_targets(item, index))

    def _name_targets(self, item: Item, index: int) -> set[str]:
        """Name the variables that an item assigns, and return their names."""
        taken: set[str] = set()
        if isinstance(item, LayerLoop):
            for start, token in zip(item.starts, item.writes, strict=True):
                taken.add(self.names[start])
                self._assign(token, self.names[start])
                self.stems[token] = self.stems[start]
            return taken
        for token in variables_written(item):
            if token == "_":
                continue
            hint = self.hint_of(token)
            name = stem = hint.stem
            if hint.follows in self.names:
                name = self.names[hint.follows]
                stem = self.stems[hint.follows]
            self.stems[token] = stem
            refuses = self._refuses(taken, index)
            if refuses(name):
                name = numbered_name(stem, refuses)
            taken.add(name)
            self._assign(token, name)
        return taken

    def _assign(self, token: str, name: str) -> None:
        """Let a name refer to a variable."""
        self.names[token] = name
        self.holders[name] = token

    def _refuses(self, taken: Collection[str], index: int) -> Callable[[str], bool]:
        """Return a function that is true for a name to which item `index` must not assign. `taken`
        has other names that it assigns.
        """

        def refuses(name: str) -> bool:
            """True if the name is taken, reserved, or refers to a variable that is still in use."""
            holder = self.holders.get(name)
            is_in_use = holder is not None and self.last_use[holder] > index
            return name in taken or name in self.reserved or is_in_use

        return refuses
