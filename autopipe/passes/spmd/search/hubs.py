"""Values that several nodes read: each is a variable of its own, the layout in which its readers find it.

So a change of layout that several readers share is paid once. A value goes from the layout in which its node leaves it
to the hub's, and from there to each reader's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopipe.ir.layout import Layout, replicated
from autopipe.passes.spmd.search.forms import TensorLayouts
from autopipe.passes.spmd.search.moves import Floats
from autopipe.passes.spmd.search.reducing import Changes


@dataclass(frozen=True, slots=True, eq=False)
class SharedValue:
    """A variable for a value: its layouts, and what they cost with the source's and the readers' configurations."""

    layouts: tuple[Layout, ...]
    from_source: Floats
    """[configurations of the source, layouts] seconds; of a parameter there is no source: [0, layouts]."""
    to_readers: tuple[Floats, ...]
    """For each reader [layouts, its configurations]; inf where they do not go together. Equal readers share them."""

    def times(self, factor: float) -> SharedValue:
        """The same `factor` times."""
        made = {id(each): each * factor for each in self.to_readers}
        return SharedValue(self.layouts, self.from_source * factor, tuple(made[id(each)] for each in self.to_readers))


def shared_value(
    source: TensorLayouts, readers: Sequence[TensorLayouts], size_bytes: float, changes: Changes, given: bool
) -> SharedValue:
    """The hub of a computed value of `size_bytes`; `given` says whether others want it besides `readers`.

    Lowering scatters shares of sums only to what all readers want alike: hence a second set of the layouts wanted by
    all, which cost less to come to and cannot be left.
    """
    held = [layout.reduced() for layout in source.layouts]
    free = list(dict.fromkeys([*held, *(layout.even() for reader in readers for layout in reader.layouts)]))
    bound: list[Layout] = []
    if not given and any(layout.is_partial for layout in source.layouts):
        evens = [{layout.even() for layout in reader.layouts} for reader in readers]
        bound = [layout for layout in free if all(layout in even for even in evens)]
    into = [changes.to_all(source.layouts, free, size_bytes)]
    if bound:
        into.append(changes.to_reader(source.layouts, bound, size_bytes))
    out: dict[int, Floats] = {}
    for reader in readers:
        if id(reader) in out:
            continue
        moving = [changes.moves.seconds(free, reader.layouts, size_bytes)]
        if bound:
            of_equal = changes.moves.seconds(bound, reader.layouts, size_bytes)
            moving.append(of_equal + _only_equal(bound, [layout.even() for layout in reader.layouts]))
        out[id(reader)] = np.concatenate(moving)[:, reader.of]
    to_readers = tuple(out[id(reader)] for reader in readers)
    return SharedValue((*free, *bound), np.concatenate(into, axis=1)[source.of], to_readers)


def shared_parameter(readers: Sequence[TensorLayouts], shape: tuple[int, ...], only_whole: bool) -> SharedValue:
    """The hub of a parameter: held in the one layout that all its readers want, or whole and cut for free."""
    whole = replicated(shape)
    wanted = dict.fromkeys(layout for reader in readers for layout in reader.layouts)
    common = [each for each in wanted if each != whole and all(each in reader.layouts for reader in readers)]
    if only_whole:
        common = []
    out = tuple(
        np.concatenate([np.zeros((1, len(reader.layouts))), _only_equal(common, reader.layouts)])[:, reader.of]
        for reader in readers
    )
    return SharedValue((whole, *common), np.zeros((0, 1 + len(common))), out)


def _only_equal(layouts: Sequence[Layout], wanted: Sequence[Layout]) -> Floats:
    """0 where both are the same, else inf."""
    rows = {layout: row for row, layout in enumerate(layouts)}
    found = np.full((len(layouts), len(wanted)), np.inf)
    for column, layout in enumerate(wanted):
        if layout in rows:
            found[rows[layout], column] = 0.0
    return found
