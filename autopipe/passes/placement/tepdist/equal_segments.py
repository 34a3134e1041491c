"""Segments that are equal are one: their pairs of strategies are solved once for all of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopipe.passes.placement.tepdist.pairs import Pairs
from autopipe.passes.placement.tepdist.segments import Segment, SegmentedModel
from autopipe.passes.solvers.min_sum import Edge, MinSum


@dataclass(eq=False, slots=True)
class EqualSegments:
    """Segments by what they are made of; equal layers have the same arrays."""

    known: dict[Hashable, Pairs] = field(default_factory=dict)
    """By where their arrays lie, all of which they hold."""

    def pairs(self, model: MinSum, cut: SegmentedModel) -> list[Pairs]:
        """Pairs of each segment of a merged model, whose wide variables have no edges."""
        around: list[list[Edge]] = [[] for _ in model.costs]
        for edge in model.edges:
            around[edge.source].append(edge)
            around[edge.target].append(edge)
        return [self._pairs(model, around, segment, cut) for segment in cut.segments]

    def _pairs(self, model: MinSum, around: Sequence[Sequence[Edge]], segment: Segment, cut: SegmentedModel) -> Pairs:
        ends = [cut.critical[place] for place in segment.ends]
        own = [model.costs[variable] for variable in segment.inner]
        free = [len(model.costs[end]) for end in ends]
        edges = _edges(around, (*segment.inner, *ends), len(own))
        key = (*map(id, own), *free, *((edge.source, edge.target, id(edge.costs)) for edge in edges))
        if key not in self.known:
            made = MinSum((*own, *map(np.zeros, free)), tuple(map(_forward, edges)))
            self.known[key] = Pairs.of(made, len(own))
        return self.known[key]


def _edges(around: Sequence[Sequence[Edge]], variables: Sequence[int], inner: int) -> list[Edge]:
    """The edges of a segment's inner variables, the first `inner` ones; without any the one between its two ends."""
    place = {variable: number for number, variable in enumerate(variables)}
    found = {
        (place[edge.source], place[edge.target]): edge
        for variable in variables[: inner or 1]
        for edge in around[variable]
        if edge.source in place and edge.target in place
    }
    return [Edge(*ends, edge.costs) for ends, edge in sorted(found.items(), key=lambda item: item[0])]


def _forward(edge: Edge) -> Edge:
    """The same from the lower to the higher place."""
    return edge if edge.source < edge.target else Edge(edge.target, edge.source, edge.costs.T)
