"""The stages that an operator can be in at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.passes.placement.tepdist.division.flow import Floats, Flow, Places, ancestors

_ROUNDING = 1e-9
_ROWS = 1024
"""Of a table of bits, unpacked at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """The first and the last stage of each operator; both never fall along an edge."""

    first: Places
    last: Places

    @property
    def open(self) -> int:
        """How many questions "is it in a later stage than this?" they leave."""
        return int((self.last - self.first).sum())

    def of_groups(self, group: Places) -> Windows:
        """Intersection of the windows of all operators of a group."""
        count = int(group.max(initial=-1)) + 1
        first, last = np.zeros(count, dtype=np.int64), np.full(count, np.iinfo(np.int64).max)
        np.maximum.at(first, group, self.first)
        np.minimum.at(last, group, self.last)
        return Windows(first, last)

    def near(self, stage: Places, steps: int) -> Windows:
        """Windows no further than `steps` stages from `stage`."""
        return Windows(np.maximum(self.first, stage - steps), np.minimum(self.last, stage + steps))

    def under(self, flow: Flow, stages: int, limit: float) -> Windows:
        """Windows that are left where no stage takes more work than `limit`.

        All predecessors of an operator are in no later stage, all its successors in no earlier one: as soon as possible
        and as late as possible are by work, not by number of operators. They may be empty.
        """
        before, after = depending(flow)
        soonest = np.ceil(before / limit * (1 - _ROUNDING)).astype(np.int64) - 1
        latest = stages - np.ceil(after / limit * (1 - _ROUNDING)).astype(np.int64)
        return Windows(np.maximum(self.first, soonest), np.minimum(self.last, latest))


def windows_of(graph: Graph, flow: Flow, nodes: Places, stages: int, settled: Mapping[int, int]) -> Windows:
    """Windows under which `settled` nodes are in the stages that are asked for, and every edge leads to no earlier
    stage. Raises ConfigurationError, naming two nodes, where there are none.
    """
    own = np.array([settled.get(node, -1) for node in nodes.tolist()], dtype=np.int64)
    first, last = np.maximum(own, 0), np.where(own < 0, stages - 1, own)
    cause = np.arange(flow.operators)
    _, sources, readers = flow.edges()
    order = np.argsort(readers, kind="stable")
    for source, reader in zip(sources[order].tolist(), readers[order].tolist(), strict=True):
        if first[source] > first[reader]:
            first[reader], cause[reader] = first[source], cause[source]
        if 0 <= own[reader] < first[reader]:
            late, early = (repr(graph.nodes[int(nodes[place])].name) for place in (reader, cause[reader]))
            raise ConfigurationError(
                f"constraints put {late} into stage {own[reader]}, but it depends on {early} in stage {first[reader]}",
                hint="a stage may read from earlier stages only",
                where="constraints",
            )
    order = np.argsort(-sources, kind="stable")
    for source, reader in zip(sources[order].tolist(), readers[order].tolist(), strict=True):
        last[source] = min(last[source], last[reader])
    return Windows(first, last)


def depending(flow: Flow) -> tuple[Floats, Floats]:
    """The work of each operator with all it depends on, and with all that depends on it."""
    before = ancestors(flow)
    upstream, downstream = np.empty(flow.operators), np.zeros(flow.operators)
    for start in range(0, flow.operators, _ROWS):
        rows = np.unpackbits(before[start : start + _ROWS], axis=1, count=flow.operators)
        upstream[start : start + _ROWS] = rows @ flow.work
        downstream += flow.work[start : start + _ROWS] @ rows
    return upstream, downstream
