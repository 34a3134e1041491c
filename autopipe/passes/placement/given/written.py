"""A placement written down, so that a person can read and edit it."""

from __future__ import annotations

from collections import Counter

from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.passes.analysis.operators import SampleAxes, sample_axes
from autopipe.passes.placement.given.entries import entries_of, layer_globs, role_globs
from autopipe.passes.placement.given.nodes import NodeNames
from autopipe.passes.placement.given.stages import SAMPLES, GivenSplits, GivenStage, written_devices
from autopipe.passes.placement.given.strategy import Given, split_of

_Degrees = tuple[tuple[str, int], ...]


def written(graph: Graph, placement: Placement) -> Given:
    """The strategy that gives exactly this placement of `graph`, in as few words as that takes."""
    names, samples = NodeNames(graph), sample_axes(graph)
    return Given(tuple(_stage(names, samples, stage) for stage in placement.stages))


def _stage(names: NodeNames, samples: SampleAxes, stage: Stage) -> GivenStage:
    everywhere = range(len(names.names))
    return GivenStage(
        devices=written_devices(stage.devices),
        nodes=entries_of(names, stage.nodes, everywhere, set(stage.nodes), layer_globs(names, stage.nodes)),
        micro_batch_size=stage.micro_batch_size,
        recompute=stage.recompute,
        pipeline=stage.pipeline,
        splits=_splits(names, samples, stage),
    )


def _splits(names: NodeNames, samples: SampleAxes, stage: Stage) -> tuple[GivenSplits, ...]:
    """Splits as entries: first the most frequent one, for all nodes; then the others, equal ones together."""
    wanted = {node: degrees_of(samples, node, stage.splits_of(node)) for node in stage.nodes}
    counted = Counter(degrees for degrees in wanted.values() if degrees)
    if not counted:
        return ()
    usual, count = counted.most_common(1)[0]
    found = []
    if 2 * count > counted.total() and not names.has("*"):
        found.append(GivenSplits(usual, ("*",)))
        served = _served(samples, stage, usual)
        left = [node for node in stage.nodes if node not in served]
    else:
        left = [node for node in stage.nodes if wanted[node]]
    for degrees in dict.fromkeys(wanted[node] for node in left):
        alike = [node for node in left if wanted[node] == degrees]
        allowed = _served(samples, stage, degrees)
        entries = entries_of(names, alike, stage.nodes, allowed, role_globs(names, alike))
        found.append(GivenSplits(degrees, entries))
    return tuple(found)


def degrees_of(samples: SampleAxes, node: int, splits: tuple[Split, ...]) -> _Degrees:
    """A node's splits as degrees by axis, its sample axis called `samples`."""
    own = samples.axes[node]
    return tuple((SAMPLES if split.axis == own else split.axis, split.degree) for split in splits)


def _served(samples: SampleAxes, stage: Stage, degrees: _Degrees) -> frozenset[int]:
    """The nodes of a stage that `degrees` split as they are to be split."""
    return frozenset(
        node
        for node in stage.nodes
        if tuple(Split(*each) for each in split_of(samples, node, degrees)) == stage.splits_of(node)
    )
