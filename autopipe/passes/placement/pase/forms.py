"""The layouts in which a node's configurations read its operands and leave its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.graph import Graph, Node
from autopipe.ir.layout import Layout, mesh_of, operand_layout, result_layout
from autopipe.ir.space import Space
from autopipe.passes.placement.pase.configurations import Splits


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """One tensor under each configuration of a node: few different layouts, and which of them each one has."""

    layouts: tuple[Layout, ...]
    of: NDArray[np.int64]


def operand_form(
    graph: Graph, node: Node, position: int, space: Space, configurations: Sequence[Splits], group: int
) -> Form:
    """How a node wants its operand at `position`."""
    shape, dimensions = graph.type_of(node.inputs[position]).shape, space.operands[position] or ()
    own = {name for dimension in dimensions for name in dimension}
    windows = space.windows_of(position)
    own |= {each.axis for each in windows}
    return _form(configurations, group, own, lambda splits: operand_layout(dimensions, shape, splits, group, windows))


def result_form(
    graph: Graph, node: Node, position: int, space: Space, configurations: Sequence[Splits], group: int
) -> Form:
    """How a node leaves its result at `position`, shares of sums and means included."""
    shape, dimensions = graph.type_of(node.outputs[position]).shape, space.results[position] or ()
    own = {axis.name for axis in space.axes}
    return _form(configurations, group, own, lambda splits: result_layout(space, dimensions, shape, splits, group))


def _form(configurations: Sequence[Splits], group: int, own: set[str], make: Callable[[Splits], Layout]) -> Form:
    """The layouts that `make` gives, asked once for configurations that agree on where the axes `own` lie."""
    found: dict[Layout, int] = {}
    known: dict[object, int] = {}
    places = []
    for splits in configurations:
        key = tuple(pair for pair in zip(splits, mesh_of(splits, group), strict=True) if pair[0].axis in own)
        if key not in known:
            layout = make(splits)
            known[key] = found.setdefault(layout, len(found))
        places.append(known[key])
    return Form(tuple(found), np.array(places, dtype=np.int64))
