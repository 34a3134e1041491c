"""The placement of a plan as YAML: what is written is what is read, for any placement and any
names.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.api.plan_folder import placement_text
from autopipe.api.request import chosen_strategy
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.operators import sample_axes
from tests.configs.texts import parse_configuration
from tests.distributed.support.drawing import graphs, placements
from tests.passes.cost.graphs import cluster, perceptron, problem

NAMES = st.one_of(
    st.sampled_from(["", "same", "*", "/layers.0/up", "/layers.1/up", "a: b", "12", "~"]), st.text()
)


def read(text: str, of: Problem) -> Placement:
    """The placement that a text gives."""
    strategy = chosen_strategy(parse_configuration(text, "placement.yaml"))
    assert strategy is not None
    strategy.requires(of)
    return strategy.run(of)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Graph, Placement]:
    """A random placement of a random graph whose names may be alike, or anything."""
    graph, _ = draw(graphs(train=True))
    placement = draw(placements(graph))
    if draw(st.booleans()):
        graph = replace(graph, nodes=tuple(replace(node, name=draw(NAMES)) for node in graph.nodes))
    return graph, placement


@given(cases())
@settings(max_examples=40, deadline=None)
def test_a_placement_is_read_as_it_was_written(case: tuple[Graph, Placement]) -> None:
    graph, placement = case
    given_problem = problem(graph, cluster(4))
    # Which values are gathered is decided anew for a placement that is read.
    stages = tuple(replace(stage, gathers=()) for stage in placement.stages)
    assert read(placement_text(graph, placement), given_problem) == replace(
        placement, stages=stages
    )


@pytest.fixture
def layered() -> tuple[Problem, Placement]:
    """Six layers on two stages: replicas, of which one layer's are shared otherwise, and own
    micro-batches.
    """
    graph = perceptron([16] * 7)
    nodes = (
        replace(node, name=f"/layers.{index // 2}/{node.op}")
        for index, node in enumerate(graph.nodes)
    )
    graph = replace(graph, nodes=tuple(nodes))
    samples = sample_axes(graph)
    first = {node: (Split(samples.axes[node] or "", 2),) for node in range(6)} | {
        2: (Split("n", 2),)
    }
    stages = (
        Stage(tuple(range(6)), (3, 1), 8, tuple(sorted(first.items()))),
        Stage(tuple(range(6, 12)), (0,), 4, recompute=True),
    )
    return problem(graph, cluster(4)), Placement(stages)


LAYERED = """\
strategy:
  placement:
  - devices: [3, 1]
    micro_batch_size: 8
    recompute: false
    nodes:
    - /layers.0/*
    - /layers.1/*
    - /layers.2/*
    splits:
    - split: {samples: 2}
      nodes:
      - '*'
    - split: {n: 2}
      nodes:
      - /layers.1/MatMul
  - devices: [0]
    micro_batch_size: 4
    recompute: true
    nodes:
    - /layers.3/*
    - /layers.4/*
    - /layers.5/*
    splits: []
  name: explicit
"""


def test_a_layer_is_a_line(layered: tuple[Problem, Placement]) -> None:
    """A person can move it: the samples of its nodes are shared as those of its new stage are."""
    of, placement = layered
    text = placement_text(of.graph, placement)
    assert text.partition("strategy:")[2] == LAYERED.partition("strategy:")[2]
    moved = text.replace("    - /layers.3/*\n", "").replace(
        "    - /layers.2/*\n", "    - /layers.2/*\n    - /layers.3/*\n"
    )
    stages = read(moved, of).stages
    assert [stage.nodes for stage in stages] == [tuple(range(8)), tuple(range(8, 12))]
    assert stages[0].splits_of(6) == stages[0].splits_of(4) != ()
    assert stages[1] == replace(placement.stages[1], nodes=tuple(range(8, 12)))
