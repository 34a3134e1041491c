"""A graph with what splits are read from: iteration spaces, readers, and which values are weights."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.ir.graph import Graph
from autopipe.ir.layout import is_block
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.space import AxisKind
from autopipe.passes.analysis.operators import OpInstance


@dataclass(frozen=True, slots=True)
class Network:
    """A graph, and what is asked of it again and again.

    `weights` says, of each value that depends on parameters and constants alone, on which parameters. `readers` are the
    nodes that read each value.
    """

    graph: Graph
    uses: tuple[OpInstance, ...]
    weights: dict[str, frozenset[str]]
    readers: dict[str, tuple[int, ...]]

    def is_weight(self, node: int) -> bool:
        """True if a node computes from parameters and constants alone."""
        return self.graph.nodes[node].outputs[0] in self.weights

    def parameters_of(self, node: int) -> frozenset[str]:
        """The parameters that a node reads, itself or through nodes that read nothing else."""
        names = (name for name in self.graph.nodes[node].inputs if name)
        return frozenset().union(*(self.weights.get(name, frozenset()) for name in names))

    def feeders(self, node: int) -> set[int]:
        """The nodes that compute a node's weights from parameters and constants."""
        found: set[int] = set()
        waiting = [node]
        while waiting:
            for name in self.graph.nodes[waiting.pop()].inputs:
                producer = self.graph.producer(name) if name in self.weights else None
                if producer is not None and producer not in found:
                    found.add(producer)
                    waiting.append(producer)
        return found

    def splits_on(self, node: int, axis: str, degree: int) -> bool:
        """True if a node can be cut along an axis into `degree` equal blocks."""
        space = self.uses[node].space
        return space.axis(axis).kind is not AxisKind.WHOLE and is_block(space, axis, degree)


@remembered(GRAPHS)
def weights_of(graph: Graph) -> dict[str, frozenset[str]]:
    """Each value that depends on parameters and constants alone, with its parameters."""
    weights = {each.value.name: frozenset([each.value.name]) for each in graph.parameters}
    weights |= {each.value.name: frozenset() for each in graph.constants}
    for node in graph.nodes:
        names = [name for name in node.inputs if name]
        if names and all(name in weights for name in names):
            found = frozenset().union(*(weights[name] for name in names))
            weights |= {name: found for name in node.outputs if name}
    return weights
