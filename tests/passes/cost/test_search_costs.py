"""PipeDream and GraphPipe compare stages by tables with the costs of all ranges of blocks. An entry
of a table is equal to the cost of the stage in a placement. The memory of stages that recompute and
of inference is only an estimate: the tables contain neither segments nor freed tensors.

`tests/passes/placement/piper/test_strategy.py` compares Piper with costs of placements.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Mode, Optimizer, Problem
from autopipe.passes.analysis.chain import Chain
from autopipe.passes.cost.memory import fitting_micro_batches
from autopipe.passes.cost.range_tables import RangeTables, make_range_tables
from autopipe.passes.cost.stage_work import gradient_reduction_cost
from autopipe.passes.cost.stages import StageCost, stage_costs
from autopipe.passes.placement.graphpipe.stage_costs import NodeSeconds, option_table
from tests.passes.cost.graphs import cluster, perceptron, problem

IN_FLIGHT = 3

problems = st.builds(
    lambda widths, micro_batches, mode, optimizer: replace(
        problem(perceptron(widths), cluster(6), micro_batches, mode=mode),
        optimizer=optimizer,
        recompute="auto",
    ),
    st.lists(st.sampled_from([8, 64, 512]), min_size=3, max_size=5),
    st.integers(1, 4),
    st.sampled_from([Mode.TRAIN, Mode.INFER]),
    st.sampled_from([Optimizer(), Optimizer("adamw", shard=True)]),
)
degrees = st.sampled_from([1, 2, 4])


def tables_of(whole: Problem) -> RangeTables:
    """Return the tables of a chain with one node per block."""
    count = len(whole.graph.nodes)
    return make_range_tables(whole, Chain.of(range(count), range(count + 1)))


def placed(tables: RangeTables, first: int, stop: int, degree: int, recompute: bool) -> StageCost:
    """Return the cost of nodes `first` to `stop - 1` on `degree` devices, between a stage with the
    nodes before them and a stage with the nodes after them.
    """
    whole = tables.problem
    size = whole.micro_batch_size
    nodes = tuple(range(first, stop))
    stage = Stage(
        nodes,
        tuple(range(1, 1 + degree)),
        size,
        tables.samples.splits(nodes, degree),
        recompute and whole.train,
    )
    before = Stage(tuple(range(first)), (0,), size)
    after = Stage(tuple(range(stop, len(whole.graph.nodes))), (5,), size)
    stages = tuple(each for each in (before, stage, after) if each.nodes)
    return stage_costs(whole, Placement(stages))[stages.index(stage)]


@st.composite
def ranges(draw: st.DrawFn, whole: Problem) -> tuple[int, int]:
    stop = draw(st.integers(1, len(whole.graph.nodes)))
    return draw(st.integers(0, stop - 1)), stop


@settings(deadline=None, max_examples=40)
@given(st.data(), problems, degrees, st.booleans())
def test_range_tables_equal_the_costs_of_a_stage(
    data: st.DataObject, whole: Problem, degree: int, recompute: bool
) -> None:
    tables = tables_of(whole)
    at = data.draw(ranges(whole))
    cost = placed(tables, *at, degree, recompute)
    device = whole.cluster.devices[0]
    forward, backward = (each[at] for each in tables.seconds(degree, device))
    assert cost.forward_s == pytest.approx(forward)
    reduce = gradient_reduction_cost(whole, range(1, 1 + degree))
    end_s = tables.step_end_seconds(degree, device, reduce)[at]
    if whole.train:
        again = forward if recompute else 0.0
        added = tables.accumulate_seconds(device, whole.micro_batches)[at]
        assert cost.backward_s == pytest.approx(backward + again + added)
        assert cost.gradient_s + cost.update_s == pytest.approx(end_s)
    if whole.train and not recompute:
        constant, each = (part[at] for part in tables.memory(degree, recompute))
        assert constant + IN_FLIGHT * each == cost.memory_bytes(IN_FLIGHT)


@settings(deadline=None, max_examples=40)
@given(st.data(), problems, degrees, st.booleans())
def test_graphpipes_options_equal_the_range_tables(
    data: st.DataObject, whole: Problem, degree: int, recompute: bool
) -> None:
    tables = tables_of(whole)
    at = data.draw(ranges(whole))
    table = option_table(
        tables, NodeSeconds(whole, tables.samples), whole.micro_batch_size, (degree,)
    )
    (option,) = (each for each in table.options if each.recompute == (recompute and whole.train))
    cost = placed(tables, *at, degree, recompute)
    assert option.forward[at] == pytest.approx(cost.forward_s)
    assert option.backward[at] == pytest.approx(cost.backward_s)
    if whole.train:
        assert option.end[at] == pytest.approx(cost.gradient_s + cost.update_s)
    constant, each = tables.memory(degree, recompute)
    assert option.always[at] == pytest.approx(constant[at])
    assert option.kept[at] == pytest.approx(each[at])


def test_fitting_micro_batches() -> None:
    free_bytes = np.array([-1.0, 0.0, 10.0, 10.0, 10.0])
    bytes_each = np.array([0.0, 4.0, 4.0, 0.0, 1.0])
    assert fitting_micro_batches(free_bytes, bytes_each, 5).tolist() == [0, 0, 2, 5, 5]
