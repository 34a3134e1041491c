"""The placement of a plan as YAML: what is written is what is read, for any placement and any
names.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.api.plan_folder import placement_text
from autopipe.api.request import chosen_strategy
from autopipe.configs.zoo import MODELS
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.operators import sample_axes
from tests.configs.texts import parse_configuration
from tests.distributed.support.drawing import graphs, placements
from tests.distributed.support.zoo import small_graph
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


@given(st.sampled_from(sorted(MODELS)), st.lists(st.floats(0, 1), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_cuts_of_a_model_of_the_zoo_are_read_as_they_were_written(
    name: str, cuts: list[float]
) -> None:
    graph, _ = small_graph(name)
    count = len(graph.nodes)
    ends = sorted({0, count, *(int(cut * count) for cut in cuts)})
    given_problem = problem(graph, cluster(len(ends)))
    size = given_problem.micro_batch_size
    placement = Placement(
        tuple(
            Stage(tuple(range(first, last)), (index,), size)
            for index, (first, last) in enumerate(pairwise(ends))
        )
    )
    assert read(placement_text(graph, placement), given_problem) == placement


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
    layers: [0, 2]
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
    layers: [3, 5]
    splits: []
  name: explicit
"""


def test_layers_are_ranges(layered: tuple[Problem, Placement]) -> None:
    """A person can move a layer: the samples of its nodes are divided as those of its new stage."""
    of, placement = layered
    text = placement_text(of.graph, placement)
    assert text.partition("strategy:")[2] == LAYERED.partition("strategy:")[2]
    moved = text.replace("[0, 2]", "[0, 3]").replace("[3, 5]", "[4, 5]")
    stages = read(moved, of).stages
    assert [stage.nodes for stage in stages] == [tuple(range(8)), tuple(range(8, 12))]
    assert stages[0].splits_of(6) == stages[0].splits_of(4) != ()
    assert stages[1] == replace(placement.stages[1], nodes=tuple(range(8, 12)))


def written(*stages: str) -> str:
    """A placement with a stage per text, on the devices 0, 1, ..."""
    rows = "".join(f"  - {{devices: [{index}], {each}}}\n" for index, each in enumerate(stages))
    return f"strategy:\n  placement:\n{rows}  name: explicit\n"


GPT = "nodes: ['/token_embedding/*'], layers: [0, 0]"


def test_nodes_outside_of_layers_join_the_stages_that_they_read_from() -> None:
    """The embedding joins the stage that reads it, and the head the stage of the last layer."""
    graph, _ = small_graph("gpt")
    of = problem(graph, cluster(2))
    first, second = read(written("layers: [0, 0]", "layers: 'layer[1:]'"), of).stages
    names = [graph.nodes[node].name for node in first.nodes]
    assert any("embedding" in name for name in names)
    assert sorted(first.nodes + second.nodes) == list(range(len(graph.nodes)))
    loss = len(graph.nodes) - 1
    assert loss in second.nodes
    assert read(written(GPT, "layers: [1, 1]"), of).stages[0] == first


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (("layers: [0, 1]", "layers: [1, 1]"), "layer 1 is in stages 0 and 1, expected one stage"),
        (("layers: [0, 1]", "nodes: ['/layers.1/*']"), "the node is in stages 0 and 1"),
        (("layers: [0, 0]",), "layer 1 is in no stage"),
        (("layers: [0, 0], nodes: ['/layers.1/Add']",), "the node is in no stage, and "),
        (("layers: [0, 2]",), "stage 0: layers [0, 2] selects layer 2, but the model has 2 layers"),
        (("layers: 'tower[0:1]'",), "stage 0: 'tower[0:1]' names no layers of the model"),
        (("layers: {}",), "strategy.placement[0].layers"),
        (("layers: [0, x]",), "strategy.placement[0].layers[1] is 'x'"),
        (("layers: []",), "layers [] selects no layer"),
        (("layers: [-1, 0]",), "strategy.placement[0].layers[0] is -1"),
        (("layers: [0, 1]", "layers: null"), "stage 1 has no nodes"),
        (("layers: [1, 1]", "layers: [0, 0]"), "but it reads a value of"),
    ],
)
def test_wrong_layers_are_told(stages: tuple[str, ...], message: str) -> None:
    graph, _ = small_graph("gpt")
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        read(written(*stages), problem(graph, cluster(4)))
