"""A model in a line of parts, those that all devices share and the chains between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.ir.placement import recomputed_nodes
from autopipe.passes.analysis.chain import Chain
from autopipe.passes.placement.tessel_shapes.model import CostedModel
from autopipe.passes.placement.tessel_shapes.tables import SharedLookup


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Nodes that stand together; `shared` where they are split over all devices."""

    nodes: tuple[int, ...]
    shared: bool


def line_of_parts(model: CostedModel, chain: Chain, wide: Sequence[SharedLookup]) -> tuple[ModelPart, ...]:
    """The line's parts in order: lookups and heads with all that stands between their nodes, and chains between them.

    A chain with less than half a device's share of the work at either end joins the shared part beside it.
    """
    place = {node: index for index, node in enumerate(chain.order)}
    shared = [False] * len(chain.order)
    for each in wide:
        places = [place[node] for node in each.nodes]
        for index in range(min(places), max(places) + 1):
            shared[index] = True
    parts: list[ModelPart] = []
    for node, is_shared in zip(chain.order, shared, strict=True):
        if parts and parts[-1].shared is is_shared:
            parts[-1] = ModelPart((*parts[-1].nodes, node), is_shared)
        else:
            parts.append(ModelPart((node,), is_shared))
    return _without_scraps(model, parts)


def hoisted(model: CostedModel, parts: Sequence[ModelPart], wide: Sequence[SharedLookup]) -> tuple[ModelPart, ...]:
    """The same with all lookups that read inputs alone in the first part, so that one chain is left behind them."""
    early = {node for each in wide if _reads_inputs(model, each) for node in each.nodes}
    late = {node for each in wide for node in each.nodes} - early
    merged = [ModelPart(tuple(sorted(early)), True)]
    for part in parts:
        nodes = tuple(node for node in part.nodes if node not in early)
        shared = not late.isdisjoint(nodes)
        if nodes and merged[-1].shared is shared:
            merged[-1] = ModelPart((*merged[-1].nodes, *nodes), shared)
        elif nodes:
            merged.append(ModelPart(nodes, shared))
    return _without_scraps(model, [part for part in merged if part.nodes])


def _reads_inputs(model: CostedModel, wide: SharedLookup) -> bool:
    """True if a lookup depends on nothing that the model computes from other parameters."""
    nodes = wide.nodes | recomputed_nodes(model.graph)
    known = {value.name for value in model.graph.inputs} | model.weights.keys()
    known |= {name for node in nodes for name in model.graph.nodes[node].outputs}
    return all(name in known for node in wide.nodes for name in model.graph.nodes[node].inputs if name)


def _without_scraps(model: CostedModel, parts: Sequence[ModelPart]) -> tuple[ModelPart, ...]:
    """The parts, chains of little work joined to their neighbour: at the end to what comes before, else to the next."""
    least = model.share * float(model.seconds.sum())
    found: list[ModelPart] = []
    carried: tuple[int, ...] = ()
    for part in parts:
        small = not part.shared and model.weighs(part.nodes) < least
        if small and found and part is parts[-1]:
            found[-1] = ModelPart((*found[-1].nodes, *part.nodes), found[-1].shared)
        elif small and part is not parts[-1]:
            carried += part.nodes
        elif found and found[-1].shared is part.shared:
            found[-1] = ModelPart((*found[-1].nodes, *carried, *part.nodes), part.shared)
            carried = ()
        else:
            found.append(ModelPart((*carried, *part.nodes), part.shared))
            carried = ()
    return tuple(found)
