"""The same problem on smaller micro-batches: the same nodes, and the graph and work of fewer
samples.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.schedule import StageGraph
from autopipe.passes.cost.measured import with_micro_batch_size
from autopipe.passes.cost.memory_check import micro_batches_in_flight
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.cost.stages import stage_costs
from tests.passes.cost.graphs import cluster, perceptron, problem


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_smaller_problem_is_that_of_a_graph_made_for_fewer_samples(size):
    whole = dataclasses.replace(
        problem(perceptron([16] * 4), cluster(2)), micro_batch_sizes=(1, 2, 4, 8)
    )
    small = with_micro_batch_size(whole, size)
    assert (small.micro_batch_size, small.micro_batches) == (size, 32 // size)
    assert small.micro_batch_sizes == tuple(each for each in (1, 2, 4, 8) if each <= size)
    assert [node.name for node in small.graph.nodes] == [node.name for node in whole.graph.nodes]
    assert {value.shape[0] for value in small.graph.inputs} == {size}
    assert small.work == roofline_costs(small.graph)
    for less, more in zip(small.work, whole.work, strict=True):
        assert less.forward_flops * 8 == pytest.approx(more.forward_flops * size)


def test_only_divisors_are_sizes():
    with pytest.raises(
        ConfigurationError, match="micro-batches of 3 samples do not divide the batch of 8 samples"
    ):
        with_micro_batch_size(problem(perceptron([16] * 4), cluster(2)), 3)


def placed(whole, sizes):
    bounds = [round(index * len(whole.graph.nodes) / len(sizes)) for index in range(len(sizes) + 1)]
    nodes = [tuple(range(low, high)) for low, high in itertools.pairwise(bounds)]
    stages = [
        Stage(own, (index,), size)
        for index, (own, size) in enumerate(zip(nodes, sizes, strict=True))
    ]
    return Placement(tuple(stages))


def test_stages_take_turns_where_their_micro_batches_are_smaller():
    whole = problem(perceptron([16] * 4), cluster(2))
    assert StageGraph.of(whole, placed(whole, (8, 8))).ratios == ()
    stages = StageGraph.of(whole, placed(whole, (2, 8)))
    assert stages.ratios == (4, 1)
    assert [stages.micro_batches_of(stage, 3) for stage in (0, 1)] == [range(12), range(3)]


def test_stages_of_sizes_that_do_not_divide_are_refused():
    whole = problem(perceptron([16] * 4), cluster(2))
    with pytest.raises(
        InfeasibleError,
        match="stage 1 has micro-batches of 3 samples, which do not divide the 8 samples",
    ):
        StageGraph.of(whole, placed(whole, (8, 3)))


def test_a_stage_costs_what_its_own_micro_batches_cost():
    whole = problem(perceptron([64] * 4), cluster(2))
    mixed = stage_costs(whole, placed(whole, (2, 8)))
    small = with_micro_batch_size(whole, 2)
    assert mixed[0] == stage_costs(small, placed(small, (2, 2)))[0]
    assert mixed[1] == stage_costs(whole, placed(whole, (8, 8)))[1]
    assert micro_batches_in_flight(whole, placed(whole, (2, 8))) == (8, 1), (
        "twice what the next one takes at once"
    )
