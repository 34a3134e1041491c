"""From stretches of the line to stages on devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.ir.cluster import Cluster
from autopipe.ir.placement import Stage
from autopipe.passes.analysis.chain import Chain
from autopipe.passes.analysis.operators import SampleAxes
from autopipe.passes.cost.memory_check import equal_device_runs
from autopipe.passes.placement.graphpipe.ways import StageOption


@dataclass(frozen=True, slots=True)
class DraftStage:
    """A stage that has no devices yet: blocks `start` to `stop - 1` of a line on `degree` devices."""

    start: int
    stop: int
    run: int
    """The run of the cluster's devices that it is to have its own from."""
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
    def of(way: StageOption, start: int, stop: int, in_flight: int) -> DraftStage:
        """A stretch run in some way."""
        at = (start, stop)
        memory = way.always[at] + in_flight * way.kept[at]
        return DraftStage(
            start,
            stop,
            way.run,
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
    chain: Chain, samples: SampleAxes, cluster: Cluster, drafts: Sequence[DraftStage], size: int
) -> tuple[Stage, ...]:
    """Stages in the line's order, on micro-batches of `size` samples."""
    stages = []
    for draft, devices in zip(drafts, groups(equal_device_runs(cluster), drafts), strict=True):
        nodes = chain.nodes(draft.start, draft.stop)
        stages.append(Stage(nodes, devices, size, samples.splits(nodes, draft.degree), draft.recompute))
    return tuple(stages)


def groups(runs: Sequence[range], drafts: Sequence[DraftStage]) -> list[tuple[int, ...]]:
    """Neighbouring devices of its run for each stage, larger groups first: where degrees and nodes are powers of two,
    no group that would fit into a node then lies in two. Among equal ones neighbours in the line are neighbours."""
    order = sorted(range(len(drafts)), key=lambda stage: -drafts[stage].degree)
    found: list[tuple[int, ...]] = [()] * len(drafts)
    firsts = [run.start for run in runs]
    for stage in order:
        run, degree = drafts[stage].run, drafts[stage].degree
        found[stage] = tuple(range(firsts[run], firsts[run] + degree))
        firsts[run] += degree
    assert all(first <= run.stop for first, run in zip(firsts, runs, strict=True)), "more devices than there are"
    return found
