"""Nodes of a graph by what a person calls them: indices, names, globs and ranges."""

from __future__ import annotations

import difflib
import fnmatch
import re
from bisect import bisect_left, bisect_right

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph

NodeName = int | str
"""A node's index in the graph, its name, or a glob over names."""

NodeEntry = NodeName | tuple[NodeName, NodeName]
"""A name, or the first and the last of nodes that follow one another in the graph."""

_LAST = chr(0x10FFFF)
_SPECIAL = re.compile(r"[*?[]")


class NodeNames:
    """The names of a graph's nodes, of which some may be alike, empty, or look like globs."""

    def __init__(self, graph: Graph) -> None:
        self.names = tuple(node.name for node in graph.nodes)
        self._positions: dict[str, list[int]] = {}
        for index, name in enumerate(self.names):
            self._positions.setdefault(name, []).append(index)
        spelled = [(name, index) for index, name in enumerate(self.names)]
        # Exporters put a slash first, which a glob may leave out.
        spelled += [(name[1:], index) for name, index in spelled if name.startswith("/")]
        self._sorted = sorted(spelled)
        self._globs: dict[str, tuple[int, ...]] = {}

    def meant(self, entry: NodeEntry) -> tuple[int, ...]:
        """The nodes that an entry means, ascending, at least one; a name that a node has is no glob.

        Raises ConfigurationError for an index or a name that there is not, with the nearest name, and for a range
        whose ends are several nodes each or the wrong way round.
        """
        if isinstance(entry, tuple):
            first, last = (self._one(end) for end in entry)
            if first > last:
                raise ConfigurationError(f"the range from {entry[0]!r} to {entry[1]!r} ends before it begins")
            return tuple(range(first, last + 1))
        if isinstance(entry, int):
            if not 0 <= entry < len(self.names):
                raise ConfigurationError(f"there is no node {entry}", f"nodes are 0 to {len(self.names) - 1}")
            return (entry,)
        if entry in self._positions:
            return tuple(self._positions[entry])
        matched = self.matched(entry)
        if not matched:
            near = difflib.get_close_matches(entry, self._positions, n=1, cutoff=0.0)
            raise ConfigurationError(
                f"no node's name matches {entry!r}", f"the nearest name is {near[0]!r}" if near else ""
            )
        return matched

    def matched(self, glob: str) -> tuple[int, ...]:
        """The nodes whose names match a glob, ascending."""
        if glob not in self._globs:
            prefix = _SPECIAL.split(glob, maxsplit=1)[0]
            low, high = bisect_left(self._sorted, (prefix,)), bisect_right(self._sorted, (prefix + _LAST,))
            matches = re.compile(fnmatch.translate(glob)).fullmatch
            found = {index for name, index in self._sorted[low:high] if matches(name)}
            self._globs[glob] = tuple(sorted(found))
        return self._globs[glob]

    def called(self, node: int) -> NodeName:
        """The node's name where no other node has it, else its index."""
        name = self.names[node]
        return name if len(self._positions[name]) == 1 else node

    def has(self, name: str) -> bool:
        """True if a node has this name."""
        return name in self._positions

    def _one(self, end: NodeName) -> int:
        found = self.meant(end)
        if len(found) > 1:
            numbers = ", ".join(map(str, found[:4])) + (", ..." if len(found) > 4 else "")
            raise ConfigurationError(
                f"{end!r} is {len(found)} nodes, and a range ends at one", f"write its number: {numbers}"
            )
        return found[0]
