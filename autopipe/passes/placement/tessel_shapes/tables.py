"""Tables and heads that are too large for one device's share: what M and NN share among all devices."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.layout import even_degree_hint
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.space import AxisKind
from autopipe.passes.placement.tessel_shapes.model import CostedModel
from autopipe.passes.sharding.regions import grow, seed_axis


@dataclass(frozen=True, slots=True)
class SharedLookup:
    """A lookup in a large table, or a head over many classes, with all nodes that stay cut with it."""

    table: str
    node: int
    nodes: frozenset[int]


@remembered(GRAPHS)
def large_tables(model: CostedModel, at_least_one: bool) -> frozenset[str]:
    """Tables that lookups read and weights of heads, those with more than half a device's share of all parameters.

    With `at_least_one` and none so large, the largest that a lookup reads and all others half as large or more.
    """
    graph = model.graph
    total = sum(each.value.bytes for each in graph.parameters)
    looked_up = {name for names in _all_looked_up(model) for name in names}
    classes = {name for names in _all_heads(model) for name in names}
    sizes = {name: graph.type_of(name).bytes for name in sorted(looked_up | classes)}
    least = model.share * total
    if at_least_one and looked_up and not any(size >= least for size in sizes.values()):
        least = max(sizes[name] for name in looked_up) / 2
    return frozenset(name for name, size in sizes.items() if size >= least)


def wide_nodes(model: CostedModel, tables: frozenset[str], degree: int) -> tuple[SharedLookup, ...]:
    """The lookups and heads that read one of `tables`, in order.

    Raises InfeasibleError, naming the table, where `degree` devices cannot share one equally.
    """
    everything = frozenset(range(len(model.graph.nodes)))
    looked_up, heads = _all_looked_up(model), _all_heads(model)
    found = []
    for node in sorted(everything):
        read = sorted((looked_up[node] | heads[node]) & tables)
        if not read:
            continue
        axis = seed_axis(model, node, degree, tables)
        if axis is None:
            raise _uneven(model, node, read[0], degree)
        region = grow(model, node, axis, degree, everything, {})
        cut = frozenset({node}) if region.open else frozenset(region.axes)
        found.append(SharedLookup(read[0], node, cut | model.feeders(node)))
    return tuple(found)


@remembered(GRAPHS)
def _all_looked_up(model: CostedModel) -> tuple[frozenset[str], ...]:
    return tuple(_looked_up(model, node) for node in range(len(model.graph.nodes)))


@remembered(GRAPHS)
def _all_heads(model: CostedModel) -> tuple[frozenset[str], ...]:
    return tuple(_heads(model, node) for node in range(len(model.graph.nodes)))


def _looked_up(model: CostedModel, node: int) -> frozenset[str]:
    """The table that a node looks rows up in."""
    use, inputs = model.uses[node], model.graph.nodes[node].inputs
    joint = any(axis.kind is AxisKind.JOINT for axis in use.space.axes)
    if not joint or use.row.kind != "memory" or model.graph.parameter(inputs[0]) is None:
        return frozenset()
    return frozenset([inputs[0]])


def _heads(model: CostedModel, node: int) -> frozenset[str]:
    """The weights of a product whose columns are classes: they end in a softmax or a loss, or leave the model."""
    if model.is_weight(node) or not model.parameters_of(node):
        return frozenset()
    axis = seed_axis(model, node, 1, frozenset())
    if axis is None:
        return frozenset()
    region = grow(model, node, axis, 1, frozenset(range(len(model.graph.nodes))), {})
    ends_in_classes = AxisKind.JOINT in region.ends or bool(region.leaves)
    return model.parameters_of(node) if ends_in_classes and not region.open else frozenset()


def _uneven(model: CostedModel, node: int, table: str, degree: int) -> InfeasibleError:
    space = model.uses[node].space
    column = seed_axis(model, node, 1, frozenset([table]))
    extent = space.axis(column).extent if column else 0
    return InfeasibleError(
        f"{degree} devices cannot share the {extent} rows of {table!r} equally",
        hint=even_degree_hint(extent, degree),
        where=repr(model.graph.nodes[node].name),
    )
