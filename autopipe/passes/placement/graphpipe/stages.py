"""From stretches of the line to stages on devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.ir.cluster import Cluster
from autopipe.ir.placement import Stage
from autopipe.passes.cost.chain import Chain
from autopipe.passes.cost.splits import SampleAxes
from autopipe.passes.placement.graphpipe.ways import Way


@dataclass(frozen=True, slots=True)
class Draft:
    """A stage that has no devices yet: blocks `start` to `stop - 1` of a line on `degree` devices."""

    start: int
    stop: int
    degree: int
    recompute: bool
    forward: float
    """Seconds of a micro-batch, like all that follows by the search's own prices."""
    backward: float
    arriving: float
    returning: float
    end: float
    """Seconds of the step's end."""
    memory: float
    """Bytes on a device."""
    in_flight: int

    @staticmethod
    def of(way: Way, start: int, stop: int, in_flight: int) -> Draft:
        """A stretch run in some way."""
        at = (start, stop)
        memory = way.always[at] + in_flight * way.kept[at]
        return Draft(
            start,
            stop,
            way.degree,
            way.recompute,
            forward=float(way.forward[at]),
            backward=float(way.backward[at]),
            arriving=float(way.arriving[at]),
            returning=float(way.returning[at]),
            end=float(way.end[at]),
            memory=float(memory),
            in_flight=in_flight,
        )


def stages_of(
    chain: Chain, samples: SampleAxes, cluster: Cluster, drafts: Sequence[Draft], size: int
) -> tuple[Stage, ...]:
    """Stages in the line's order, on micro-batches of `size` samples."""
    stages = []
    for draft, devices in zip(drafts, groups(cluster, [draft.degree for draft in drafts]), strict=True):
        nodes = chain.nodes(draft.start, draft.stop)
        stages.append(Stage(nodes, devices, size, samples.splits(nodes, draft.degree), draft.recompute))
    return tuple(stages)


def groups(cluster: Cluster, degrees: Sequence[int]) -> list[tuple[int, ...]]:
    """Neighbouring devices for each stage, larger groups first: where degrees and nodes are powers of two, no group
    that would fit into a node then lies in two. Among equal ones neighbours in the line are neighbours."""
    order = sorted(range(len(degrees)), key=lambda stage: -degrees[stage])
    found: list[tuple[int, ...]] = [()] * len(degrees)
    first = 0
    for stage in order:
        found[stage] = tuple(range(first, first + degrees[stage]))
        first += degrees[stage]
    assert first <= cluster.size, "stages have more devices than there are"
    return found
