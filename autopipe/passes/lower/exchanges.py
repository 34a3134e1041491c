"""Which exchanges a stage's group makes between its nodes: one answer, for what is run and for what it costs.

A value changes its layout where the next node wants it in another. Partial sums that all readers want cut in one way
are reduced and scattered, else reduced to the whole; cut values are gathered; whole ones are cut for free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

from autopipe.ir.graph import Graph, Node
from autopipe.ir.layout import Layout, operand_layout, plain, replicated, result_layout
from autopipe.ir.placement import Split
from autopipe.ir.space import Space


@dataclass(frozen=True, slots=True)
class Laid:
    """One node with the layouts in which its group reads its operands and leaves its results; None where absent."""

    index: int
    node: Node
    operands: tuple[Layout | None, ...]
    results: tuple[Layout | None, ...]


def laid(graph: Graph, index: int, space: Space, splits: tuple[Split, ...]) -> Laid:
    """The graph's node at `index`, of iteration space `space`, under its splits."""
    node = graph.nodes[index]
    operands = (
        plain(operand_layout(space, words or (), graph.type_of(name).shape, splits)) if name else None
        for name, words in zip(node.inputs, space.operands, strict=True)
    )
    results = (
        result_layout(space, words or (), graph.type_of(name).shape, splits) if name else None
        for name, words in zip(node.outputs, space.results, strict=True)
    )
    return Laid(index, node, tuple(operands), tuple(results))


def taken_layouts(graph: Graph, nodes: Sequence[Laid], whole: Set[str] = frozenset()) -> dict[str, Layout]:
    """For each value a stage does not compute, the layout to hold it in: the one all its nodes need, else whole.

    Constants and the values in `whole` are whole.
    """
    written = {name for each in nodes for name in each.node.outputs}
    fixed = whole | {each.value.name for each in graph.constants}
    return {
        name: next(iter(needs)) if len(needs) == 1 and name not in fixed else replicated(graph.type_of(name).shape)
        for name, needs in _wanted(nodes).items()
        if name not in written
    }


@dataclass(frozen=True, slots=True)
class Exchange:
    """A change of one value's layout.

    `kind` is `all_reduce` (partial sums → whole), `reduce_scatter` (partial sums → shards), `all_gather` (shards →
    whole) or `slice` (whole → this device's shard; no communication).
    """

    kind: str
    value: str
    source: Layout
    result: Layout

    @property
    def dimension(self) -> int:
        """The dimension that is cut on one side; 0 where none is."""
        cut = self.source if any(self.source.cuts) else self.result
        return next((index for index, cuts in enumerate(cut.cuts) if cuts), 0)


def with_exchanges(
    nodes: Sequence[Laid], taken: dict[str, Layout], given: Set[str], shares: Set[str]
) -> Iterator[Laid | Exchange]:
    """The nodes of a stage in order, with the exchanges between them.

    `taken` are the layouts of the values it does not compute, `given` the values that others want whole or in shards
    of one's own choice, and `shares` the scalars that may stay partial.
    """
    wanted = _wanted(nodes)
    state = _Held(dict(taken))
    for each in nodes:
        for name, need in zip(each.node.inputs, each.operands, strict=True):
            if need is not None:
                yield from state.converted(name, need)
        yield each
        for name, layout in zip(each.node.outputs, each.results, strict=True):
            if layout is None:
                continue
            if layout.partial is None or (name in shares and not layout.shape):
                state.layouts[name] = layout if layout.partial else plain(layout)
                continue
            needs = wanted.get(name, set())
            target = next(iter(needs)) if len(needs) == 1 and name not in given else None
            if target is None or target.is_whole:
                target = plain(replace(layout, partial=None, partial_over=()))
            kind = "reduce_scatter" if any(target.cuts) else "all_reduce"
            yield Exchange(kind, name, layout, target)
            state.layouts[name] = target


def _wanted(nodes: Sequence[Laid]) -> dict[str, set[Layout]]:
    """The layouts in which nodes read each value."""
    wanted: dict[str, set[Layout]] = {}
    for each in nodes:
        for name, need in zip(each.node.inputs, each.operands, strict=True):
            if need is not None:
                wanted.setdefault(name, set()).add(need)
    return wanted


@dataclass(slots=True)
class _Held:
    """How the group holds each value so far, and the other layouts it was brought into."""

    layouts: dict[str, Layout]
    others: set[tuple[str, Layout]] = field(default_factory=set)

    def converted(self, name: str, need: Layout) -> Iterator[Exchange]:
        """The exchanges that bring a value into the layout a node needs, where it is not there yet."""
        have = self.layouts[name]
        if have == need or (name, need) in self.others:
            return
        whole = replicated(have.shape)
        if not have.is_whole and (name, whole) not in self.others:
            self.others.add((name, whole))
            yield Exchange("all_gather", name, have, whole)
        if not need.is_whole:
            self.others.add((name, need))
            yield Exchange("slice", name, whole, need)
