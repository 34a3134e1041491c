"""Few and readable entries for many nodes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

from autopipe.ir.placement import node_ranges
from autopipe.passes.placement.given.nodes import NodeEntry, NodeNames

_MOST_GLOBS = 256
"""Globs that are tried for nodes beyond one a layer: names that nobody's layers explain are many."""


def entries_of(
    names: NodeNames, nodes: Collection[int], among: Sequence[int], allowed: Collection[int], globs: Iterable[str]
) -> tuple[NodeEntry, ...]:
    """Entries that, of the nodes of `among` (ascending), mean `nodes` and none that is not `allowed`.

    In the order of the graph. Each of `globs` is taken where that holds of it; what is left is told by ranges.
    """
    found: list[tuple[int, NodeEntry]] = []
    left, inside = set(nodes), set(among)
    for glob in globs:
        if not left:
            break
        matched = inside.intersection(() if names.has(glob) else names.matched(glob))
        if not left.isdisjoint(matched) and all(node in allowed for node in matched):
            found.append((min(matched), glob))
            left -= matched
    place = {node: index for index, node in enumerate(among)}
    for start, stop in node_ranges(sorted(place[node] for node in left)):
        first, last = names.called(among[start]), names.called(among[stop - 1])
        found.append((among[start], first if start + 1 == stop else (first, last)))
    return tuple(entry for _, entry in sorted(found, key=lambda each: each[0]))


def layer_globs(names: NodeNames, nodes: Iterable[int]) -> Iterator[str]:
    """A glob for each layer: what names of its nodes begin with, up to the first folder with a number."""
    layers = dict.fromkeys(layer for node in nodes if (layer := _layer(names.names[node])))
    return (f"{_literal(layer)}*" for layer in layers)


def role_globs(names: NodeNames, nodes: Iterable[int]) -> Iterator[str]:
    """Globs for what nodes do in whichever layer: their names, with any number in place of those of folders."""
    folders_and_own = (names.names[node].rpartition("/") for node in nodes)
    roles = (
        re.sub(r"\d+", "*", _literal(folders)) + slash + _literal(own)
        for folders, slash, own in folders_and_own
        if re.search(r"\d", folders)
    )
    return islice(dict.fromkeys(roles), _MOST_GLOBS)


def _layer(name: str) -> str:
    """The name up to its first folder with a number; nothing where there is none."""
    folders = name.split("/")[:-1]
    count = next((index for index, folder in enumerate(folders, 1) if any(map(str.isdigit, folder))), 0)
    return "".join(f"{folder}/" for folder in folders[:count])


def _literal(text: str) -> str:
    """A glob that matches `text` alone."""
    return re.sub(r"[*?[]", r"[\g<0>]", text)
