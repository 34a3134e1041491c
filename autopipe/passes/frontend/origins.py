"""Mapping from a file's nodes and values to those of the graph that was read from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autopipe.ir.graph import Graph
from autopipe.ir.memo import GRAPHS, remembered

if TYPE_CHECKING:
    from autopipe.passes.frontend.load import Source


@dataclass(frozen=True, slots=True)
class Origin:
    """A node of the file.

    `values` are those that it reads and writes, by the names that the graph has for them (those it has none for are
    left out): pairs of a name in the file and a name in the graph, each once.
    """

    position: int
    """Where it stands among the file's nodes."""
    title: str
    """Its operator and name, for messages."""
    values: tuple[tuple[str, str], ...]
    readers: tuple[int, ...]
    """The origins that read what it writes."""
    writes: int | None
    """The graph's node that writes its results in its place, or that was made of it while operators were put together
    (the transposition of an attention's keys)."""
    renames: int | None
    """The graph's node whose result it only gives another name."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """The nodes of a file, functions inlined, in topological order."""

    nodes: tuple[Origin, ...]

    def owners(self) -> tuple[int | None, ...]:
        """For each origin the graph's node that it is part of.

        That is the node that writes its results; where there is none, since the origin was taken out or put together
        with others into one operator, the one node that all its readers are part of.
        """
        owners = [each.renames if each.writes is None else each.writes for each in self.nodes]
        for index in range(len(self.nodes) - 1, -1, -1):
            if owners[index] is None:
                found = {owners[reader] for reader in self.nodes[index].readers}
                owners[index] = found.pop() if len(found) == 1 else None
        return tuple(owners)


@remembered(GRAPHS)
def origins_of(source: Source, aliases: Mapping[str, str], graph: Graph) -> Provenance:
    """The origins of `graph`, read from `source`. `aliases` are values of the file that are other names of values."""
    known = {value.name for value in (*graph.inputs, *graph.values)}
    known |= {each.value.name for each in graph.parameters} | {each.value.name for each in graph.constants}
    # A value that an Identity names as an output may have got the output's name.
    renamed = {aliases[name]: name for name in graph.outputs if name in aliases}

    def name_of(name: str) -> str | None:
        if name in known:
            return name
        name = aliases.get(name, name)
        return name if name in known else renamed.get(name)

    readers: dict[str, list[int]] = {}
    for index, node in enumerate(source.nodes):
        for name in node.input:
            readers.setdefault(name, []).append(index)
    written: set[int] = set()
    found = []
    for node, position in zip(source.nodes, source.positions, strict=True):
        results = [name for name in node.output if name]
        known_results = (own for name in results if (own := name_of(name)) is not None)
        producers = [producer for own in known_results if (producer := graph.producer(own)) is not None]
        writes = next((producer for producer in producers if producer not in written), None)
        written.update(producers)
        names = ((name, name_of(name)) for name in dict.fromkeys((*node.input, *results)) if name)
        found.append(
            Origin(
                position=position,
                title=f"{node.op_type} {node.name!r}",
                values=tuple((name, own) for name, own in names if own is not None),
                readers=tuple(dict.fromkeys(reader for name in results for reader in readers.get(name, ()))),
                writes=writes,
                renames=producers[0] if producers and writes is None else None,
            )
        )
    return _with_made(Provenance(tuple(found)), graph)


def _with_made(origins: Provenance, graph: Graph) -> Provenance:
    """The origins, with one for each node of the graph that stands between what one of them reads and its owner."""
    owners = origins.owners()
    free: dict[tuple[str, int], int] = {}
    for index in range(len(owners) - 1, -1, -1):
        origin, owner = origins.nodes[index], owners[index]
        if origin.writes is None and origin.renames is None and owner is not None:
            free.update(((own, owner), index) for _, own in origin.values)
    readers: dict[str, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        for name in node.inputs:
            readers.setdefault(name, []).append(index)
    nodes = list(origins.nodes)
    for made in sorted(set(range(len(graph.nodes))) - {each.writes for each in nodes}):
        own = graph.nodes[made]
        after = [reader for name in own.outputs for reader in readers.get(name, ())]
        for found in [free[name, reader] for name in own.inputs for reader in after if (name, reader) in free][:1]:
            if nodes[found].writes is None:
                nodes[found] = replace(nodes[found], writes=made)
    return Provenance(tuple(nodes))
