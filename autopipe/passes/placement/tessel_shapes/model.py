"""What the shapes are read from: the problem's graph with its uses, its line of blocks and the seconds of each node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.graph import Graph
from autopipe.ir.layout import is_block
from autopipe.ir.problem import Problem
from autopipe.ir.space import AxisKind
from autopipe.passes.cost.chain import Chain, make_chain
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.uses import Use, uses_of

_MOST_BLOCKS = 768
"""Places to cut that are considered: time grows with their square."""


@dataclass(frozen=True, slots=True)
class CostedModel:
    """A problem with what is asked of it again and again.

    `seconds` are those of forward and backward of each whole node on device 0. `weights` says, of each value that
    depends on parameters and constants alone, on which parameters. `readers` are the nodes that read each value. `room`
    is how many bytes of parameters a stage of a chain may have on each device.
    """

    problem: Problem
    uses: tuple[Use, ...]
    seconds: NDArray[np.float64]
    weights: dict[str, frozenset[str]]
    readers: dict[str, tuple[int, ...]]
    room: tuple[float, ...]

    @property
    def graph(self) -> Graph:
        """The problem's graph."""
        return self.problem.graph

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.problem.cluster.size

    @property
    def share(self) -> float:
        """Half a device's equal share of all: what has less is small."""
        return 0.5 / self.devices

    def weighs(self, nodes: Iterable[int]) -> float:
        """Seconds of nodes."""
        return float(self.seconds[list(nodes)].sum())

    def is_weight(self, node: int) -> bool:
        """Whether a node computes from parameters and constants alone."""
        return self.graph.nodes[node].outputs[0] in self.weights

    def parameters_of(self, node: int) -> frozenset[str]:
        """The parameters that a node reads, itself or through nodes that read nothing else."""
        names = (name for name in self.graph.nodes[node].inputs if name)
        return frozenset().union(*(self.weights.get(name, frozenset()) for name in names))

    def line(self, together: Iterable[Iterable[int]] = ()) -> Chain:
        """The nodes as a line of blocks, each of the sets of `together` in one."""
        return make_chain(self.graph, self.seconds, _MOST_BLOCKS, tuple(map(tuple, together)))

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
        """Whether a node can be cut along an axis into `degree` equal blocks."""
        space = self.uses[node].space
        return space.axis(axis).kind is not AxisKind.WHOLE and is_block(space, axis, degree)


def costed_model(problem: Problem) -> CostedModel:
    """The model of a problem."""
    graph = problem.graph
    forward, backward = node_seconds(problem.work, problem.cluster.devices[0], problem.precision)
    weights = {each.value.name: frozenset([each.value.name]) for each in graph.parameters}
    weights |= {each.value.name: frozenset() for each in graph.constants}
    for node in graph.nodes:
        names = [name for name in node.inputs if name]
        if names and all(name in weights for name in names):
            found = frozenset().union(*(weights[name] for name in names))
            weights |= {name: found for name in node.outputs if name}
    seconds = forward + (backward if problem.train else 0.0)
    room = (np.inf,) * problem.cluster.size
    return CostedModel(problem, uses_of(graph), seconds, weights, graph.consumers(), room)
