"""Random plans of small models."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from autopipe.ir.cluster import Cluster
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Mode, Optimizer, Problem
from autopipe.ir.space import AxisKind
from autopipe.passes.analysis.operators import sample_axes
from tests.passes.cost.graphs import HOST_LAUNCHES, cluster, hosted, perceptron, problem


def two_kinds(devices: int) -> Cluster:
    """A cluster whose second half is slower in products than in all else."""
    found = cluster(devices)
    slow = replace(
        found.devices[0], name="slow", peak_flops=(("fp32", found.devices[0].peak("fp32") / 3),)
    )
    return replace(
        found,
        devices=tuple(
            slow if 2 * index >= devices else fast for index, fast in enumerate(found.devices)
        ),
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[Problem, Placement, str]:
    """Layers cut into stages anywhere, on groups of any size, each node split along any axis or
    none.
    """
    graph = perceptron([16, *draw(st.lists(st.sampled_from([4, 16, 64]), min_size=1, max_size=4))])
    bounds = sorted({0, *draw(st.sets(st.integers(1, len(graph.nodes) - 1), max_size=3))})
    samples = sample_axes(graph)
    stages = []
    first = 0
    for low, high in zip(bounds, [*bounds[1:], len(graph.nodes)], strict=True):
        group = draw(st.sampled_from([1, 2, 4]))
        splits = []
        for node in range(low, high):
            axes = [
                each
                for each in samples.uses[node].space.axes
                if each.kind is not AxisKind.UNSPLITTABLE
            ]
            degree = draw(st.sampled_from([each for each in (1, 2, 4) if each <= group]))
            axis = draw(st.sampled_from([each for each in axes if each.size % degree == 0]))
            splits += [(node, (Split(axis.name, degree),))] if degree > 1 else []
        stages.append(
            Stage(
                tuple(range(low, high)),
                tuple(range(first, first + group)),
                8,
                tuple(splits),
                draw(st.booleans()),
            )
        )
        first += group
    spare = draw(st.integers(0, 1))
    made = hosted(
        draw(st.sampled_from([cluster, two_kinds]))(first + spare),
        draw(st.sampled_from(HOST_LAUNCHES)),
    )
    mode = draw(st.sampled_from(Mode))
    given = problem(graph, made, mode=mode, optimizer=Optimizer("adamw", shard=draw(st.booleans())))
    schedule = draw(
        st.sampled_from(["1f1b", "gpipe", "zb_h1"] if mode is Mode.TRAIN else ["gpipe"])
    )
    return given, Placement(tuple(stages)), schedule
