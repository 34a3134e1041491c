"""Which exchanges a stage's group makes between its nodes: one answer, for what is run and for what it costs.

A value changes its layout where the next node wants it in another. Partial sums are added up at once: scattered where
all readers want the same blocks, else to copies. After that the steps of `relayout.py` bring a value to each layout
that is asked for, from the form of it that lacks least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from autopipe.ir.graph import Graph, Node
from autopipe.ir.layout import Layout, Relayout, lacking, operand_layout, replicated, result_layout
from autopipe.ir.placement import Split
from autopipe.ir.space import Space
from autopipe.passes.lower.relayout import reductions, steps_between


@dataclass(frozen=True, slots=True)
class NodeLayouts:
    """One node with the layouts in which its group reads its operands and leaves its results; None where absent."""

    index: int
    node: Node
    operands: tuple[Layout | None, ...]
    results: tuple[Layout | None, ...]


def laid(graph: Graph, index: int, space: Space, splits: tuple[Split, ...], group: int) -> NodeLayouts:
    """The graph's node at `index`, of iteration space `space`, under its splits over `group` devices."""
    node = graph.nodes[index]
    operands = (
        operand_layout(words or (), graph.type_of(name).shape, splits, group, space.windows_of(place)) if name else None
        for place, (name, words) in enumerate(zip(node.inputs, space.operands, strict=True))
    )
    results = (
        result_layout(space, words or (), graph.type_of(name).shape, splits, group) if name else None
        for name, words in zip(node.outputs, space.results, strict=True)
    )
    return NodeLayouts(index, node, tuple(operands), tuple(results))


def taken_layouts(graph: Graph, nodes: Sequence[NodeLayouts], whole: Set[str] = frozenset()) -> dict[str, Layout]:
    """For each value a stage does not compute, the layout to hold it in: the one all its nodes need, else whole.

    Blocks that are read through windows are held as even ones where there are such. Constants and the values in `whole`
    are whole.
    """
    written = frozenset(name for each in nodes for name in each.node.outputs)
    fixed = whole | {each.value.name for each in graph.constants}
    return {
        name: next(iter(needs)) if len(needs) == 1 and name not in fixed else replicated(graph.type_of(name).shape)
        for name, needs in _wanted(nodes, written).items()
    }


@dataclass(frozen=True, slots=True)
class Exchange:
    """One step of a change of one value's layout."""

    value: str
    step: Relayout


def with_exchanges(
    nodes: Sequence[NodeLayouts], taken: dict[str, Layout], given: Set[str], shares: Set[str], group: int
) -> Iterator[NodeLayouts | Exchange]:
    """The nodes of a stage in order, with the exchanges between them.

    `taken` are the layouts of the values it does not compute, `given` the values that others want whole or in shards
    of one's own choice, and `shares` the scalars that may stay partial.
    """
    wanted = _wanted(nodes)
    state = _Held(group, wanted, {name: [layout] for name, layout in taken.items()})
    for each in nodes:
        for name, need in zip(each.node.inputs, each.operands, strict=True):
            if need is not None:
                yield from state.brought(name, need)
        yield each
        for name, layout in zip(each.node.outputs, each.results, strict=True):
            if layout is None:
                continue
            held = layout
            if layout.is_partial and not (name in shares and not layout.shape):
                needs = wanted.get(name, {})
                alone = len(needs) == 1 and name not in given
                for step in reductions(layout, next(iter(needs)) if alone else layout.reduced()):
                    yield Exchange(name, step)
                    held = step.result
            state.forms[name] = [held]


def _wanted(nodes: Sequence[NodeLayouts], left_out: Set[str] = frozenset()) -> dict[str, dict[Layout, None]]:
    """The layouts in which nodes read each value, in order, but for the windows they read it through."""
    wanted: dict[str, dict[Layout, None]] = {}
    for each in nodes:
        for name, need in zip(each.node.inputs, each.operands, strict=True):
            if need is None or name in left_out:
                continue
            if name in wanted:
                wanted[name][need.even()] = None
            else:
                wanted[name] = {need.even(): None}
    return wanted


@dataclass(slots=True)
class _Held:
    """The forms in which the group has each value so far, the one it is known by first, and those that are `wanted`."""

    group: int
    wanted: dict[str, dict[Layout, None]]
    forms: dict[str, list[Layout]] = field(default_factory=dict)

    def brought(self, name: str, need: Layout) -> Iterator[Exchange]:
        """The exchanges that bring a value into the layout a node needs, where it is not there yet.

        Where a later node wants a form that this one is but a cut of, that one is made first.
        """
        forms = self.forms[name]
        if need in forms:
            return
        later = (form for form in self.wanted.get(name, ()) if form not in forms and form != need)
        within = [form for form in later if not lacking(form, need, self.group).any()]
        if within:
            yield from self._made(name, max(within, key=lambda form: math.prod(form.local_shape())))
        if need not in forms:
            yield from self._made(name, need)

    def _made(self, name: str, need: Layout) -> Iterator[Exchange]:
        """The steps to a form from the one that lacks least of it."""
        forms = self.forms[name]
        even = (have for have in forms if not have.windows)
        nearest = min(even, key=lambda have: int(lacking(have, need, self.group).max()))
        for step in steps_between(nearest, need):
            if step.result not in forms:
                yield Exchange(name, step)
                forms.append(step.result)
