"""What stages cost where equal ones share an answer, against each by itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.placement import Placement
from autopipe.ir.problem import Optimizer, Problem
from autopipe.passes.cost.measured import with_micro_batch_size
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.cost.stages import StageCost, stage_costs
from autopipe.passes.placement.grid import Degrees, place_grid
from tests.distributed.support.zoo import small_graph
from tests.passes.cost.graphs import cluster, perceptron, problem


def each_for_itself(given: Problem, placement: Placement) -> tuple[StageCost, ...]:
    numbers: Iterator[int] = itertools.count()
    with mock.patch(
        "autopipe.passes.cost.stages.stage_cost_key", lambda work, crossing: next(numbers)
    ):
        return stage_costs(given, placement)


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from((8, 16)), min_size=5, max_size=10),
    st.sampled_from((Degrees(2, 2, 2), Degrees(4, 1, 2), Degrees(4, 2, 1), Degrees(4, 1, 1))),
    st.sampled_from((1, 2)),
    st.booleans(),
    st.booleans(),
)
def test_equal_stages_cost_the_same(
    widths: list[int], degrees: Degrees, chunks: int, recompute: bool, train: bool
) -> None:
    graph = perceptron(widths)
    own = problem(
        graph, cluster(degrees.pipeline * degrees.group_size), optimizer=Optimizer("adamw")
    )
    own = replace(own, mode=own.mode if train else type(own.mode).INFER)
    placement = place_grid(with_micro_batch_size(own, 8), degrees, chunks, style="loop")
    stages = tuple(
        replace(each, recompute=recompute and place % 2 == 0)
        for place, each in enumerate(placement.stages)
    )
    assert stage_costs(own, Placement(stages)) == each_for_itself(own, Placement(stages))


@pytest.mark.parametrize("name", ["gpt", "mt5", "llama", "moe"])
def test_layers_of_models_cost_the_same(name: str) -> None:
    graph, loss = small_graph(name, 4)
    own = replace(
        problem(perceptron([8, 8]), cluster(4)),
        graph=graph,
        work=roofline_costs(graph),
        loss=loss,
        batch_size=16,
    )
    placement = place_grid(with_micro_batch_size(own, 4), Degrees(2, 1, 2), 2, style="loop")
    assert stage_costs(own, placement) == each_for_itself(own, placement)


def test_layers_are_costed_once() -> None:
    own = problem(perceptron([16] * 9), cluster(8))
    placement = place_grid(with_micro_batch_size(own, 8), Degrees(8, 1, 1), 1, style="loop")
    with mock.patch(
        "autopipe.passes.cost.stages.stage_collective_seconds", return_value=(0.0, 0.0)
    ) as asked:
        stage_costs(own, placement)
    assert asked.call_count == 3, (
        "the first, which receives nothing, the last, which sends nothing, and all between"
    )
