"""Branches that know nothing of one another until they meet: what K puts on separate devices."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from autopipe.ir.placement import recomputed_nodes
from autopipe.passes.placement.tessel_shapes.model import CostedModel


@dataclass(frozen=True, slots=True)
class BranchJoin:
    """The branches, and everything from where they meet on. All nodes are in one of them."""

    branches: tuple[tuple[int, ...], ...]
    rest: tuple[int, ...]


@dataclass(slots=True)
class _Component:
    nodes: list[int] = field(default_factory=list)
    seconds: float = 0.0


def find_join(model: CostedModel, order: tuple[int, ...]) -> BranchJoin | None:
    """The first node, in `order`, at which branches meet: each half a device's share of the work or more.

    Each has at least half as much work as the largest too: a decoder's first layer is no branch beside the encoder.
    None where there is none. Values made of parameters alone, masks and positions connect nothing.
    """
    graph = model.graph
    apart = recomputed_nodes(graph) | {node for node in range(len(graph.nodes)) if model.is_weight(node)}
    least = model.share * float(model.seconds.sum())
    component: dict[int, _Component] = {}
    for node in sorted(set(range(len(graph.nodes))) - apart):
        producers = [graph.producer(name) for name in graph.nodes[node].inputs if name]
        met = {id(component[each]): component[each] for each in producers if each is not None and each in component}
        most = max((each.seconds for each in met.values()), default=0.0)
        large = [each for each in met.values() if each.seconds >= max(least, most / 2)]
        if len(large) > 1:
            return _join(model, order, [sorted(each.nodes) for each in large], apart)
        joined = _joined(list(met.values()))
        joined.nodes.append(node)
        joined.seconds += float(model.seconds[node])
        component |= dict.fromkeys(joined.nodes if len(met) > 1 else [node], joined)
    return None


def _joined(parts: list[_Component]) -> _Component:
    if len(parts) == 1:
        return parts[0]
    return _Component([node for part in parts for node in part.nodes], sum(part.seconds for part in parts))


def _join(model: CostedModel, order: tuple[int, ...], branches: list[list[int]], apart: Set[int]) -> BranchJoin:
    """The branches in order of their first nodes, each with the weights it reads first; all others are the rest."""
    branches = sorted(branches)
    home = {node: index for index, nodes in enumerate(branches) for node in nodes}
    rest = len(branches)
    for node in reversed(order):
        if node not in home:
            names = [name for name in model.graph.nodes[node].outputs if name]
            homes = [home[reader] for name in names for reader in model.readers.get(name, ())]
            home[node] = min(homes, default=rest) if node in apart else rest
    found = [tuple(sorted(node for node, index in home.items() if index == each)) for each in range(rest + 1)]
    return BranchJoin(tuple(found[:rest]), found[rest])
