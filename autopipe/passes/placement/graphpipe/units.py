"""A graph's nodes joined into units that no stage parts, and what each unit waits for."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.ir.graph import Graph
from autopipe.ir.ops import operator_of
from autopipe.ir.placement import recomputed_nodes


@dataclass(frozen=True, slots=True)
class Units:
    """Sets of nodes in a topological order of the units."""

    nodes: tuple[tuple[int, ...], ...]
    """The nodes of each unit, ascending."""
    needs: tuple[int, ...]
    """For each unit the units that it reads from, as bits."""


def make_units(graph: Graph) -> Units:
    """Every node a unit, but for nodes that would only be in the way.

    What depends on no input (constants, transposed weights, positions) goes with its first reader: such trees lie
    beside all that runs before, and would make branches out of nothing. A view goes with the node whose value it shows.
    Values that every stage computes for itself (`recomputed_nodes`) make no unit wait.
    """
    leaders = _leaders(graph)
    members: dict[int, list[int]] = {}
    for node, leader in enumerate(leaders):
        members.setdefault(leader, []).append(node)
    order = sorted(members)
    unit_of = {leader: unit for unit, leader in enumerate(order)}
    recomputed = recomputed_nodes(graph)
    needs = [0] * len(order)
    for node, leader in enumerate(leaders):
        if node in recomputed:
            continue
        for producer in _producers(graph, node):
            if producer not in recomputed and leaders[producer] != leader:
                needs[unit_of[leader]] |= 1 << unit_of[leaders[producer]]
    return Units(tuple(tuple(members[leader]) for leader in order), tuple(needs))


def _leaders(graph: Graph) -> list[int]:
    """For each node the one that its unit is named after: the first that depends on an input, and on no view of it."""
    producers = [_producers(graph, index) for index in range(len(graph.nodes))]
    aside = recomputed_nodes(graph) | _without_inputs(graph, producers)
    leaders = list(range(len(graph.nodes)))
    readers: dict[int, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        for producer in producers[index]:
            readers.setdefault(producer, []).append(index)
        row = operator_of(node)
        if row is not None and row.kind == "view" and len(producers[index]) == 1:
            (shown,) = producers[index]
            if index not in aside and shown not in aside:
                leaders[index] = leaders[shown]
    for index in sorted(aside, reverse=True):
        leaders[index] = min((leaders[reader] for reader in readers.get(index, ())), default=index)
    return leaders


def _without_inputs(graph: Graph, producers: list[list[int]]) -> set[int]:
    """Nodes that depend on no input of the model."""
    inputs = {value.name for value in graph.inputs}
    found: set[int] = set()
    for index, node in enumerate(graph.nodes):
        if inputs.isdisjoint(node.inputs) and found.issuperset(producers[index]):
            found.add(index)
    return found


def _producers(graph: Graph, index: int) -> list[int]:
    """The nodes whose values a node reads, each once."""
    found = (graph.producer(name) for name in graph.nodes[index].inputs if name)
    return list(dict.fromkeys(producer for producer in found if producer is not None))
